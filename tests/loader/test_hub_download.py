"""`hetrun pull` and hf: names against a hub that breaks off, refuses and lies."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loader.hub_stand_in import Hub, Repository, running, sha256
from tests.models.tiny import TinyLlama, write_gguf
from tests.support.tiers import exhaustive
from tests.support.towers import write_text, write_tower

pytestmark = pytest.mark.slow

MIB = 1 << 20
BIG = random.Random(1).randbytes(24 * MIB + 12345)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(TinyLlama("tiny", layers=1), tmp_path_factory.mktemp("m") / "tiny.gguf").read_bytes()


@pytest.fixture
def hub(tiny: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running() as found:
        found.repositories["a/big"] = Repository(
            {"m-Q4_K_M.gguf": BIG, "m-Q8_0.gguf": tiny, "README.md": b"hi"}
        )
        found.repositories["a/tiny"] = Repository({"tiny-F32.gguf": tiny})
        found.repositories["a/gated"] = Repository({"m.gguf": BIG}, gated=True, token="secret")
        found.repositories["a/private"] = Repository({"m.gguf": BIG}, token="secret")
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_HUB_OFFLINE")
        yield found


def hetrun(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hetrun", *arguments]
    return subprocess.run(command, env=os.environ | more, capture_output=True, text=True, check=False)


def pulled(name: str, **more: str) -> Path:
    done = hetrun("pull", name, **more)
    assert (done.returncode, done.stderr) == (0, "")
    return Path(done.stdout.strip())


def sentence(*arguments: str, **more: str) -> str:
    """What is said of a command that cannot be done."""
    done = hetrun(*arguments, **more)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line


def test_cut_off_five_times_it_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    hub.cuts = [3 * MIB, 5 * MIB, 1, 4 * MIB + 7, 2 * MIB]
    path = pulled("a/big")
    assert sha256(path.read_bytes()) == sha256(BIG)
    assert hub.served == len(BIG)
    assert not list(tmp_path.rglob("*incomplete*"))
    hub.asked.clear()
    assert pulled("hf:a/big:Q4_K_M") == path
    assert not any("cdn" in asked for asked in hub.asked)


@pytest.mark.parametrize("times", [2, pytest.param(5, marks=exhaustive)])
def test_killed_again_and_again_it_goes_on_where_it_was(hub: Hub, tmp_path: Path, times: int) -> None:
    """Each connection is given some bytes and then breaks off, until the test kills the command."""
    for size in (2 * MIB, 3 * MIB, 5 * MIB, 1 * MIB, 4 * MIB)[:times]:
        hub.cuts = [size, *[0] * 100]
        process = subprocess.Popen([sys.executable, "-m", "hetrun", "pull", "a/big"], env=os.environ)
        while len(hub.cuts) == 101 or process.poll() is not None:
            time.sleep(0.01)
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    hub.cuts = []
    assert sha256(pulled("a/big").read_bytes()) == sha256(BIG)
    assert hub.served == len(BIG)


def test_a_vision_tower_comes_with_its_model_unless_it_is_not_wanted(hub: Hub, tmp_path: Path) -> None:
    model = write_text("gemma3", tmp_path / "m.gguf").read_bytes()
    tower = write_tower("gemma3", tmp_path / "t.gguf").read_bytes()
    files = {"m-F16.gguf": model, "mmproj-F16.gguf": tower, "mmproj-F32.gguf": BIG}
    for name in ("a/seeing", "a/blind"):
        hub.repositories[name] = Repository(dict(files))
    code = "from hetrun.loader.hub.resolve import find; print(find('hf:a/blind', pictures=False))"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert not [*(tmp_path / "hf").rglob("mmproj*")]
    path = pulled("a/seeing")
    assert (path.parent / "mmproj-F16.gguf").read_bytes() == tower
    assert [file.name for file in (tmp_path / "hf").rglob("mmproj*")] == ["mmproj-F16.gguf"]
    facts = json.loads(hetrun("inspect", "hf:a/seeing", "--json", HF_HUB_OFFLINE="1").stdout)
    assert Path(facts["pictures"]["file"]).name == "mmproj-F16.gguf"


def test_what_has_another_checksum_is_thrown_away(hub: Hub, tmp_path: Path) -> None:
    hub.wrong = True
    assert "does not match the hub's checksum and was removed" in sentence("pull", "a/big")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > MIB]
    hub.wrong = False
    assert sha256(pulled("a/big").read_bytes()) == sha256(BIG)


def test_two_at_once_read_it_once(hub: Hub) -> None:
    command = [sys.executable, "-m", "hetrun", "pull", "a/big"]
    both = [subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate()[0] for process in both}
    assert len(paths) == 1
    assert hub.served == len(BIG)


def test_where_nothing_came_nothing_is_said_to_be_kept(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # no one listens there
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        said = sentence("pull", "a/big")
    assert "the hub cannot be reached" in said
    assert said.endswith("; try again later")


def test_a_connection_over_which_nothing_comes_is_given_up_and_gone_on_with(hub: Hub) -> None:
    hub.cuts = [9 * MIB, *[0] * 50]
    said = sentence("pull", "a/big")
    assert said.endswith("the part already downloaded is kept: pull it again to continue")
    hub.cuts = []
    pulled("a/big")
    assert hub.served == len(BIG)


def test_tokens_go_to_the_hub_and_nowhere_else(hub: Hub) -> None:
    assert "its owners must grant access: request it at" in sentence("pull", "a/gated")
    assert "no such repository, or it is private" in sentence("pull", "a/private")
    pulled("a/private", HF_TOKEN="secret")
    assert hub.tokens == {("127.0.0.1", "Bearer secret")}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a/none", "there is no such repository"),
        ("a/big:Q3_K", "there is no Q3_K; it has Q4_K_M, Q8_0"),
        ("a/big@v7", "has no revision v7"),
        ("a/b/c", "is not a valid name on the hub"),
    ],
)
def test_what_is_not_there_is_one_sentence(hub: Hub, name: str, says: str) -> None:
    assert says in sentence("pull", name)


@pytest.mark.parametrize(
    ("status", "says"), [(500, "try again later"), (429, "wait a while"), (403, "token")]
)
def test_a_hub_in_trouble_is_one_sentence(hub: Hub, status: int, says: str) -> None:
    hub.status = status
    assert says in sentence("pull", "a/big")


def lfs(sha256: str) -> dict[str, object]:
    return {"size": 5, "sha256": sha256, "pointerSize": 1}


def test_a_disk_without_room_is_said_before_anything_is_read(hub: Hub) -> None:
    hub.repositories["a/big"].lies = [
        {
            "rfilename": "m.gguf",
            "size": 1 << 50,
            "lfs": {"size": 1 << 50, "sha256": "0" * 64, "pointerSize": 1},
        }
    ]
    assert "free some space, or choose another folder with HF_HOME" in sentence("pull", "a/big")
    assert hub.served == 0


def test_names_and_numbers_of_a_hub_that_means_harm(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["a/big"].lies = [
        {"rfilename": "../../../evil-Q4_K_M.gguf", "size": 5},
        {"rfilename": "x.gguf", "size": 9 << 20, "lfs": lfs("../../evil")},
    ]
    hetrun("pull", "a/big")
    assert not list(tmp_path.rglob("*evil*"))
    hub.repositories["a/big"].commit = "../../evil"
    assert "does not answer like Hugging Face's hub; check HF_ENDPOINT" in sentence("pull", "a/big")


def test_a_model_is_brought_when_it_is_named_and_used_without_a_net_afterwards(hub: Hub, tiny: bytes) -> None:
    arguments = ("run", "hi", "-n", "2", "--temp", "0", "--json", "-m")
    assert "is not here, and HF_HUB_OFFLINE or --offline forbids" in sentence(
        *arguments, "hf:a/tiny", "--offline"
    )
    first = hetrun(*arguments, "hf:a/tiny")
    assert first.returncode == 0, first.stderr
    hub.status = 500
    hub.asked.clear()
    for name, more in (("hf:a/tiny", {}), ("hf:a/tiny:f32", {"HF_HUB_OFFLINE": "1"}), ("tiny-F32", {})):
        again = hetrun(*arguments, name, **more)
        assert json.loads(again.stdout)["tokens"] == json.loads(first.stdout)["tokens"]
    assert hetrun("inspect", "hf:a/tiny", "--json").returncode == 0
    assert hetrun(*arguments, "hf:a/tiny", "--spec", "draft:hf:a/tiny").returncode == 0
    assert hub.asked == []


def listed() -> dict[str, int]:
    """What `list` shows besides the demonstration model."""
    rows = json.loads(hetrun("list", "--json").stdout)
    return {row["name"]: row["size"] for row in rows if row["name"] != "smollm2"}


def test_list_and_rm(hub: Hub, tmp_path: Path, tiny: bytes) -> None:
    pulled("a/big")
    pulled("a/big:Q8_0")
    assert listed() == {"hf:a/big:Q4_K_M": len(BIG), "hf:a/big:Q8_0": len(tiny)}
    assert "add --yes" in sentence("rm", "hf:a/big:Q4_K_M")
    assert "no model is called hf:a/big:Q5_0 here" in sentence("rm", "hf:a/big:Q5_0", "--yes")
    assert json.loads(hetrun("rm", "hf:a/big:Q4_K_M", "--yes", "--json").stdout)["freed"] == len(BIG)
    assert list(listed()) == ["hf:a/big:Q8_0"]
    assert sha256(
        (tmp_path / "hf/hub/models--a--big/snapshots").rglob("*.gguf").__next__().read_bytes()
    ) == sha256(tiny)
    assert hetrun("rm", "hf:a/big", "--yes").returncode == 0
    assert not (tmp_path / "hf/hub/models--a--big").exists()
    assert listed() == {}
