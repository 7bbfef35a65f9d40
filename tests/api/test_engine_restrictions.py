"""What an engine's process can still do: code runs in one, after it has restricted itself for its model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from hetrun.api import engine_restrictions
from hetrun.api.engine_restrictions import of_model
from hetrun.config import dirs
from hetrun.errors import HetrunError, OptionError
from hetrun.system.sandbox import kernel, landlock, seccomp
from hetrun.system.sandbox.landlock import READ, READ_DIR, READ_FILE
from tests.support.restrictions import needs_landlock, needs_landlock_of_tcp, needs_seccomp

START = """
import json, os, socket, subprocess, sys, tempfile, threading
from hetrun.api.engine_restrictions import restrict
restrict(json.loads(sys.argv[1]))
def attempt(work):
    try:
        return str(work())
    except OSError as error:
        return os.strerror(error.errno)
"""
REFUSED = ("Permission denied", "Operation not permitted")


def in_engine(code: str, options: Mapping[str, object], **environment: str) -> str:
    """What the code prints in a process that is restricted for an engine with these options."""
    ended = subprocess.run(
        [sys.executable, "-c", START + textwrap.dedent(code), json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | environment,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "tower.gguf").write_bytes(b"tower")
    (folder / "id_rsa").write_bytes(b"secret")
    (tmp_path / "notes.txt").write_text("secret")
    path = folder / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return path


@needs_landlock
def test_files(model: Path) -> None:
    said = in_engine(
        f"""
        folder = {str(model.parent)!r}
        print(json.dumps(dict(
            model=attempt(lambda: open({str(model)!r}, "rb").read()),
            tower=attempt(lambda: open(folder + "/tower.gguf", "rb").read()),
            beside=attempt(lambda: open(folder + "/id_rsa", "rb").read()),
            above=attempt(lambda: open(folder + "/../notes.txt").read()),
            write=attempt(lambda: open({str(model)!r}, "r+b")),
            cut=attempt(lambda: os.truncate({str(model)!r}, 0)),
            delete=attempt(lambda: os.unlink({str(model)!r})),
            make=attempt(lambda: open(folder + "/new.gguf", "wb")),
            link=attempt(lambda: os.symlink("/etc", folder + "/link")),
            home=attempt(lambda: os.listdir(os.path.expanduser("~"))),
            root=attempt(lambda: os.listdir("/")),
            shadow=attempt(lambda: open("/etc/shadow").read()),
            hetrun=attempt(lambda: open(sys.modules["hetrun"].__file__, "a")),
        )))
        """,
        {"model": str(model)},
    )
    found = json.loads(said)
    assert (found.pop("model"), found.pop("tower")) == ("b'GGUF'", "b'tower'")
    for what, answer in found.items():
        assert answer in REFUSED, (what, answer)
    assert model.read_bytes() == b"GGUF"


@needs_landlock
def test_what_it_needs_is_there(model: Path) -> None:
    said = in_engine(
        """
        from hetrun.config import dirs
        def writes(folder):
            with open(os.path.join(folder, "x"), "w") as file:
                file.write("x")
            os.replace(os.path.join(folder, "x"), os.path.join(folder, "y"))
        print(json.dumps(dict(
            cache=attempt(lambda: writes(dirs().cache)),
            temporary=attempt(lambda: tempfile.NamedTemporaryFile().name),
            memory=attempt(lambda: open(f"/proc/self/fd/{os.memfd_create('kv')}", "r+b").write(b"x")),
            numpy=attempt(lambda: __import__("numpy").ones(3).sum()),
            child=attempt(lambda: subprocess.run([sys.executable, "-c", "import numpy"], check=True)),
            cores=attempt(lambda: os.listdir("/sys/devices/system/cpu")),
            kernel=attempt(lambda: open("/proc/meminfo").read()),
            pair=attempt(lambda: socket.socketpair()),
            thread=attempt(lambda: threading.Thread(target=print).start()),
        )))
        """,
        {"model": str(model)},
    )
    found = json.loads(said.splitlines()[-1])
    assert found["cache"] == "None"
    assert found["temporary"].startswith(str(dirs().cache / "tmp"))
    for what, answer in found.items():
        assert answer not in REFUSED, (what, answer)


@pytest.mark.parametrize("by", [pytest.param("landlock", marks=needs_landlock_of_tcp), "seccomp"])
def test_network(model: Path, by: str) -> None:
    """A server on this machine that could be reached otherwise; with either restriction alone."""
    if by == "seccomp" and not seccomp.is_there():
        pytest.skip("this kernel takes no filters of system calls from this process")
    other = "_of_calls" if by == "landlock" else "_of_files"
    code = """
    address = ("127.0.0.1", %d)
    print(json.dumps(dict(
        tcp=attempt(lambda: socket.create_connection(address, 5)),
        listen=attempt(lambda: socket.create_server(("127.0.0.1", 0))),
        udp=attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", address)),
        raw=attempt(lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM)),
        packets=attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
    )))
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        without = f"from hetrun.api import engine_restrictions as e; e.{other} = lambda *given: []"
        port = server.getsockname()[1]
        found = json.loads(
            subprocess.run(
                [
                    *(sys.executable, "-c"),
                    f"{without}\n{START}{textwrap.dedent(code % port)}",
                    json.dumps({"model": str(model)}),
                ],
                check=True,
                capture_output=True,
                text=True,
                timeout=60,
            ).stdout
        )
        assert found["tcp"] in REFUSED
        assert found["listen"] in REFUSED
        if by == "seccomp":
            assert all(answer in REFUSED for answer in found.values()), found
        with pytest.raises(TimeoutError):
            server.accept()


