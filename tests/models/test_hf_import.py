"""What architectures make of a folder's settings and tensors: what they refuse, and what they do not need."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file, save_file

from hetrun import LLM, UserError
from hetrun.errors import ModelFileError
from hetrun.graph import Weight, stack
from hetrun.loader.architectures import is_ours
from hetrun.loader.formats.hf_folder import read_folder
from hetrun.loader.hf_mapping import Config, HfModel, Imported, Interleave
from hetrun.loader.hf_source import find_importer, open_folder
from hetrun.loader.weight_reader import FileReader
from hetrun.models import HF_TYPES, SHARED
from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.quant_mixtures import by_option
from tests.models import cases_hf, hf, tiny
from tests.models.hf import Row

ROWS = {
    row.model_type: row
    for row in (
        cases_hf.LLAMA[1], cases_hf.MISTRAL[0], cases_hf.MIXTRAL[0], cases_hf.QWEN2[0], cases_hf.QWEN3[0],
        cases_hf.QWEN3_MOE[0], cases_hf.GEMMA3[0], cases_hf.PHI3[0], cases_hf.OPT[0],
    )
}  # fmt: skip
LLAMA3 = {"factor": 8, "low_freq_factor": 4, "high_freq_factor": 1, "original_max_position_embeddings": 64}
TIED = {"tie_word_embeddings": True}
WORDS = dict.fromkeys(("llama", "gemma3_text", "phi3"), "model.embed_tokens.weight")
WORDS["opt"] = "model.decoder.embed_tokens.weight"
NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}


def imported(
    model_type: str,
    changed: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Weight | None] | None = None,
) -> Imported:
    """The tiny model of that type with other settings (... removes one) and tensors (None removes one)."""
    folder = read_folder(hf.folder(ROWS[model_type]))
    values = json.loads((folder.path / "config.json").read_text()) | dict(changed or {})
    config = Config("the config", {k: v for k, v in values.items() if v is not ...})
    have = {k: w for k, w in {**folder.tensors, **(tensors or {})}.items() if w is not None}
    return find_importer(config).from_hf(HfModel(config, have))


@pytest.mark.parametrize("model_type", ROWS)
def test_the_models_that_the_refusals_start_from_are_fine(model_type: str) -> None:
    found = imported(model_type)
    assert "token_embd.weight" in found.weights
    assert found.settings["context_length"] == 256


def rope(kind: str, **settings: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, **settings}}


@pytest.mark.parametrize(
    ("model_type", "changed", "says"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"rms_norm_eps": ...}, "rms_norm_eps is missing"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads"),
        ("llama", {"num_attention_heads": 129, "num_key_value_heads": 129, "head_dim": None}, "129 heads"),
        ("llama", {"num_key_value_heads": 5}, "num_key_value_heads"),
        ("llama", {"logit_scale": 0.5}, "logit_scale is 0.5"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("llama", {"is_causal": False}, "is_causal"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"rope_parameters": NESTED}, "full_attention"),
        ("llama", rope("mrope", mrope_section=[1, 2, 3]), "'mrope'"),
        ("llama", rope("default", mrope_section=[1, 2, 3]), "mrope_section"),
        ("llama", rope("default", rope_theta=0.5), "base 0.5"),
        ("llama", rope("linear"), "factor"),
        ("llama", rope("linear", factor=-2.0), "factor"),
        ("llama", rope("linear", factor=1e300), "factor is 1e+300"),
        ("llama", rope("yarn", factor=1e-300), "factor is 1e-300"),
        ("llama", rope("llama3", **LLAMA3), "high_freq_factor is 1"),
        ("llama", rope("yarn", factor=4.0, extrapolation_factor=1.0), "extrapolation_factor"),
        ("llama", rope("longrope", factor=4.0, short_factor=[1.0] * 16), "long_factor"),
        ("llama", rope("longrope", factor=4.0, short_factor=[1.0], long_factor=[1.0]), "16 finite numbers"),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts is missing"),
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "no sliding_window"),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "2 strings"),
        ("qwen3_moe", {"num_local_experts": None}, "num_local_experts is missing"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("gemma3_text", {"layer_types": ["full_attention"] * 2}, "3 strings"),
        ("gemma3_text", {"sliding_window": 0}, "sliding_window"),
        ("gemma3_text", {"sliding_window": None}, "no sliding_window"),
        ("gemma3_text", rope("linear", factor=8.0), "full_attention and sliding_attention"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}, "'linear'"),
        ("gemma3_text", {"is_causal": False}, "is_causal is false"),
        ("phi3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("phi3", {**cases_hf.longrope(), "original_max_position_embeddings": ...}, "original_max_position"),
        ("phi3", rope("linear", factor=4.0), "hetrun knows default, longrope, su, yarn"),
        ("phi3", rope("longrope", short_factor=[1.0] * 16), "long_factor"),
        ("phi3", rope("longrope", short_factor=[1.0] * 16, long_factor=[0.0] * 16), "long_factor"),
        ("opt", {"activation_function": "swish"}, "activation_function is 'swish'"),
        ("opt", {"is_causal": False}, "is_causal is false"),
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items())[:60] if isinstance(x, dict) else None,
)
def test_settings_that_hetrun_would_not_do_justice_are_refused(
    model_type: str, changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelFileError) as refused:
        imported(model_type, changed)
    assert says in str(refused.value)
    assert "the config" in str(refused.value)


LAYER = "model.layers.1"
EXPERT = f"{LAYER}.block_sparse_moe.experts.3.w1.weight"


@pytest.mark.parametrize(
    ("model_type", "name", "like"),
    [
        ("llama", f"{LAYER}.self_attn.sinks", f"{LAYER}.input_layernorm.weight"),
        ("llama", f"{LAYER}.self_attn.q_norm.weight", f"{LAYER}.input_layernorm.weight"),
        ("llama", f"{LAYER}.self_attn.q_proj.bias", f"{LAYER}.input_layernorm.weight"),
        ("llama", "score.weight", "lm_head.weight"),
        ("llama", f"{LAYER}.mlp.gate.weight", f"{LAYER}.self_attn.k_proj.weight"),
        ("mixtral", f"{LAYER}.block_sparse_moe.gate.bias", f"{LAYER}.input_layernorm.weight"),
        ("qwen2", f"{LAYER}.self_attn.o_proj.bias", f"{LAYER}.input_layernorm.weight"),
        ("qwen3_moe", f"{LAYER}.mlp.shared_expert.up_proj.weight", f"{LAYER}.self_attn.q_proj.weight"),
        ("gemma3_text", f"{LAYER}.self_attn.q_proj.bias", f"{LAYER}.input_layernorm.weight"),
        ("phi3", f"{LAYER}.self_attn.qkv_proj.bias", f"{LAYER}.input_layernorm.weight"),
        ("opt", "model.decoder.project_in.weight", "model.decoder.layers.1.fc1.weight"),
    ],
)
def test_an_unexpected_tensor_is_refused(model_type: str, name: str, like: str) -> None:
    tensors = read_folder(hf.folder(ROWS[model_type])).tensors
    with pytest.raises(ModelFileError) as refused:
        imported(model_type, tensors={name: tensors[like]})
    assert name.replace("block_sparse_moe", "mlp") in str(refused.value)


@pytest.mark.parametrize(
    ("model_type", "changed", "name"),
    [
        ("llama", {"attention_bias": True}, "q_proj.bias"),
        ("llama", {"mlp_bias": True}, "gate_proj.bias"),
        ("qwen3", {"attention_bias": True}, "q_proj.bias"),
        ("qwen2", {"num_hidden_layers": 3, "layer_types": None}, "model.layers.2."),
        ("mixtral", {"num_local_experts": 7}, "experts.6."),
        ("gemma3_text", {"attention_bias": True}, "q_proj.bias"),
        ("gemma3_text", {"tie_word_embeddings": False}, "lm_head.weight"),
        ("opt", {"word_embed_proj_dim": 64}, "project_in.weight"),
    ],
)
def test_a_tensor_that_the_config_promises_must_be_there(
    model_type: str, changed: dict[str, Any], name: str
) -> None:
    with pytest.raises(ModelFileError, match="missing") as refused:
        imported(model_type, changed)
    assert name in str(refused.value)


def test_a_head_of_its_own_must_be_there_unless_it_is_tied() -> None:
    with pytest.raises(ModelFileError, match=r"lm_head\.weight is missing"):
        imported("llama", tensors={"lm_head.weight": None})
    assert "output.weight" in imported("llama").weights
    assert "output.weight" not in imported("llama", TIED, {"lm_head.weight": None}).weights


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tiny tensors are compared in several, the last one shorter."""
    monkeypatch.setattr("hetrun.loader.hf_mapping.SLICE", 5000)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(("model_type", "table"), WORDS.items())
