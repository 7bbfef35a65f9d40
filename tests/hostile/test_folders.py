"""Folders of strangers: nothing in them runs, nothing leads out of them, no file in them is waited for."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hetrun.errors import ModelFileError
from hetrun.loader.formats.hf_folder import read_folder
from hetrun.loader.open_model import open_model
from tests.hostile.mutations import Case
from tests.hostile.pool import Child, write_case
from tests.hostile.seeds import named
from tests.hostile.trial import Outcome

RAN = "it-ran"


def outcome(child: Child, path: Path) -> Outcome:
    """What becomes of a folder."""
    child.ask(path, check=False)
    return child.finish()


# --- code


class Runs:
    """What a pickle can do."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Callable[[str, int], int], tuple[str, int]]:
        return os.open, (str(self.canary), os.O_CREAT | os.O_WRONLY)


def booby_trapped(folder: Path) -> Path:
    """A model that works, with everything in its folder that something might run; the canary."""
    write_case(Case(named("hf-sharded")), folder)
    canary = folder.parent / RAN
    code = f"import os; os.close(os.open({str(canary)!r}, os.O_CREAT | os.O_WRONLY))\n"
    # What transformers runs with trust_remote_code, and what Python finds in a working directory.
    own = ("configuration_mine", "modeling_mine", "tokenization_mine")
    found = (
        "json",
        "numpy",
        "torch",
        "tokenizers",
        "jinja2",
        "llama_cpp",
        "gguf",
        "hetrun",
        "tests",
        "conftest",
    )
    for name in (*own, *found, "__init__", "__main__", "sitecustomize", "usercustomize", "setup"):
        (folder / f"{name}.py").write_text(code)
    (folder / "run.sh").write_text(f"touch {canary}\n")
    (folder / "a.pth").write_text(f"import os; os.mkdir({str(canary)!r})\n")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "tokenizer.model", "model.pkl"):
        (folder / name).write_bytes(pickle.dumps(Runs(canary)))
    mine = {
        f"Auto{name}": f"modeling_mine.{name}"
        for name in ("Config", "Model", "ModelForCausalLM", "Tokenizer")
    }
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        settings |= {"auto_map": mine, "trust_remote_code": True, "custom_generate": "mine/mine"}
        (folder / name).write_text(json.dumps(settings))
    return canary


@pytest.mark.parametrize(
    "command",
    [
        ("check", "."),
        ("inspect", "."),
        ("plan", "-m", "."),
        ("convert", ".", "-q", "q8_0", "-o", "../out.gguf"),
        ("run", "Hello", "-m", ".", "-n", "2", "--seed", "1", "--json"),  # its text may be empty
    ],
    ids=lambda command: command[0],
)
def test_nothing_in_a_folder_runs(tmp_path: Path, command: tuple[str, ...]) -> None:
    canary = booby_trapped(tmp_path / "model")
    path = f"import sys; sys.path[:] = {sys.path!r}; from hetrun.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", path, *command],
        cwd=tmp_path / "model",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not canary.exists()


def test_the_canary_sings(tmp_path: Path) -> None:
    """Or else the test above would prove nothing."""
    canary = booby_trapped(tmp_path / "model")
    subprocess.run([sys.executable, "-c", "import modeling_mine"], cwd=tmp_path / "model", check=True)
    assert canary.exists()
    canary.unlink()
    os.close(pickle.loads((tmp_path / "model" / "training_args.bin").read_bytes()))
    assert canary.exists()


# --- files that are none