@needs_landlock
@needs_seccomp
def test_turned_off(model: Path) -> None:
    code = "print(attempt(lambda: os.listdir(os.path.expanduser('~'))))"
    assert in_engine(code, {"model": str(model)}) in REFUSED
    assert in_engine(code, {"model": str(model), "sandbox": "off"}).startswith("[")
    assert in_engine(code, {"model": str(model)}, HETRUN_SANDBOX="off").startswith("[")
    assert in_engine(code, {"model": str(model), "sandbox": "on"}) in REFUSED


def test_a_kernel_without(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(number: int, *arguments: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(kernel, "call", missing)
    monkeypatch.setattr(kernel, "promise_no_more_rights", lambda: None)
    monkeypatch.setattr(engine_restrictions, "_moved_temporary_files", lambda: True)
    engine_restrictions.restrict({"model": str(model)})
    with pytest.raises(OptionError, match=r"--sandbox on is not possible here: Landlock: .*; seccomp: "):
        engine_restrictions.restrict({"model": str(model), "sandbox": "on"})


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(HetrunError, match="does not exist"):
        engine_restrictions.restrict({"model": "/nowhere/x.gguf"})


def test_places_of_a_model(tmp_path: Path, model: Path) -> None:
    """Links lead out of a folder: Hugging Face's cache has its files elsewhere."""
    blob = tmp_path / "blobs" / "0123"
    blob.parent.mkdir()
    blob.write_bytes(b"x")
    snapshot = tmp_path / "snapshots" / "1a2b" / "Q4"
    snapshot.mkdir(parents=True)
    (snapshot / "m.gguf").symlink_to(blob)
    (snapshot.parent / "mmproj.gguf").write_bytes(b"x")
    found = dict(of_model(snapshot / "m.gguf"))
    assert found[str(blob)] == READ_FILE
    assert found[str(snapshot)] == READ_DIR
    assert found[str(snapshot.parent / "mmproj.gguf")] == READ_FILE
    assert str(model.parent / "id_rsa") not in dict(of_model(model))
    assert dict(of_model(model.parent))[str(model.parent)] == READ


def test_rights_of_one_path_come_together() -> None:
    assert landlock.merged([("a", 1), ("b", 2)], [("a", 4)]) == {"a": 5, "b": 2}


@needs_landlock
def test_with_a_gpu(model: Path, tmp_path: Path) -> None:
    """Simulated by a pattern that finds something: reading is free there, and writing is not."""
    code = f"""
    print(json.dumps(dict(
        read=attempt(lambda: os.listdir({str(tmp_path)!r})),
        unix=attempt(lambda: socket.socket(socket.AF_UNIX)),
        write=attempt(lambda: open({str(model)!r}, "r+b")),
        tcp=attempt(lambda: socket.create_connection(("127.0.0.1", 9), 5)),
    )))
    """
    gpu = "from hetrun.api import engine_restrictions as e; e.GPU = ('/dev/null',)\n"
    ended = subprocess.run(
        [sys.executable, "-c", gpu + START + textwrap.dedent(code), json.dumps({"model": str(model)})],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = json.loads(ended.stdout)
    assert found["write"] in REFUSED
    assert found["read"] not in REFUSED
    assert found["unix"] not in REFUSED
    if landlock.version() >= 4 or seccomp.is_there():
        assert found["tcp"] in REFUSED
