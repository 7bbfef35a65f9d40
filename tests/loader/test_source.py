"""Folders of Hugging Face as models: what is known of them, what they are refused for, and that they run."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hetrun import LLM
from hetrun.client.sampling_params import SamplingParams
from hetrun.engine.factory import open_tokenizer
from hetrun.errors import ModelFileError, OptionError, UserError
from hetrun.graph import Weight
from hetrun.loader.architectures import build_graph
from hetrun.loader.hf_mapping import HfModel, Imported
from hetrun.loader.hf_source import HfSource
from hetrun.loader.open_model import open_model
from hetrun.loader.tensor_list import parameters
from hetrun.models import HF_TYPES
from tests.models import hf, tiny
from tests.models.cases import GQA
from tests.plugins.strangers import Register
from tests.support.rig import model_file

ROW = hf.Row(
    "source", "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, shard="150KB"
)
GREEDY = SamplingParams(max_tokens=12, temperature=0)
PROMPT = "The thing is that you and the other one are"
BACKENDS = ["reference", "llamacpp"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the test's own."""
    return shutil.copytree(hf.folder(ROW), tmp_path / "tiny llama")


def write(folder: Path, name: str, **values: object) -> None:
    """Settings in one of the folder's JSON files."""
    path = folder / name
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**found, **values}))


def opened(path: Path) -> HfSource:
    source = open_model(path)
    assert isinstance(source, HfSource)
    return source


def test_what_is_known_of_a_folder(folder: Path) -> None:
    source = opened(folder)
    shards = list(folder.glob("*.safetensors"))
    assert len(shards) > 1
    assert (source.architecture, source.name, source.path) == ("llama", "tiny llama", str(folder))
    assert source.nbytes == sum(p.stat().st_size for p in shards)
    assert parameters(source) == hf.random_model(ROW).num_parameters()
    assert source.require_int("vocab_size", 1, 1000) == tiny.VOCAB
    assert source.require_int("block_count", 1, 9) == 2
    assert source.get_int("no such key", 7, 0, 9) == 7
    assert source.get_float("rope.freq_base", 0.0) == 5e5
    assert source.get_bool("rope.halves", False)
    assert source.get_numbers("attention.head_count", 2) == (4.0, 4.0)
    assert source.find("no such weight") is None
    assert all(source.find(w.name) is w for w in source.weights())
    assert {w.name for w in build_graph(source).weights().values()} == {w.name for w in source.weights()}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "*-00002-of-*.safetensors"])
def test_a_file_in_it_opens_the_folder(folder: Path, name: str) -> None:
    assert opened(next(folder.glob(name))).path == str(folder)


def test_the_name_in_the_cache_of_hugging_face(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some-org--Tiny-1B" / "snapshots" / "0a1b2c"
    shutil.copytree(folder, snapshot)
    assert opened(snapshot).name == "Tiny-1B"


@pytest.mark.parametrize(
    ("said", "files", "expected", "place"),
    [
        ("one", {}, {"default": "one"}, "tokenizer_config.json"),
        (None, {}, {}, "tokenizer_config.json"),
        ("", {}, {}, "tokenizer_config.json"),
        ("one", {"chat_template.jinja": "file"}, {"default": "file"}, "chat_template.jinja"),
        (
            [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
            {},
            {"tool_use": "t", "default": "d"},
            "tokenizer_config.json",
        ),
        ([{"name": "rag", "template": "r"}], {}, {"rag": "r"}, "tokenizer_config.json"),
        (
            "one",
            {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "r"},
            {"default": "file", "rag": "r"},
            "chat_template.jinja and additional_chat_templates",
        ),
    ],
)
def test_chat_templates(
    folder: Path, said: object, files: dict[str, str], expected: dict[str, str], place: str
) -> None:
    write(folder, "tokenizer_config.json", chat_template=said)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    found = opened(folder)
    assert (found.chat_templates, found.chat_template_place) == (expected, place)


def test_chat_templates_of_a_gguf_file(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_chat_template(
        [
            {"name": "rag", "template": "r"},
            {"name": "default", "template": "d"},
            {"name": "no", "template": ""},
        ]
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_model(tmp_path / "x.gguf")
    assert found.chat_templates == {"default": "d", "rag": "r"}
    assert found.chat_template_place == "tokenizer.chat_template"


@pytest.mark.parametrize("said", [3, [3], [{"name": "x"}], {"default": "x"}])
def test_a_template_of_another_kind_is_named(folder: Path, said: object) -> None:
    write(folder, "tokenizer_config.json", chat_template=said)
    with pytest.raises(ModelFileError, match=r"tokenizer_config.json: chat_template must be a text"):
        _ = opened(folder).chat_templates


@pytest.mark.parametrize(
    ("said", "expected"),
    [({}, None), *(({"temperature": t}, e) for t, e in ((0.6, 0.6), (None, None), (-1, None), (1e-30, 0)))],
)
def test_temperature(folder: Path, said: dict[str, Any], expected: float | None) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    write(folder, "generation_config.json", **said)
    assert opened(folder).temperature == expected


RUNS = f"folders of {', '.join(sorted(HF_TYPES))} run"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"model_type": "t5"}, f"model_type is 't5'; {RUNS}, of other models take a GGUF file"),
        ({"model_type": None}, "model_type is missing; folders of"),
        ({"model_type": 3}, "model_type must be a string, it is 3"),
        ({"model_type": "../llama"}, "model_type is '../llama'; folders of"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "its weights are quantised by 'gptq': get the orig",
        ),
        ({"hidden_size": float("inf")}, "hidden_size must be a whole number, it is inf"),
        ({"num_hidden_layers": 3}, "is missing: the model is incomplete"),
    ],
)
def test_what_cannot_run_is_named(folder: Path, said: dict[str, Any], message: str) -> None:
    write(folder, "config.json", **said)
    with pytest.raises(ModelFileError) as caught:
        open_model(folder)
    assert message in str(caught.value)
    assert str(folder / "config.json") in str(caught.value)


