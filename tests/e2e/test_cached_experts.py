"""Mixtures whose experts do not fit into memory: from slots, they say what they say in memory."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.client.events import GenerateRequest
from hetrun.engine.loaded_model import LoadedModel
from hetrun.errors import ModelFileError
from hetrun.executor.loading import expert_plan
from hetrun.executor.planned_model import PlannedModel
from hetrun.prefetch import cached_experts, expert_cache
from hetrun.prefetch.cached_experts import FromExperts
from hetrun.tools.convert import ConversionOptions, convert_model
from hetrun.tools.convert.quant_mixtures import by_option
from hetrun.tools.convert.reorder import RepackOptions as RepackWish, repack_model
from tests.engine.asking import Answer
from tests.models import cases_hf, hf
from tests.support.expert_slots import OPTIONS, opened
from tests.support.streamed import Disk, every_read, reads_from

pytestmark = pytest.mark.skipif(not expert_cache.library(), reason="there was no C compiler")
TEXT = [int(t) for t in np.random.default_rng(1).integers(3, 90, 40)]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
ROWS = ["mixtral-plain", "qwen3_moe-normalised", "qwen3_5_moe_text-plain", "gpt_oss-plain"]


@pytest.fixture(scope="module", params=ROWS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    row = next(row for row in cases_hf.ROWS if str(row) == request.param)
    path = tmp_path_factory.mktemp("cached") / "m.gguf"
    return Path(convert_model(ConversionOptions(hf.folder(row), by_option("q8_0"), path, threads=1)).path)


def experts_of(llm: LocalModel) -> FromExperts:
    def found(loaded: LoadedModel) -> FromExperts:
        assert isinstance(loaded.model, PlannedModel)
        assert loaded.model._weights.experts is not None
        return loaded.model._weights.experts

    return llm.call(found)


def tokens(llm: LocalModel, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(out.tokens) for out in llm.generate([list(p) for p in prompts], GREEDY)]


def test_experts_from_slots_give_the_same_bits(model: Path) -> None:
    """Whatever has a slot: through evictions, prompts, several sequences and shared beginnings."""
    prompts = [TEXT[:8], TEXT[:20], TEXT, TEXT[5:30]]
    with LocalModel(model, **OPTIONS, deterministic=True) as llm:
        held, logits = tokens(llm, prompts), llm.logits(TEXT)
    for share in (0.0, 0.4, 1.0):
        with opened(model, share, deterministic=True) as llm:
            assert tokens(llm, prompts) == held
            assert [tokens(llm, [p])[0] for p in prompts] == held
            np.testing.assert_array_equal(llm.logits(TEXT), logits)
            counts = experts_of(llm).cache.counts
            assert counts.wanted > 0
            assert 0 < counts.missed < counts.wanted


def test_experts_as_records_give_the_same_bits(model: Path, tmp_path: Path) -> None:
    """A file that was repacked: each expert is one read."""
    records = Path(repack_model(RepackWish(model, tmp_path / "records.gguf", force=False)).path)
    with LocalModel(model, **OPTIONS, deterministic=True) as llm:
        held = tokens(llm, [TEXT, TEXT[:9]])
    with opened(model, 0.2, deterministic=True) as llm:
        assert tokens(llm, [TEXT, TEXT[:9]]) == held
        published = experts_of(llm).cache.counts
    with opened(records, 0.2, deterministic=True) as llm:
        assert tokens(llm, [TEXT, TEXT[:9]]) == held
        repacked = experts_of(llm).cache.counts
    assert published.reads > 2 * published.missed
    assert repacked.reads < 1.5 * repacked.missed


def test_texts_that_part_share_what_is_read(model: Path) -> None:
    """Several sequences of a step choose together, with beginnings that they share."""
    prompts = [[*TEXT[:20], i] for i in range(5)]
    with LocalModel(model, **OPTIONS, deterministic=True) as llm:
        held = tokens(llm, prompts)
    with opened(model, 0.3, deterministic=True) as llm:
        assert [tokens(llm, [p])[0] for p in prompts] == held
        alone = experts_of(llm).cache.counts.wanted
        assert tokens(llm, prompts) == held
        assert experts_of(llm).cache.counts.wanted - alone < alone


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    row = next(row for row in cases_hf.ROWS if str(row) == "mixtral-plain")
    path = tmp_path_factory.mktemp("cached") / "m.gguf"
    return Path(convert_model(ConversionOptions(hf.folder(row), by_option("q8_0"), path, threads=1)).path)


@pytest.fixture(scope="module")
def right(mixtral: Path) -> list[int]:
    """What it says with everything in memory."""
    with LocalModel(mixtral, **OPTIONS, deterministic=True) as llm:
        return tokens(llm, [TEXT])[0]


@pytest.mark.parametrize("verdict", [-errno.EIO, 0], ids=["EIO", "short"])
@pytest.mark.parametrize("which", [0, 3, 17])
def test_a_read_that_fails_ends_one_answer(mixtral: Path, right: list[int], which: int, verdict: int) -> None:
    disk = Disk()
    with opened(mixtral, 0.0, disk, deterministic=True) as llm:
        with (
            disk.failing(reads_from(which, verdict)),
            pytest.raises(ModelFileError, match=r"reading|ends inside"),
        ):
            tokens(llm, [TEXT])
        assert tokens(llm, [TEXT])[0] == right


@pytest.mark.parametrize("every", [7, 50])
def test_a_disk_that_fails_now_and_then(mixtral: Path, right: list[int], every: int) -> None:
    """Each answer is right, or an error; and nothing wrong stays in a slot."""
    disk = Disk()
    with opened(mixtral, 0.3, disk, deterministic=True) as llm:
        failed = 0
        with disk.failing(every_read(every, -errno.EIO)):
            for _ in range(12):
                try:
                    assert tokens(llm, [TEXT])[0] == right
                except ModelFileError:
                    failed += 1
        assert failed
        assert tokens(llm, [TEXT])[0] == right


def test_reads_that_come_in_parts_or_are_disturbed_go_on(mixtral: Path, right: list[int]) -> None:
    disk = Disk()
    with opened(mixtral, 0.3, disk, deterministic=True) as llm:
        for judge in (every_read(2, 4096), every_read(3, -errno.EINTR), every_read(4, -errno.EAGAIN)):
            with disk.failing(judge):
                assert tokens(llm, [TEXT])[0] == right


def test_a_file_that_is_cut_is_an_error_until_it_is_back(mixtral: Path, right: list[int]) -> None:
    data = mixtral.read_bytes()
    with opened(mixtral, 0.0, deterministic=True) as llm:
        try:
            with mixtral.open("r+b") as file:
                file.truncate(len(data) // 2)
            with pytest.raises(ModelFileError, match="it was changed while in use"):
                tokens(llm, [TEXT])
        finally:
            mixtral.write_bytes(data)


def test_a_cancel_does_not_wait_for_a_disk_that_stands_still(mixtral: Path, right: list[int]) -> None:
    disk, holding, go = Disk(), threading.Event(), threading.Event()

    def stuck(number: int, size: int) -> None:
        if number == 5:
            holding.set()
            go.wait(20)

    with opened(mixtral, 0.0, disk, deterministic=True) as llm:
        disk.arm(stuck)
        answer = Answer()
        answer.id = llm.submit(GenerateRequest(GREEDY, tokens=tuple(TEXT)), answer)
        assert holding.wait(20)
        llm.cancel(answer.id)
        go.set()
        assert answer.wait().last.finish_reason == "cancelled"
        disk.arm(None)
        assert tokens(llm, [TEXT])[0] == right


def test_slots_go_and_come_between_passes(mixtral: Path, right: list[int]) -> None:
    """What is worth most stays, wherever it lay."""
    with opened(mixtral, 1.0, deterministic=True) as llm:
        assert tokens(llm, [TEXT])[0] == right
        found = experts_of(llm)
        for share in (0.5, 0.0, 0.3, 1.0, 0.2):
            counts = [
                max(least, int(share * count))
                for least, count in zip(
                    cached_experts.least_slots(found.cache.records), found.cache.records.counts, strict=True
                )
            ]
            llm.call(lambda _: found.cache.resize(counts))  # noqa: B023 - it is called now
            assert found.cache.counts_of_kinds == counts
            assert tokens(llm, [TEXT])[0] == right


def test_a_long_pass_has_more_buffers_for_some_time(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = [(7 * i) % 90 + 3 for i in range(cached_experts.FEW + 40)]
    with opened(mixtral, 1.0, deterministic=True) as llm:
        right = tokens(llm, [long])[0]
    usual, wide = 3, 5
    monkeypatch.setattr(expert_plan, "buffers_in", lambda *_: usual)
    monkeypatch.setattr(cached_experts, "buffers_of_prompts", lambda *_: wide)
    with opened(mixtral, 0.4, deterministic=True) as llm:
        cache = experts_of(llm).cache
        assert tokens(llm, [TEXT[:8]])
        assert cache.buffers == usual
        assert tokens(llm, [long])[0] == right
        assert cache.buffers == wide
        monkeypatch.setattr(cached_experts, "LONG_S", 0.0)
        monkeypatch.setattr(cached_experts, "LOOK_S", 0.0)
        assert tokens(llm, [TEXT[:8]])
        assert cache.buffers == usual
        assert tokens(llm, [long])[0] == right


def test_hints_read_what_is_wanted_next(mixtral: Path) -> None:
    with opened(mixtral, 0.2) as llm:
        tokens(llm, [TEXT[:8]])
        counts = experts_of(llm).cache.counts
        assert counts.hinted > 0
        assert 0 < counts.hits_of_hints <= counts.hinted