def fifo(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


def listening(path: Path) -> None:
    """A socket; its name may have some hundred characters only."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def empty(path: Path) -> None:
    path.touch()


def endless(path: Path) -> None:
    """500 MB that take no room."""
    with path.open("wb") as file:
        file.truncate(500 << 20)


def of_the_system(path: Path) -> None:
    """Regular, never ending, and 0 bytes long, as it says."""
    path.symlink_to("/proc/self/pagemap")


KINDS = (fifo, loop, device, folder, nowhere, listening, empty, endless, of_the_system)
# Without these there is a model all the same: it answers token ids, or knows less of itself.
SPARE = {
    *("generation_config.json", "chat_template.jinja", "tokenizer_config.json"),
    *("tokenizer.json", "vocab.json", "merges.txt"),
}
SHARDS = tuple(f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3))
NEEDED = {"config.json", "model.safetensors", "model.safetensors.index.json", *SHARDS}
# The two seeds have these files between them; to look costs seconds, which a test has and collecting has not.
OF_OPT = {"model.safetensors", "merges.txt", "vocab.json"}
BY_NAME = {name: "hf-opt" if name in OF_OPT else "hf-sharded" for name in sorted(NEEDED | SPARE)}
JSON = [name for name, seed in BY_NAME.items() if seed == "hf-sharded" and name.endswith(".json")]


def test_these_are_the_files_of_the_seeds() -> None:
    assert BY_NAME == {name: seed for seed in ("hf-opt", "hf-sharded") for name, _ in named(seed).files.items}


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_no_file_is_refused(child: Child, tmp_path: Path, name: str) -> None:
    for kind in KINDS:
        model = tmp_path / kind.__name__
        write_case(Case(named(BY_NAME[name])), model)
        (model / name).unlink()
        kind(model / name)
        found = outcome(child, model)
        assert found.end in ("refused", "loaded"), f"{kind.__name__}: {found}"
        missing = kind in (loop, nowhere)  # as if it were not there
        if name in NEEDED or not missing:
            assert found.end == "refused", f"{kind.__name__}: {found}"
        if found.end == "refused":
            assert str(model) in found.what


# --- links


def cached(folder: Path) -> Path:
    """A model as the cache of Hugging Face holds it: every file is a link to a blob outside its folder."""
    home = folder / "models--someone--tiny"
    snapshot, blobs = home / "snapshots" / "0123abcd", home / "blobs"
    write_case(Case(named("hf-sharded")), folder / "plain")
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted((folder / "plain").iterdir())):
        path.rename(blobs / f"{i:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i:040x}")
    return snapshot


def test_a_cache_of_links_works_whole(child: Child, tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    assert outcome(child, snapshot).end == "loaded"
    assert open_model(snapshot).name == "tiny"
    again = tmp_path / "by another name"
    again.symlink_to(snapshot)
    assert outcome(child, again).end == "loaded"


def test_links_of_a_local_folder_may_lead_anywhere(tmp_path: Path) -> None:
    """A link is made by a user who can write here, an index by a stranger."""
    (tmp_path / "shards").mkdir()
    model = tmp_path / "model"
    write_case(Case(named("hf-sharded")), model)
    for path in model.glob("*.safetensors"):
        shutil.move(path, tmp_path / "shards" / path.name)
        path.symlink_to(tmp_path / "shards" / path.name)
    assert len(read_folder(model).shards) == 3
    index = json.loads((model / "model.safetensors.index.json").read_text())
    for leads in ("../shards/", f"{tmp_path}/shards/", "./", "sub/../"):
        index["weight_map"] = {k: leads + v.rpartition("/")[2] for k, v in index["weight_map"].items()}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelFileError, match="which is not the name of a"):
            read_folder(model)


def test_a_link_to_a_secret_quotes_little_of_it(child: Child, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("root:$6$abcdefghijkl:19000:0:99999:7:::\n" * 50)
    for name in (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model-00001-of-00003.safetensors",
    ):
        model = tmp_path / f"of {name}"
        write_case(Case(named("hf-sharded")), model)
        (model / name).unlink()
        (model / name).symlink_to(secret)
        found = outcome(child, model)
        assert found.end == "refused"
        assert "$6$" not in found.what


# --- JSON


def test_of_a_setting_said_twice_the_last_counts_as_in_transformers(tmp_path: Path) -> None:
    model = write_case(Case(named("hf-sharded")), tmp_path / "model")
    config = model / "config.json"
    said = config.read_text()
    config.write_text(said.replace("{", '{"hidden_size": 1e999, "model_type": ["x"],', 1))
    assert open_model(model).require_int("embedding_length", 1, 1000) == 64
    config.write_text(said.rstrip().removesuffix("}") + ', "hidden_size": 65}')
    with pytest.raises(ModelFileError, match="65"):
        open_model(model).require_int("embedding_length", 1, 64)


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize(
    "raw",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"a":[' * 50_000 + b"]}" * 50_000, b"{" + b'"a":1,' * (2 << 20)],
    ids=["lists", "tables", "both", "many"],
)
def test_json_without_end_is_refused(child: Child, tmp_path: Path, name: str, raw: bytes) -> None:
    model = write_case(Case(named("hf-sharded")), tmp_path / "model")
    (model / name).write_bytes(raw)
    found = outcome(child, model)
    assert found.end == "refused"
    assert name in found.what
