"""Settings that contradict each other or the weights: one sentence, and the process lives."""

from __future__ import annotations

from errno import ENOMEM
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from hetrun import LLM, UserError
from hetrun.errors import BudgetError, ModelFileError, OptionError
from tests.models import cases, tiny


def rewritten(path: Path, target: Path, **changed: int | float | str | None) -> Path:
    """A copy of a GGUF file with other values of its architecture's keys (None: without the key)."""
    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    new = {f"{architecture}.{k.replace('__', '.')}": v for k, v in changed.items()}
    for name, found in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or (name in new and new[name] is None):
            continue
        kind = found.types[0]
        value = new.get(name, found.contents())
        writer.add_key_value(name, value, kind, found.types[-1] if len(found.types) > 1 else None)
    for name, value in new.items():
        if name not in reader.fields:
            kind = GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.UINT32
            writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(cases.GQA, tmp_path_factory.mktemp("good") / "tiny.gguf")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"block_count": 0}, "block_count"),
        ({"block_count": 1 << 31}, "block_count"),
        ({"block_count": 1}, "there is a tensor of blk.1"),
        ({"block_count": 3}, "blk.2"),
        ({"context_length": 0}, "context_length"),
        ({"attention__head_count": 0}, "head_count"),
        ({"attention__head_count": 3}, "3 heads cannot share 2"),
        ({"attention__head_count": 8}, "dimension_count"),
        ({"attention__head_count": 8192}, "cannot share a width"),
        ({"attention__head_count_kv": 0}, "head_count_kv"),
        ({"embedding_length": 64}, "dimension_count"),
        ({"embedding_length": 256}, "token_embd"),
        ({"feed_forward_length": 100}, "100"),
        ({"rope__dimension_count": 7}, "odd"),
        ({"rope__dimension_count": 4096}, "dimension_count"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, "epsilon"),
        ({"attention__layer_norm_rms_epsilon": -1.0}, "epsilon"),
        ({"rope__freq_base": 0.0}, "freq_base"),
        ({"rope__scaling__factor": 1e30}, "scaling.factor"),
        ({"embedding_length": None}, "embedding_length"),
    ],
    ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items()) if isinstance(x, dict) else None,
)
def test_absurd_settings_are_refused_with_the_keys_name(
    good: Path, tmp_path: Path, changed: dict[str, int | float | None], says: str
) -> None:
    bad = rewritten(good, tmp_path / "bad.gguf", **changed)
    with pytest.raises(ModelFileError) as refused:
        LLM(bad)
    assert says in str(refused.value)
    assert "bad.gguf" in str(refused.value)


def test_a_faithful_copy_is_accepted(good: Path, tmp_path: Path) -> None:
    """Or else the test above would prove nothing."""
    with LLM(rewritten(good, tmp_path / "copy.gguf"), ctx=64) as llm:
        assert llm.logits([1, 2, 3]).shape == (3, tiny.VOCAB)


def test_wishes_that_cannot_be_met_are_refused(good: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="GiB are free"):
        LLM(good, ctx=1 << 40)
    with pytest.raises(BudgetError, match="at least"):
        LLM(good, ram="100KiB")
    odd = tiny.write_gguf(tiny.TinyLlama("odd", heads=8, kv_heads=8, head_dim=16), tmp_path / "odd.gguf")
    with pytest.raises(OptionError, match="multiple of 32"):
        LLM(odd, kv_type="q8_0")
    with pytest.raises(UserError, match="no backend"):
        LLM(good, backends=["abacus"])


def test_no_address_space_for_keys_and_values_is_no_fault_of_ours(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may bound it; the memory itself is counted before."""

    def full(*args: object, **options: object) -> None:
        raise OSError(ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("hetrun.memory.kv.cache.mmap.mmap", full)
    with pytest.raises(BudgetError, match="smaller ctx"):
        LLM(good, ctx=64)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("value", "says"),
    [
        (float("nan"), "the tensor 'blk.1.ffn_norm.weight' has NaN or infinity among its F32 weights: 1 of"),
        (3e38, "so large that they overflow"),
    ],
)
def test_weights_whose_results_are_no_numbers_are_the_files_fault(
    good: Path, tmp_path: Path, value: float, says: str
) -> None:
    (tensor,) = (t for t in GGUFReader(good).tensors if t.name == "blk.1.ffn_norm.weight")
    values = np.full(1 if np.isnan(value) else int(tensor.n_elements), value, "<f4").tobytes()
    raw, at = bytearray(good.read_bytes()), int(tensor.data_offset)
    raw[at : at + len(values)] = values
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with LLM(path, backends=["reference"]) as llm, pytest.raises(ModelFileError, match=says):
        llm.generate([[5, 6, 7]])
