"""A whole run: every request once, in order or as results come, whatever places and disks do."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path

import pytest

from hetrun.errors import EngineStopped, UserError
from hetrun.tools.batch import runner as module
from hetrun.tools.batch.line_reader import LineReader
from hetrun.tools.batch.output_file import LineOutput, NoRoom, OutputFile
from hetrun.tools.batch.reorder_buffer import LineHeap
from hetrun.tools.batch.request_lines import Ask, ForAll, RequestReader
from hetrun.tools.batch.result_lines import Reply
from hetrun.tools.batch.resume import FinishedRequests
from hetrun.tools.batch.runner import BatchChannels, BatchRun
from hetrun.tools.batch.worker import Away
from tests.batch.fakes import ALL, Echo, opened, results, run, said


class Killed(Exception):
    """Ends a run anywhere."""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    source = tmp_path / "in.txt"
    source.write_text("".join(f"{'bad' if i % 10 == 3 else 'ask'} {i}\n" for i in range(1500)))
    return source, tmp_path / "out.jsonl"


def late(seed: int) -> Echo:
    rng = random.Random(seed)

    async def wait(ask: Ask) -> None:
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)

    return Echo(24, wait)


def check(output: Path, in_order: bool = True) -> None:
    found = results(output)
    indexes = [int(str(row["index"])) for row in found]
    assert sorted(indexes) == list(range(1500))
    assert (indexes == sorted(indexes)) == in_order
    for i, row in zip(indexes, found, strict=True):
        if i % 10 == 3:
            assert row["error"] == {"message": "it is bad", "type": "t", "code": None}
        else:
            assert row["text"] == f"answer to ask {i}"


@pytest.mark.parametrize("in_order", [True, False])
def test_every_request_has_one_result(files: tuple[Path, Path], in_order: bool) -> None:
    place = late(1)
    tally = run(*files, place, in_order=in_order)
    check(files[1], in_order)
    assert (tally.read, tally.answered, tally.written, tally.failed) == (1500, 1500, 1500, 150)
    assert tally.first_failure == "line 4: it is bad"
    assert tally.answer_tokens == 2 * 1350
    assert place.most == 24


def test_the_first_is_answered_alone_and_soon(files: tuple[Path, Path]) -> None:
    seen: list[tuple[int, int]] = []

    async def look(ask: Ask) -> None:
        seen.append((ask.index, len(results(files[1]))))

    run(*files, Echo(24, look))
    assert seen[0] == (0, 0)
    # The others began when it was answered, and each answer brings more.
    assert [written for _, written in seen[:9]] <= [0, *[1] * 8]


@pytest.mark.parametrize("in_order", [True, False])
def test_a_run_that_was_stopped_goes_on(files: tuple[Path, Path], in_order: bool) -> None:
    rng = random.Random(5)
    left = 0

    async def stop(ask: Ask) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed
        await asyncio.sleep(0)

    for round_ in range(5):
        left, place = rng.randrange(30, 300), Echo(24, stop)
        with pytest.raises(Killed):
            run(*files, place, resume=round_ > 0, in_order=in_order)
        # As if it had been killed in the middle of a line, or of two.
        for path in (files[1], files[1].with_name("out.jsonl.waiting")):
            if path.exists():
                path.write_bytes(path.read_bytes()[: -rng.randrange(1, 400)] or b"")
    place = late(2)
    tally = run(*files, place, resume=True, in_order=in_order)
    check(files[1], in_order)
    assert tally.before + tally.answered == 1500
    assert len(place.asked) == tally.answered
    again = run(*files, late(3), resume=True, in_order=in_order)
    assert (again.before, again.answered) == (1500, 0)


def test_what_has_no_result_in_between_gets_it_at_the_end(files: tuple[Path, Path]) -> None:
    run(*files)
    lines = files[1].read_bytes().splitlines(keepends=True)
    files[1].write_bytes(b"".join(lines[:10] + lines[12:900] + lines[901:]))
    run(*files, resume=True)
    assert [row["index"] for row in results(files[1])][-3:] == [10, 11, 900]
    check(files[1], in_order=False)


def test_other_options_are_refused_before_anything_is_written(files: tuple[Path, Path]) -> None:
    run(*files)
    before = files[1].read_bytes()
    with pytest.raises(UserError, match="line 1 is not the request whose result is in"):
        run(*files, resume=True, for_all=ForAll(ALL.known, digest=b"another"))
    assert files[1].read_bytes() == before


def test_what_keeps_a_run_from_going_on_is_named(files: tuple[Path, Path]) -> None:
    files[0].write_text("a\nb\n")
    run(*files)
    with pytest.raises(UserError, match="needs the lines, the model and the options of that run"):
        run(*files, resume=True, for_all=ForAll(ALL.known, digest=b"another"))
    files[0].write_text("a\nB\n")
    with pytest.raises(
        UserError, match=r"line 2 is not the request whose result is in .*: it was changed since"
    ):
        run(*files, resume=True)
    files[0].write_text("a\nb\nc\n")
    assert run(*files, resume=True).answered == 1


def test_neighbours_are_asked_together(tmp_path: Path) -> None:
    shared = ["a" * 200, "b" * 200, "c" * 200]
    (source := tmp_path / "in.txt").write_text("".join(f"{shared[i % 3]} {i}\n" for i in range(30)))
    place = Echo(1)
    run(source, tmp_path / "o", place)
    assert [i % 3 for i in place.asked] == [0] * 10 + [1] * 10 + [2] * 10


class Weak(Echo):
    """Breaks off now and then."""

    def __init__(self, seed: int, part: float, blameless: bool = True) -> None:
        super().__init__(6)
        self._rng, self._part, self._blameless = random.Random(seed), part, blameless

    async def answer(self, ask: Ask) -> Reply:
        if self._rng.random() < self._part:
            raise Away("it went away", 0.001, self._blameless)
        return await super().answer(ask)


def test_what_one_place_does_not_answer_another_does(files: tuple[Path, Path]) -> None:
    places = (Weak(1, 0.3), Weak(2, 0.1), Echo(4))
    run(*files, *places)
    check(files[1])
    assert all(place.asked for place in places)


def test_a_request_that_kills_every_place_is_given_up(tmp_path: Path) -> None:
    class Dies(Echo):
        async def answer(self, ask: Ask) -> Reply:
            if said(ask) == "kill":
                raise Away("it broke off", 0.001)
            return await super().answer(ask)

    (source := tmp_path / "in.txt").write_text("a\nkill\nb\n")
    tally = run(source, tmp_path / "o", Dies(2), Dies(2))
    assert tally.failed == 1
    assert (
        tally.first_failure == "line 2: it was sent 3 times without an answer; the last error: it broke off"
    )
    assert [row.get("text") for row in results(tmp_path / "o")] == ["answer to a", None, "answer to b"]


def test_without_any_place_that_answers_it_ends(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    with pytest.raises(EngineStopped, match=r"no answer for 0.05 s: it went away. .* continue with --resume"):
        run(*files, Weak(1, 1.0), Weak(2, 1.0))
    assert results(files[1]) == []


def test_an_engine_that_is_gone_ends_the_run_and_keeps_what_is_there(files: tuple[Path, Path]) -> None:
    class Vanishes(Echo):
        async def answer(self, ask: Ask) -> Reply:
            if len(self.asked) == 400:
                raise EngineStopped("the engine is gone")
            return await super().answer(ask)

    with pytest.raises(EngineStopped, match="the engine is gone"):
        run(*files, Vanishes())
    waiting = files[1].with_name("out.jsonl.waiting")
    kept = [json.loads(line.partition(b" ")[2]) for line in waiting.read_bytes().splitlines()]
    answered = len({row["index"] for row in results(files[1]) + kept})
    assert len(results(files[1])) < 390 < answered
    place = Echo()
    tally = run(*files, place, resume=True)
    check(files[1])
    assert (tally.before, len(place.asked)) == (answered, 1500 - answered)
    assert not waiting.exists()


def test_a_full_disk_is_waited_for(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    real, said_so = LineOutput._write, list[str]()
    batches: list[BatchRun] = []

    def write(self: LineOutput, line: bytes) -> None:
        if self.name == str(files[1]) and self.size > 20_000 and len(said_so) < 5:
            said_so.append(batches[0].tally.waits_for)
            raise NoRoom("out.jsonl: No space left on device")
        real(self, line)

    monkeypatch.setattr(LineOutput, "_write", write)
    tally = run(*files, watch=batches.append)
    check(files[1])
    assert said_so == ["", *["out.jsonl: No space left on device"] * 4]
    assert tally.waits_for == ""


def test_a_disk_that_stays_full_ends_the_run_with_whole_lines(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "FULL_S", 0.05)
    real = LineOutput._write

    def write(self: LineOutput, line: bytes) -> None:
        if self.name == str(files[1]) and self.size > 20_000:
            raise NoRoom("out.jsonl: No space left on device")
        real(self, line)

    with monkeypatch.context() as patch:
        patch.setattr(LineOutput, "_write", write)
        with pytest.raises(UserError, match="free some space, and continue with --resume"):
            run(*files)
    assert 0 < len(results(files[1])) < 1500
    run(*files, resume=True)
    check(files[1])


def test_results_that_wait_for_an_early_one_are_bounded(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer takes as long as all others together: what is read ahead of it stays small."""
    monkeypatch.setattr(module, "BLOCK", 10)
    monkeypatch.setattr(module, "MOST_HELD", 50)
    seen: list[int] = []

    async def run_slowly() -> None:
        with opened(*files) as ends:
            free = asyncio.Event()

            async def before(ask: Ask) -> None:
                if ask.index == 20:
                    await free.wait()

            batch = BatchRun(ends, RequestReader(ALL), [Echo(24, before)])
            running = asyncio.ensure_future(batch.run())
            while len(batch._held) < 50 or len(seen) < 50 or seen[-1] != seen[-50]:
                await asyncio.sleep(0.001)
                seen.append(batch.tally.read)
            free.set()
            await running

    asyncio.run(run_slowly())
    assert seen[-1] <= 20 + 50 + 10 + 24 + 10
    check(files[1])


