"""Mixtures whose experts are records: where these lie, that answers stay the same, and the way back."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from time import process_time

import gguf
import numpy as np
import pytest

from hetrun import LLM, SamplingParams
from hetrun.backend import WeightUse
from hetrun.backends.llamacpp.file_runs import MatrixRun, find_run
from hetrun.graph.ops import Moe
from hetrun.loader import expert_names
from hetrun.loader.architectures import build_graph
from hetrun.loader.formats.gguf import read_gguf
from hetrun.loader.open_model import open_model
from hetrun.tools.convert import ConversionOptions as Convert, convert_model, expert_records
from hetrun.tools.convert.quant_mixtures import by_option
from hetrun.tools.convert.reorder import RECORDS, RepackOptions, RepackReport, repack_model
from tests.convert.test_reorder import assert_same_but_for_places, content, converted, foreign, stands
from tests.models import cases_hf, tiny
from tests.models.hf import Row, folder

MIXTRAL, QWEN3 = cases_hf.MIXTRAL[0], cases_hf.QWEN3_MOE[0]
EACH = (MIXTRAL, QWEN3, cases_hf.QWEN35_MOE[0], cases_hf.QWEN3_NEXT[0])


@cache
def merged(row: Row) -> Path:
    path = folder(row).with_name(f"{row}-records.gguf")
    return converted(row, path, "q8_0")


def records(source: Path, target: Path) -> RepackReport:
    report = repack_model(RepackOptions(source, target))
    assert report.notes == (RECORDS,)
    return report


def back(source: Path, target: Path, force: bool = False) -> RepackReport:
    return repack_model(RepackOptions(source, target, force, merged=True))


@pytest.mark.parametrize("row", EACH, ids=str)
@pytest.mark.parametrize("backend", ["reference", "llamacpp"])
def test_same_answers(row: Row, backend: str, tmp_path: Path) -> None:
    records(merged(row), tmp_path / "x.gguf")
    tokens, found = tiny.random_tokens(20), []
    for path in (merged(row), tmp_path / "x.gguf"):
        with LLM(path, backends=[backend], deterministic=True) as llm:
            answer = llm.generate("The thing is", SamplingParams(max_tokens=8, temperature=0))[0]
            found.append((llm.logits(tokens).tobytes(), answer.tokens))
    assert found[0] == found[1]


@pytest.mark.parametrize("row", EACH, ids=str)
def test_an_expert_is_one_read(row: Row, tmp_path: Path) -> None:
    report = records(merged(row), tmp_path / "x.gguf")
    assert report.records == 12
    file = read_gguf(report.path)
    assert file.alignment == 4096
    names = [name for name in stands(report.path) if expert_names.of_one(name)]
    wanted = [
        expert_names.single(f"blk.{i}", part, e)
        for i in range(2)
        for e in range(6)
        for part in expert_names.PARTS
    ]
    assert names == wanted
    for name, behind in pairwise(names):
        a, b = file.tensors[name], file.tensors[behind]
        if name.split(".")[1] == behind.split(".")[1]:
            assert b.offset == -(-(a.offset + a.nbytes) // 4096) * 4096
    assert not any(expert_names.of_all(name) for name in file.tensors)
    ops = [op for op in build_graph(open_model(report.path)).ops if isinstance(op.attrs, Moe)]
    for op in ops:
        runs = [find_run(WeightUse(w, "experts", 6)) for w in op.weights[1:]]
        assert all(isinstance(run, MatrixRun) and run.matrices == 6 for run in runs)
        assert len({run.distance for run in runs if isinstance(run, MatrixRun)}) == 1


@pytest.mark.parametrize("row", EACH, ids=str)
def test_the_way_back_is_bit_for_bit(row: Row, tmp_path: Path) -> None:
    records(merged(row), tmp_path / "x.gguf")
    report = back(tmp_path / "x.gguf", tmp_path / "back.gguf")
    assert (report.records, report.notes) == (0, ())
    assert_same_but_for_places(merged(row), report.path)
    back(merged(row), tmp_path / "straight.gguf")
    assert report.path.read_bytes() == (tmp_path / "straight.gguf").read_bytes()


def test_what_is_laid_out_already_is_left_alone(tmp_path: Path) -> None:
    one, two = tmp_path / "records.gguf", tmp_path / "merged.gguf"
    records(merged(QWEN3), one)
    back(one, two)
    assert not repack_model(RepackOptions(one, tmp_path / "x.gguf")).written
    assert not back(two, tmp_path / "x.gguf").written
    assert records(two, tmp_path / "again.gguf").written
    assert one.read_bytes() == (tmp_path / "again.gguf").read_bytes()


def test_experts_that_lie_by_themselves_are_put_in_order(tmp_path: Path) -> None:
    """As in the first files of Mixtral: all gates, then all others; and a file of no known model."""
    names = [f"blk.{i}.ffn_{p}.{e}.weight" for i in (1, 0) for p in ("down", "gate", "up") for e in (1, 0)]
    before = foreign(tmp_path / "a.gguf", ["blk.0.x", *names])
    report = repack_model(RepackOptions(before, tmp_path / "b.gguf"))
    assert stands(report.path) == [
        "blk.0.x",
        *(f"blk.{i}.ffn_{p}.{e}.weight" for i in (0, 1) for e in (0, 1) for p in ("gate", "up", "down")),
    ]
    assert_same_but_for_places(before, report.path)


def test_an_unknown_architecture_keeps_its_experts_together(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "unheard")
    for part in expert_names.PARTS:
        writer.add_tensor(expert_names.whole("blk.0", part), np.ones((4, 2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert repack_model(RepackOptions(tmp_path / "a.gguf", tmp_path / "b.gguf")).records == 0
    assert_same_but_for_places(tmp_path / "a.gguf", tmp_path / "b.gguf")


@pytest.mark.parametrize("missing", ["a part", "a number", "room"])
def test_what_cannot_be_said_stays_as_it_is(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = dict(read_gguf(merged(QWEN3)).tensors)
    if missing == "a part":
        del tensors["blk.0.ffn_up_exps.weight"]
        assert "blk.0.ffn_gate_exps.weight" in expert_records.apart(tensors)
        assert "blk.1.ffn_gate.5.weight" in expert_records.apart(tensors)
    elif missing == "a number":
        apart = expert_records.apart(tensors)
        del apart["blk.0.ffn_up.3.weight"]
        names = {t.name for t in expert_records.together(apart.values())}
        assert {"blk.0.ffn_up.4.weight", "blk.0.ffn_gate_exps.weight"} <= names
    else:
        monkeypatch.setattr(expert_records, "MAX_TENSORS", len(tensors) + 30)
        assert expert_records.apart(tensors) == tensors


def test_records_are_converted_as_what_they_are(tmp_path: Path) -> None:
    """To a file with all experts together, the same as without records."""
    before = converted(QWEN3, tmp_path / "a.gguf", "f16")
    records(before, tmp_path / "b.gguf")
    found = []
    for path in (before, tmp_path / "b.gguf"):
        done = convert_model(Convert(path, by_option("q4_0"), tmp_path / f"{path.stem}-q.gguf"))
        file = read_gguf(done.path)
        found.append({name: (t.shape, t.quant, content(t)) for name, t in file.tensors.items()})
    assert found[0] == found[1]


def test_a_header_of_many_experts_is_read_quickly(tmp_path: Path) -> None:
    """40 layers of 256: less than 0.2 s on a quiet machine."""
    names = [
        expert_names.single(f"blk.{i}", part, e)
        for i in range(40)
        for e in range(256)
        for part in expert_names.PARTS
    ]
    path = foreign(tmp_path / "many.gguf", names)
    begin = process_time()
    assert len(read_gguf(path).tensors) == 30720
    assert process_time() - begin < 1.5
