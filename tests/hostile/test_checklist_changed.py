"""Files that are cut or replaced while they are in use, and those whose weights lie far behind 4 GiB."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hetrun.api.local_model import as_options
from hetrun.backend import Available
from hetrun.backends import libllama
from hetrun.backends.libllama import crash_probe
from hetrun.config import Settings
from hetrun.errors import ModelFileError
from hetrun.executor.planned_model import open_planned
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.gguf_source import GGUFModel
from hetrun.loader.open_model import open_model
from hetrun.loader.weight_reader import FileReader
from tests.hostile.cases_gguf import across
from tests.hostile.checklist import good_gguf, write_folder
from tests.hostile.trees import write_gguf
from tests.models import foreign

ROOT = Path(__file__).parents[2]
installed = pytest.mark.skipif(
    not isinstance(libllama.probe(), Available), reason="llama.cpp is not installed"
)


def write_ours(path: Path) -> None:
    path.write_bytes(write_gguf(good_gguf()))


def write_foreign(path: Path) -> None:
    foreign.write(foreign.GPT2, path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


def vanish(path: Path) -> None:
    path.unlink()


CHANGES = pytest.mark.parametrize("change", [cut, replace, vanish])


@CHANGES
def test_between_header_and_weights(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "model.gguf"
    write_ours(path)
    source = open_model(path)
    change(path)
    with pytest.raises(ModelFileError, match=r"model\.gguf: .*(open it again|No such file or directory)"):
        open_planned(source, as_options(Settings(threads=1)))


@CHANGES
def test_a_shard(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = write_folder(tmp_path)
    source = open_model(folder)
    change(folder / "model-00002-of-00002.safetensors")
    with pytest.raises(
        ModelFileError, match=r"00002\.safetensors: .*(open it again|No such file or directory)"
    ):
        open_planned(source, as_options(Settings(threads=1)))


@installed
@CHANGES
def test_between_header_and_llama_cpp(tmp_path: Path, change: Callable[[Path], None]) -> None:
    source = open_model(foreign.write(foreign.GPT2, tmp_path / "gpt2.gguf"))
    change(tmp_path / "gpt2.gguf")
    with pytest.raises(ModelFileError, match=r"gpt2\.gguf: .*changed while in use"):
        open_planned(source, as_options(Settings(threads=1)))


@installed
@CHANGES
def test_between_the_trial_and_llama_cpp(
    tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = foreign.write(foreign.GPT2, tmp_path / "gpt2.gguf")
    source = open_model(path)
    monkeypatch.setattr(crash_probe, "check", lambda files: change(path))
    with pytest.raises(ModelFileError, match=r"gpt2\.gguf: .*changed while in use"):
        open_planned(source, as_options(Settings(threads=1)))


@installed
@pytest.mark.parametrize("write", [write_ours, write_foreign])
def test_a_model_that_runs_needs_its_file_no_more(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """Where weights are mapped, this ends the process by SIGBUS."""
    path = tmp_path / "model.gguf"
    write(path)
    code = (
        "import os, sys\n"
        "from hetrun import LLM, SamplingParams\n"
        "params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)\n"
        "with LLM(sys.argv[1], threads=1) as llm:\n"
        "    before = llm.generate('Hello', params)[0].tokens\n"
        "    os.truncate(sys.argv[1], 0)\n"
        "    assert llm.generate('Hello', params)[0].tokens == before\n"
        "print('fine')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


@pytest.mark.parametrize("border", [1 << 32, 1 << 33])
def test_a_tensor_across_a_border_of_4_gib(tmp_path: Path, border: int) -> None:
    """No offset has only 32 bits."""
    path = tmp_path / "large.gguf"
    across(path, border)
    values = np.arange(32, dtype="<f4")
    with open(path, "r+b") as file:
        file.seek(border - 64)
        file.write(values.tobytes())
    weight = GGUFModel(read_gguf(path), "none").find("w")
    assert weight is not None
    out, reader = np.empty(128, np.uint8), FileReader()
    reader.read(weight, out)
    reader.close()
    assert (out.view("<f4") == values).all()