def test_tied_words_may_be_there_twice_or_under_the_name_of_the_head(model_type: str, table: str) -> None:
    words = read_folder(hf.folder(ROWS[model_type])).tensors[table]
    one = imported(model_type, TIED, {"lm_head.weight": None})
    for changed in ({"lm_head.weight": words}, {"lm_head.weight": words, table: None}):
        assert imported(model_type, TIED, changed) == one


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(("model_type", "table"), WORDS.items())
def test_a_head_that_differs_from_the_words_is_not_tied_whatever_the_config_says(
    model_type: str, table: str
) -> None:
    words = read_folder(hf.folder(ROWS[model_type])).tensors[table]
    for other in (stack([words.rows(0, words.shape[0] - 1), words.rows(0, 1)]), words.rows(0, 8)):
        found = imported(model_type, TIED, {"lm_head.weight": other}).weights
        assert found["output.weight"].parts == other.parts
        assert found["token_embd.weight"].parts == words.parts


def test_frequencies_of_old_checkpoints_say_nothing_new() -> None:
    some = read_folder(hf.folder(ROWS["llama"])).tensors[f"{LAYER}.input_layernorm.weight"]
    for name in (f"{LAYER}.self_attn.rotary_emb.inv_freq", "rotary_emb.cos_cached"):
        assert imported("llama", tensors={name: some}) == imported("llama")


