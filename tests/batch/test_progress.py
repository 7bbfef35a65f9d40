"""What a batch says of itself while it runs: how far it is, how fast, and how long it will take."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from hetrun import cli
from hetrun.cli import batch, progress
from hetrun.cli.batch import BatchOutlook, stopped_in_words
from hetrun.cli.progress import OPENING, ProgressRow, clock, loading, rows
from hetrun.client.interface import ChatClient
from hetrun.client.queries import Counts, EngineState, Question, Slot, StateQuery, StepSeconds
from hetrun.errors import UserError
from hetrun.system.progress import MeasuringProgress, stretch
from hetrun.tools.batch.line_reader import LineReader
from hetrun.tools.batch.runner import BatchTally
from tests.models.tiny import TinyLlama, write_gguf


class Planner:
    """Says what steps take, and how far answers are."""

    def __init__(self) -> None:
        self.slower, self.asked, self.together = 1.0, 0, 10
        self.running: tuple[int, ...] = ()
        self.written = 0

    async def ask(self, question: Question[object]) -> object:
        if isinstance(question, StateQuery):
            slots = tuple(Slot(i, "answer", 1.0, answer_tokens=n) for i, n in enumerate(self.running))
            return EngineState(Counts(answer_tokens=self.written), slots, 10, 512, None, None)
        assert isinstance(question, StepSeconds)
        self.asked += 1
        return self.slower * (0.2 if len(question.chunks) == self.together else 0.1)


@pytest.fixture
def lines(tmp_path: Path) -> LineReader:
    (tmp_path / "in.txt").write_text("x" * 99 + "\n" * 1)
    with (tmp_path / "in.txt").open("rb") as file:
        found = LineReader(file.fileno(), "in.txt")
        found.size = 100_000
        found.at = 10_000
        return found


def test_the_planner_speaks_until_there_are_results(
    lines: LineReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(batch, "monotonic", lambda: now[0])
    outlook = BatchOutlook(cast("ChatClient", Planner()), most_tokens=50, together=10)
    tally = BatchTally(read=100)
    now[0] = 1.0
    assert outlook.row(tally, lines).left_s is None
    asyncio.run(outlook.ask())
    row = outlook.row(tally, lines)
    assert (row.done, row.total) == (0, 1000)  # by sizes: a tenth was read
    # The first one alone, then ten at a time; a second has gone by.
    assert row.left_s == pytest.approx(50 * 0.1 + 999 * (50 * 0.2 / 10 + 0.1) - 1.0)
    now[0] = 11.0
    tally.answered, tally.answer_tokens, tally.failed = 100, 4000, 3
    row = outlook.row(tally, lines)
    assert row.left_s == pytest.approx(900 * 11 / 100)
    assert row.remarks == f"{4000 / 11:.0f} tokens/s, 3 failed"
    tally.running = 64
    assert outlook.row(tally, lines).remarks == f"64 running, {4000 / 11:.0f} tokens/s, 3 failed"
    tally.complete, tally.waits_for = True, "out: No space left on device"
    row = outlook.row(tally, lines)
    assert (row.total, row.left_s, row.remarks) == (100, 0.0, "out: No space left on device")


def test_the_engine_is_asked_again_until_there_are_results(
    lines: LineReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, planner = [0.0], Planner()
    monkeypatch.setattr(batch, "monotonic", lambda: now[0])
    outlook, tally = (
        BatchOutlook(cast("ChatClient", planner), most_tokens=50, together=10),
        BatchTally(read=100),
    )

    def left() -> float | None:
        now[0] += 0.1
        row = outlook.row(tally, lines)
        asyncio.run(outlook.ask())
        return row.left_s

    for _ in range(10):
        left()
    assert planner.asked == 3  # for answers, for one alone, and for a prompt
    planner.slower = 3.0
    for _ in range(20):
        found = left()
    assert found == pytest.approx(3 * (50 * 0.1 + 999 * (50 * 0.2 / 10 + 0.1)) - now[0])
    asked, tally.answered = planner.asked, 5
    for _ in range(40):
        left()
    assert planner.asked == asked


def test_only_the_last_while_counts(lines: LineReader, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(batch, "monotonic", lambda: now[0])
    outlook, tally = BatchOutlook(None, None, together=4), BatchTally(read=100)
    for second in range(1, 61):
        now[0] = float(second)
        tally.answered += 10 if second <= 30 else 1
        row = outlook.row(tally, lines)
    assert row.left_s == pytest.approx((1000 - tally.answered) * 1.0, rel=0.06)


def followed(
    lines: LineReader, monkeypatch: pytest.MonkeyPatch, most_tokens: int | None, lengths: int
) -> list[tuple[float, ProgressRow]]:
    """A resumed batch: five of six requests are left, for which there are forty places. The first runs
    alone, then four together, ten tokens a second each. Rows and when they were shown."""
    now, planner, tally = [0.0], Planner(), BatchTally(read=6, before=1, complete=True)
    planner.together = 5
    monkeypatch.setattr(batch, "monotonic", lambda: now[0])
    outlook = BatchOutlook(cast("ChatClient", planner), most_tokens, together=40)
    found = []
    for tick in range(1, 2 * lengths):
        now[0] = tick / 10
        first, others = min(tick, lengths), max(0, tick - lengths)
        tally.answered, tally.answer_tokens = (1, lengths) if others else (0, 0)
        planner.running = (others,) * 4 if others else (first,)
        planner.written = first + 4 * others
        found.append((now[0], outlook.row(tally, lines)))
        asyncio.run(outlook.ask())
    return found


def test_the_time_left_of_a_few_requests_falls_to_the_end(
    lines: LineReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though none of them ends between, and though there are far more places than requests."""
    found = followed(lines, monkeypatch, None, 120)
    assert all(row.left_s is None for now, row in found if now < 12)  # how long answers are is not known yet
    # The last four are expected to be as long as the first, and take 0.1 s a token.
    said = {now: row.left_s for now, row in found if 15 < now < 23.5}
    assert said == pytest.approx({now: 24 - now for now in said}, abs=1.0)


