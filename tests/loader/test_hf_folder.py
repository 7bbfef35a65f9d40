"""A model's folder: its settings, which files its weights lie in, and what is wrong with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hetrun.errors import ModelFileError
from hetrun.graph import Extent
from hetrun.loader.formats.hf_folder import INDEX, SINGLE, read_folder
from hetrun.loader.hf_mapping import Config

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
W = np.arange(8, dtype=np.float32).reshape(2, 4)


def write_config(folder: Path, text: str | bytes = '{"model_type": "llama"}') -> None:
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 64}, "weight_map": weight_map}))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder with two shards."""
    write_config(tmp_path)
    save_file({"a": W, "b": W}, tmp_path / ONE)
    save_file({"c": W}, tmp_path / TWO)
    write_index(tmp_path, {"a": ONE, "b": ONE, "c": TWO})
    return tmp_path


@pytest.mark.parametrize("name", [".", "config.json", ONE, TWO, INDEX])
def test_shards_are_one_model_whichever_file_is_named(shards: Path, name: str) -> None:
    folder = read_folder(shards / name)
    places = {n: part for n, w in folder.tensors.items() for part in w.parts if isinstance(part, Extent)}
    assert {n: Path(p.path).name for n, p in places.items()} == {"a": ONE, "b": ONE, "c": TWO}
    assert folder.nbytes == sum((shards / n).stat().st_size for n in (ONE, TWO))
    assert folder.config.get_str("model_type", "") == "llama"


def test_one_file(tmp_path: Path) -> None:
    write_config(tmp_path)
    save_file({"a": W}, tmp_path / "weights of mine.safetensors")
    assert list(read_folder(tmp_path).tensors) == ["a"]
    save_file({"b": W}, tmp_path / SINGLE)
    assert list(read_folder(tmp_path).tensors) == ["b"]
    assert list(read_folder(tmp_path / "weights of mine.safetensors").tensors) == ["a"]


def test_one_file_comes_before_an_index_as_in_transformers(shards: Path) -> None:
    save_file({"x": W}, shards / SINGLE)
    assert list(read_folder(shards).tensors) == ["x"]
    assert list(read_folder(shards / ONE).tensors) == ["a", "b", "c"]


def test_the_cache_of_hugging_face_is_links_out_of_the_folder(shards: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    snapshot.mkdir()
    shards_and_more = [p for p in shards.iterdir() if p.is_file()]
    blobs.mkdir()
    for i, path in enumerate(shards_and_more):
        path.rename(blobs / f"{i}")
        (snapshot / path.name).symlink_to(f"../blobs/{i}")
    assert set(read_folder(snapshot).tensors) == {"a", "b", "c"}


def test_files_beside_it(tmp_path: Path) -> None:
    write_config(tmp_path, b"\xef\xbb\xbf" + b'{"model_type": "llama", "rope_scaling": null}')
    save_file({"a": W}, tmp_path / SINGLE)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    folder = read_folder(tmp_path)
    assert not folder.config.has("rope_scaling")
    assert folder.text("chat_template.jinja") == "{{ messages }}"
    assert folder.text("other") is None
    assert not folder.settings("generation_config.json").has("eos_token_id")
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(
        ModelFileError, match=r"generation_config\.json: is not a JSON object: it holds a list"
    ):
        read_folder(tmp_path).settings("generation_config.json")
    assert not folder.settings("generation_config.json").has("eos_token_id")  # an open folder read it before
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match="byte 0 is not UTF-8"):
        folder.text("chat_template.jinja")


def evil(name: object) -> Callable[[Path], object]:
    return lambda folder: write_index(folder, {"a": name})


def remove(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).unlink()
    return folder / names[-1]