def test_experts_of_several_types_are_refused() -> None:
    tensors = read_folder(hf.folder(ROWS["mixtral"])).tensors
    odd = read_folder(hf.folder(cases_hf.MIXTRAL[-1])).tensors[EXPERT]
    assert odd.quant is not tensors[EXPERT].quant
    with pytest.raises(ModelFileError, match="differ in shape or type"):
        imported("mixtral", tensors={EXPERT: odd})


def test_fused_experts_that_cannot_be_shared_are_refused() -> None:
    name = f"{LAYER}.mlp.experts.gate_up_proj"
    fused = read_folder(hf.folder(cases_hf.MIXTRAL[3])).tensors[name]
    with pytest.raises(ModelFileError, match="6 experts"):
        imported("mixtral", tensors={name: fused.rows(0, fused.shape[0] - 1)})


def test_mistral_has_a_window_unless_it_says_null() -> None:
    assert imported("mistral", {"sliding_window": ...}).settings["attention.sliding_window"] == 4096
    assert "attention.sliding_window" not in imported("mistral", {"sliding_window": None}).settings
    assert "attention.sliding_window" not in imported("llama", {"sliding_window": 8}).settings


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen3_moe"])
def test_qwen_has_a_window_when_it_is_used_unless_it_says_null(model_type: str) -> None:
    key = "attention.sliding_window"
    used = {"use_sliding_window": True, "layer_types": ..., "max_window_layers": 0}
    assert imported(model_type, {**used, "sliding_window": ...}).settings[key] == 4096
    assert key not in imported(model_type, {**used, "sliding_window": None}).settings
    assert key not in imported(model_type, {"use_sliding_window": False, "sliding_window": 8}).settings