def test_the_speed_counts_tokens_of_answers_that_run(
    lines: LineReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = followed(lines, monkeypatch, 120, 120)
    rates = [float(row.remarks.split()[0]) for now, row in found if 3 < now < 12]
    assert rates == pytest.approx([10] * len(rates), abs=1)
    assert all(row.left_s is not None for now, row in found if 1 < now < 23)


def test_a_server_tells_only_of_results(lines: LineReader, monkeypatch: pytest.MonkeyPatch) -> None:
    now, tally = [0.0], BatchTally(read=10, complete=True)
    monkeypatch.setattr(batch, "monotonic", lambda: now[0])
    outlook = BatchOutlook(None, None, together=1)
    now[0], tally.answered, tally.answer_tokens = 10.0, 2, 200
    rows = {}
    for second in range(10, 60):
        now[0] = float(second)
        rows[second] = outlook.row(tally, lines)
    assert {row.remarks for row in rows.values()} == {"20 tokens/s"}
    assert [rows[second].left_s for second in (10, 20, 49)] == [40.0, 30.0, 1.0]
    assert rows[55].left_s is None  # it takes longer than was known


def test_clocks() -> None:
    assert [clock(s) for s in (0.4, 65, 3599.6, 7265)] == ["0:00", "1:05", "1:00:00", "2:01:05"]


def test_a_file_without_a_request_needs_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(batch, "WorkerClient", never)
    (tmp_path / "in.jsonl").write_text('{"prompt"\n\n{"promt": "a"}\n[1]\n')
    output = tmp_path / "out.jsonl"
    code = cli.exit_code(["run", "-f", str(tmp_path / "in.jsonl"), "-o", str(output)])
    assert code == 3
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["error"]["message"][:24] for row in rows] == [
        "line 1: it is not JSON: ",
        "line 3: unknown field 'p",
        "line 4: it is not a JSON",
    ]
    assert "hetrun: 3 results in " in capsys.readouterr().err