NOT_A_NAME = "which is not the name of a .safetensors file in this folder"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json, so it is not a model folder"),
    "config is a folder": (
        lambda f: remove(f, "config.json").mkdir(),
        "config.json: is a directory",
    ),
    "config is a pipe": (
        lambda f: os.mkfifo(remove(f, "config.json")),
        "config.json: is not a regular file",
    ),
    "config is no JSON": (
        lambda f: write_config(f, "{"),
        "config.json: is not a JSON object: expecting prop",
    ),
    "config is a list": (
        lambda f: write_config(f, "[]"),
        "config.json: is not a JSON object: it holds a list",
    ),
    "config has half a character": (
        lambda f: write_config(f, r'{"\\\ud83d\ude00": "\ude00\ud83d"}'),
        r"config.json: is not a JSON object: the \ude00 at character 20 is half of a character",
    ),
    "config is nested": (
        lambda f: write_config(f, '{"a":' + "[" * 100_000),
        "config.json: is not a JSON object: it is nested too deeply",
    ),
    "config is not UTF-8": (lambda f: write_config(f, b'{"\xff"'), "byte 2 is not UTF-8"),
    "index is no JSON": (lambda f: (f / INDEX).write_text(""), f"{INDEX}: is empty"),
    "index has no map": (lambda f: write_index(f, None), "weight_map must be a table that says which"),
    "index maps nothing": (lambda f: write_index(f, {}), "weight_map must be a table that says which"),
    "index has a name twice": (
        lambda f: (f / INDEX).write_text(f'{{"weight_map": {{"a": "{ONE}", "a": "{TWO}"}}}}'),
        "'a' appears twice",
    ),
    "out of the folder": (evil("../../x.safetensors"), f"lies in '../../x.safetensors', {NOT_A_NAME}"),
    "absolute": (evil("/etc/x.safetensors"), NOT_A_NAME),
    "a folder below": (evil("sub/x.safetensors"), NOT_A_NAME),
    "backslash": (evil("..\\x.safetensors"), NOT_A_NAME),
    "NUL": (evil("x\0.safetensors"), NOT_A_NAME),
    "another kind": (evil("config.json"), NOT_A_NAME),
    "no text": (evil(3), NOT_A_NAME),
    "too long": (evil("x" * 300 + ".safetensors"), NOT_A_NAME),
    "half a character": (evil("\ud800.safetensors"), r"the \ud800 at character 54 is half of a character"),
    "missing shard": (lambda f: (f / TWO).unlink(), f"'{TWO}' is missing: download the rest of the model"),
    "missing shards": (
        lambda f: remove(f, ONE, TWO),
        f"2 of its files are, '{ONE}' first, missing",
    ),
    "tensor not in its shard": (
        lambda f: write_index(f, {"a": ONE, "c": ONE}),
        f"{ONE}: the tensor 'c' is not in it, but {INDEX} lists it",
    ),
    "truncated shard": (
        lambda f: (f / TWO).write_bytes((f / TWO).read_bytes()[:-1]),
        f"{TWO}: the file is",
    ),
    "several files without an index": (
        lambda f: (f / INDEX).unlink(),
        f"has 2 safetensors files, but neither {SINGLE} nor {INDEX} to say which",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_with_a_sentence(shards: Path, name: str) -> None:
    harm, message = BROKEN[name]
    harm(shards)
    with pytest.raises(ModelFileError) as caught:
        read_folder(shards)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no model.safetensors: download the model again"),
        (["pytorch_model.bin"], "has its weights in pytorch_model.bin, which can run arbitrary code"),
    ],
)
def test_no_weights(tmp_path: Path, files: list[str], message: str) -> None:
    write_config(tmp_path)
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelFileError, match=message):
        read_folder(tmp_path)


def test_a_folder_of_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "m-Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"name the GGUF file in it: m-Q4_0.gguf$"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda c: c.get_float("nan", 0.0), "nan must be a finite number, it is nan"),
        (lambda c: c.get_float("inf", 0.0), "inf must be a finite number, it is inf"),
        (lambda c: c.get_float("huge", 0.0), "huge must be a finite number, it is 1000"),
        (lambda c: c.get_float("true", 0.0), "true must be a finite number, it is True"),
        (lambda c: c.require_int("inf", 0, 9), "inf must be a whole number, it is inf"),
        (lambda c: c.require_int("true", 0, 9), "true must be a whole number"),
        (lambda c: c.require_int("none", 0, 9), "none is missing: the model is incomplete"),
        (lambda c: c.require_int("huge", 0, 9), "huge must be between 0 and 9, it is 1000"),
        (lambda c: c.get_numbers("many", 3), "many must be 3 finite numbers"),
        (lambda c: c.get_numbers("mixed", 2), "mixed must be 2 finite numbers"),
        (lambda c: c.get_ids("mixed"), "mixed must be a token id or a list of them"),
        (lambda c: c.get_ids("true"), "true must be a token id or a list of them"),
        (lambda c: c.get_token("many"), "many must be a token"),
        (lambda c: c.section("text"), "text must be a table"),
        (lambda c: c.section("table").require_int("n", 0, 1), "table.n must be between 0 and 1, it is 2"),
        (lambda c: c.get_str("many", ""), "many must be a string"),
        (lambda c: c.get_bool("text", False), "text must be true or false"),
        (lambda c: c.get_strings("many", 2), "many must be 2 strings"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, ask: Callable[[Config], Any], message: str) -> None:
    text = '"nan": NaN, "inf": 1e999, "none": null, "true": true, "text": "x", "many": [1, 2], '
    text += f'"mixed": [1, "x"], "table": {{"n": 2}}, "huge": 1{"0" * 400}'
    write_config(tmp_path, f"{{{text}}}")
    save_file({"a": W}, tmp_path / SINGLE)
    config = read_folder(tmp_path).config
    with pytest.raises(ModelFileError) as caught:
        ask(config)
    assert message in str(caught.value)


def test_settings_of_several_kinds() -> None:
    config = Config("c", {"one": 2, "two": [2, 3], "none": None, "text": "<s>", "table": {"content": "</s>"}})
    assert [config.get_ids(k) for k in ("one", "two", "none")] == [(2,), (2, 3), ()]
    assert [config.get_token(k) for k in ("text", "table", "none")] == ["<s>", "</s>", None]
    assert config.get_numbers("one", 3) == (2.0, 2.0, 2.0)
    assert Config("c", {"n": 3.0}).require_int("n", 0, 9) == 3