def test_what_older_configs_leave_out() -> None:
    old = imported("llama", {"rope_parameters": ..., "head_dim": ..., "num_key_value_heads": 2})
    assert old.settings == imported("llama").settings
    scaling = {"type": "linear", "factor": 2.0}
    found = imported("llama", {"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": scaling}).settings
    assert (found["rope.freq_base"], found["rope.scaling.factor"]) == (5e5, 2.0)


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_names_that_longrope_had_in_phi3(kind: str) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    old = {"rope_parameters": ..., "original_max_position_embeddings": 64}
    found = imported("phi3", {**old, "rope_theta": 5e5, "rope_scaling": {"type": kind, **factors}})
    assert {"rope_factors_short.weight", "rope_factors_long.weight"} <= found.weights.keys()
    assert found.settings["rope.freq_base"] == 5e5
    assert found.settings["rope.scaling.original_context_length"] == 64
    assert found.settings["rope.scaling.attn_factor"] == pytest.approx((1 + 1 / 3) ** 0.5)


def test_gemma3_of_transformers_4() -> None:
    old = {"rope_parameters": ..., "layer_types": ..., "sliding_window_pattern": 3}
    bases = {"rope_theta": 5e5, "rope_local_base_freq": 500.0}
    found = imported("gemma3_text", {**old, **bases, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert found.settings["attention.sliding_window_pattern"] == (True, True, False)
    assert (found.settings["rope.freq_base"], found.settings["rope.freq_base_swa"]) == (5e5, 500.0)
    assert found.settings["rope.scaling.factor"] == 8.0
    bare = imported("gemma3_text", old).settings
    assert (bare["rope.freq_base"], bare["rope.freq_base_swa"]) == (1e6, 10000.0)


@pytest.mark.parametrize("model_type", ROWS)
def test_models_that_were_saved_without_their_head(model_type: str) -> None:
    tensors = read_folder(hf.folder(ROWS[model_type])).tensors
    bare = {k.removeprefix("model."): w for k, w in tensors.items() if k != "lm_head.weight"}
    found = imported(model_type, TIED, {**dict.fromkeys(tensors), **bare})
    assert found == imported(model_type, TIED, {"lm_head.weight": None})
    with pytest.raises(ModelFileError, match=r"lm_head\.weight is missing"):
        imported(model_type, {"tie_word_embeddings": False}, {**dict.fromkeys(tensors), **bare})


def test_a_context_beyond_the_positions_of_opt_is_refused() -> None:
    with pytest.raises(UserError, match="learned positions for 256 tokens"):
        LLM(hf.folder(ROWS["opt"]), backends=["reference"], ctx=257)


def test_the_original_context_beside_the_rope_settings_comes_first() -> None:
    yarn = rope("yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
    key = "rope.scaling.original_context_length"
    assert imported("llama", yarn).settings[key] == 32
    assert imported("llama", {**yarn, "original_max_position_embeddings": 64}).settings[key] == 64


def test_gguf_interleaves_the_heads_of_llamas_alone() -> None:
    row = replace(ROWS["llama"], name="importing-bias", config={"attention_bias": True})
    folder = read_folder(hf.folder(row))
    found = find_importer(folder.config).from_hf(HfModel(folder.config, folder.tensors))
    heads = {"attn_q": Interleave(4), "attn_k": Interleave(2)}
    kinds = ("weight", "bias")
    assert found.changes == {
        f"blk.{i}.{part}.{kind}": change for i in (0, 1) for part, change in heads.items() for kind in kinds
    }
    assert not imported("qwen2").changes


GEMMA3_ONLY_HERE = {
    "own-scale": "scales queries by head_dim",
    "attention-bias": "no biases in attention",
    "llama3": "plain YaRN",
}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (cases_hf.QWEN2[-1], "factors of rope"),
        (cases_hf.QWEN3[3], "no bias"),
        (cases_hf.QWEN3_MOE[2], "normalises"),
        (cases_hf.QWEN3_MOE[3], "without experts"),
        *((row, GEMMA3_ONLY_HERE[row.name]) for row in cases_hf.GEMMA3 if row.name in GEMMA3_ONLY_HERE),
        (next(row for row in cases_hf.PHI3 if row.name == "own-head-dim"), "head_dim of its own"),
        (cases_hf.OPT[0], "no architecture opt"),
    ],
    ids=str,
)
def test_convert_says_what_llamacpp_could_not_run(row: Row, says: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=says):
        convert_model(ConversionOptions(hf.folder(row), by_option("f16"), tmp_path / "no.gguf"))


def test_dynamic_rope_is_refused_where_it_would_begin() -> None:
    row = next(r for r in cases_hf.LLAMA if r.name == "dynamic")
    with pytest.raises(UserError, match="use ctx=256 or less"):
        LLM(hf.folder(row), backends=["reference"], ctx=512)


def test_every_file_is_an_architecture_or_shared() -> None:
    files = {p.stem for p in Path(str(import_module("hetrun.models").__file__)).parent.glob("*.py")}
    architectures = files - SHARED - {"__init__"}
    assert files >= SHARED
    assert set(HF_TYPES.values()) <= architectures
    for file in architectures:
        module = import_module(f"hetrun.models.{file}")
        assert module.name.replace("-", "_") == file
        assert callable(module.build)
        assert is_ours(module.name)
    assert not any(map(is_ours, SHARED))


def test_the_first_mixtrals_of_gguf_have_each_expert_by_itself(tmp_path: Path) -> None:
    row = cases_hf.MIXTRAL[0]
    new = tmp_path / "new.gguf"
    convert_model(ConversionOptions(hf.folder(row), by_option("f32"), new))
    old = experts_by_themselves(new, tmp_path / "old.gguf")
    tokens = tiny.random_tokens(40)
    with LLM(old, backends=["reference"], kv_type="f32") as llm:
        found = llm.logits(tokens)
    assert np.abs(found - hf.logits(hf.folder(row), tokens)).max() < 1e-3


def experts_by_themselves(path: Path, target: Path) -> Path:
    """A copy of a GGUF file with `ffn_up.3.weight` for each expert instead of one `ffn_up_exps.weight`."""
    reader, writer = GGUFReader(path), GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        if "_exps." in tensor.name:
            for e, matrix in enumerate(tensor.data):
                writer.add_tensor(tensor.name.replace("_exps.", f".{e}."), matrix)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("name", ["smollm3", "olmo3", "qwen2", "gemma3_text"])
def test_layers_of_other_types_are_refused(name: str, tmp_path: Path) -> None:
    row = next(row for row in cases_hf.ROWS if str(row) == f"{name}-layer-types")
    folder = Path(shutil.copytree(hf.folder(row), tmp_path / "model"))
    said = json.loads((folder / "config.json").read_text())
    said["layer_types"][0] = "chunked_attention"
    (folder / "config.json").write_text(json.dumps(said))
    with pytest.raises(ModelFileError, match="layer_types has 'chunked_attention'"):
        open_folder(folder)


def test_experts_that_lie_on_their_side_are_turned(tmp_path: Path) -> None:
    """As Qwen 3 VL's are published; transformers 5 saves them upright."""
    upright, turned = hf.folder(cases_hf.QWEN3_VL_MOE[0]), tmp_path / "turned"
    shutil.copytree(upright, turned)
    (file,) = turned.glob("*.safetensors")
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    found: dict[str, np.ndarray] = {}
    with closing(FileReader()) as reader:
        for path in (upright, turned):
            for weight in open_folder(path).weights():
                raw = np.empty(weight.nbytes, np.uint8)
                reader.read(weight, raw)
                assert np.array_equal(found.setdefault(weight.name, raw), raw)
    assert sum("_exps" in name for name in found) == 6