def test_a_pipe_is_answered_before_it_ends(tmp_path: Path) -> None:
    out, into = os.pipe()

    async def talk() -> None:
        with OutputFile(tmp_path / "o", resume=False, source=None) as output:
            batch = BatchRun(
                BatchChannels(LineReader(out, "a pipe"), output, FinishedRequests(), LineHeap()),
                RequestReader(ALL),
                [Echo()],
            )
            running = asyncio.ensure_future(batch.run())
            for text in ("one", "two"):
                os.write(into, f"{text}\n".encode())
                while not (rows := results(tmp_path / "o")) or rows[-1]["text"] != f"answer to {text}":
                    await asyncio.sleep(0.001)
            os.close(into)
            await running

    asyncio.run(talk())
    os.close(out)
    assert len(results(tmp_path / "o")) == 2


def test_a_line_that_is_no_request_fails_by_itself(tmp_path: Path) -> None:
    (source := tmp_path / "in.jsonl").write_text(
        '{"prompt": "a", "id": "x"}\n{"prompt": \n\n{"messages": [{"role": "user", "content": "b"}]}\n'
    )
    tally = run(source, tmp_path / "o")
    first, second, third = results(tmp_path / "o")
    assert (first["id"], first["text"], third["text"]) == ("x", "answer to a", "answer to b")
    assert str(json.loads(json.dumps(second))["error"]["message"]).startswith("line 2: it is not JSON: ")
    assert (tally.failed, [first["index"], second["index"], third["index"]]) == (1, [0, 1, 2])