def test_code_in_a_folder_never_runs(folder: Path) -> None:
    (folder / "modeling_evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    write(
        folder, "config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}, trust_remote_code=True
    )
    with LLM(folder, backends=["reference"]) as llm:
        llm.generate(PROMPT, GREEDY)
    assert not (folder / "ran").exists()


def test_a_plugin_imports_a_type_of_its_own(folder: Path, register: Register) -> None:
    def from_hf(model: HfModel) -> Imported:
        weights: Mapping[str, Weight] = {"token_embd.weight": model.weight("model.embed_tokens.weight")}
        return Imported({"block_count": model.config.require_int("num_hidden_layers", 1, 9)}, weights)

    plugin = SimpleNamespace(name="mine", from_hf=from_hf)
    register("models", "my_type", plugin)
    write(folder, "config.json", model_type="my_type")
    source = opened(folder)
    assert (source.architecture, source.require_int("block_count", 1, 9)) == ("mine", 2)
    assert source.require_int("vocab_size", 1, 1000) == tiny.VOCAB


@pytest.mark.parametrize(
    "text", ["The thing is", "<|im_start|>user\nÄ <|im_end|>\n", "  \n\n a\x00b 日本 👋🏽", ""]
)
def test_tokens_are_those_of_llama_cpp(folder: Path, text: str) -> None:
    """The same vocabulary in a GGUF file, read by llama.cpp."""
    ours, theirs = open_tokenizer(open_model(folder)), open_tokenizer(open_model(model_file(GQA)))
    assert ours is not None
    assert theirs is not None
    tokens = ours.encode(text)
    assert tokens == theirs.encode(text)
    assert [ours.piece(t) for t in range(tiny.VOCAB)] == [theirs.piece(t) for t in range(tiny.VOCAB)]
    assert [ours.is_end(t) for t in range(tiny.VOCAB)] == [theirs.is_end(t) for t in range(tiny.VOCAB)]
    assert (ours.bos_text, ours.eos_text) == (theirs.bos_text, theirs.eos_text)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_folder_answers_as_transformers_does(folder: Path, backend: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(PROMPT)["input_ids"]
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=tiny.EOS, pad_token_id=tiny.EOS
    )
    expected = [t for t in out[0, len(ids) :].tolist() if t != tiny.EOS]
    messages = [{"role": "user", "content": "Hi"}]
    with LLM(folder, backends=[backend], kv_type="f32") as llm:
        found = llm.generate(PROMPT, GREEDY)[0]
        assert llm.tokenize(PROMPT) == ids
        assert found.tokens == expected
        assert found.text.encode() == tokenizer.decode(expected).encode()
        theirs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert llm.chat(messages, GREEDY).usage.prompt_tokens == len(theirs)
        assert llm.info.template_origin == "the model's own (tokenizer_config.json)"
        np.testing.assert_allclose(llm.logits(ids), hf.logits(folder, ids), rtol=0, atol=1e-3)


def test_without_a_tokenizer_only_token_ids(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with LLM(folder, backends=["reference"]) as llm:
        assert len(llm.generate([[5, 6, 7]], GREEDY)[0].tokens) == 12
        with pytest.raises(
            OptionError, match=r"\(a folder needs tokenizer.json\), so it takes only token ids"
        ):
            llm.generate(PROMPT, GREEDY)
        with pytest.raises(OptionError, match=r"a folder needs tokenizer.json"):
            llm.tokenize(PROMPT)


def test_a_padded_table(folder: Path) -> None:
    """More rows than the tokenizer has tokens: the model may choose one that stands for nothing."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"] = {k: v for k, v in raw["model"]["vocab"].items() if v < tiny.VOCAB - 40}
    raw["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with LLM(folder, backends=["reference"]) as llm:
        bias = {tiny.VOCAB - 1: 1000.0}
        found = llm.generate(PROMPT, SamplingParams(max_tokens=3, temperature=0, logit_bias=bias))[0]
        assert (found.tokens, found.text) == ([tiny.VOCAB - 1] * 3, "")
        assert llm.info.n_vocab == tiny.VOCAB


def test_a_path_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"does not exist; give a .gguf file, a folder with safetensors, hf:"):
        LLM("no/such/model")


def test_a_model_that_cannot_be_described_is_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise OptionError("no")

    def engines() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name == "hetrun-engine"}

    monkeypatch.setattr("hetrun.api.local_model.describe", fail)
    before = engines()  # other tests of this process may share a model that stays open
    with pytest.raises(OptionError, match="no"):
        LLM(folder, threads=1)
    assert engines() <= before