def test_one_request_in_a_file_is_enough_for_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def opened(*arguments: object) -> None:
        asked.append(arguments)
        raise UserError("no model here")

    monkeypatch.setattr(batch, "WorkerClient", opened)
    (tmp_path / "in.jsonl").write_text('{"prompt"\n{"prompt": "a"}\n')
    assert cli.exit_code(["run", "-f", str(tmp_path / "in.jsonl")]) == 2
    assert len(asked) == 1


@pytest.mark.slow
def test_a_terminal_sees_a_bar(tmp_path: Path) -> None:
    model = write_gguf(TinyLlama("tiny", layers=1), tmp_path / "tiny.gguf")
    (tmp_path / "in.txt").write_text("".join(f"Say {i}\n" for i in range(400)))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hetrun", "run", "-m", model, "-f", tmp_path / "in.txt", "-n", "8"]
    process = subprocess.Popen(
        [*map(str, command), "-o", str(tmp_path / "out")],
        env=os.environ | {"COLUMNS": "120", "TERM": "xterm"}, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 4096):
            seen += part
    except OSError:  # how a terminal ends
        pass
    os.close(ours)
    assert process.wait() == 0
    text = seen.decode(errors="replace")
    assert "of 400" in text
    assert "tokens/s" in text
    assert " left" in text
    assert "400 results in " in text


def test_the_bar_says_when_a_model_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(*parts: float) -> str:
        with loading(OPENING) as tell:
            assert tell is not None
            for part in parts:
                tell(part)
        return capsys.readouterr().err

    monkeypatch.setattr(progress, "PATIENCE", -1.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    measured: list[float] = []
    stretch(measured.append, 0.5, 1, MeasuringProgress)(0.5)
    assert "measuring this model, once" in shown(0.3, *measured)
    said = shown(0.3, 0.75, MeasuringProgress(1.0))
    assert "loading" in said
    assert "measuring" not in said


def test_who_stops_a_batch_is_told_what_is_done_and_how_to_go_on() -> None:
    out = Path("out.jsonl")
    begun = BatchTally(read=5, before=1, answered=2, complete=True)
    said = "stopped: 3 of 5 requests answered and kept in out.jsonl; the same command with --resume finishes"
    assert stopped_in_words(out, False, begun, 1) == f"{said} the file"
    said = "stopped: 1 request answered and kept in out.jsonl; the same command finishes the file"
    assert stopped_in_words(out, True, BatchTally(), 1) == said  # before a line was read
    said = "stopped: nothing is answered yet; the same command with --resume finishes the file"
    assert stopped_in_words(out, False, BatchTally(read=5, complete=True), 0) == said


def read_terminal(descriptor: int) -> bytes:
    """What is there next; nothing once all is read and the other side is closed."""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""


def test_a_remark_stands_in_a_line_of_its_own_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    engine = logging.getLogger("hetrun.engine")
    with os.fdopen(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        logging.getLogger("hetrun").addHandler(cli.REMARKS)
        try:
            with rows("answers") as show:
                assert show
                show(ProgressRow(1, 300, "64 running, 9 tokens/s"))
                engine.warning("the disk is full")
                show(ProgressRow(2, 300, "64 running, 9 tokens/s"))
        finally:
            logging.getLogger("hetrun").removeHandler(cli.REMARKS)
            cli.REMARKS.said.discard("the disk is full")
    text = b"".join(iter(lambda: read_terminal(ours), b"")).decode()
    os.close(ours)
    # What the terminal was told between the bar and the remark takes the bar's line away.
    (before, after) = text.split("hetrun: the disk is full")
    assert before.endswith(("\x1b[2K", "\r", "\n"))
    assert after.startswith("\r\n")
