"""Models that come from disk when the disk fails or their file changes: the request of that moment ends
with a sentence, and no other; the next one is answered as if nothing had happened. Nothing is left behind.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.client.engine_client import WorkerClient
from hetrun.client.events import GenerateRequest
from hetrun.config import Settings
from hetrun.errors import ModelFileError
from hetrun.prefetch.streamer import Streamer
from tests.engine.asking import Answer
from tests.models.tiny import TinyLlama, write_gguf
from tests.support.streamed import (
    MIB,
    READERS,
    Disk,
    every_read,
    from_read,
    least,
    made_small,
    only_read,
    opened,
    seen,
)
from tests.support.supplies import eventually
from tests.support.tiers import exhaustive, first
from tests.tools.make_model import Shape, write_model as write_made

PROMPT = (5, 6, 7)
TEN = SamplingParams(max_tokens=10, temperature=0)
TINY = TinyLlama("t", layers=6, embd=512, ffn=1536, heads=8, kv_heads=4, head_dim=64, quant="Q4_0")
MADE = Shape("m", embd=1024, layers=6, ffn=3072, heads=16, kv_heads=4, head_dim=64, vocab=4096, context=512)
OPTIONS: dict[str, Any] = {
    "backends": ["llamacpp"],
    "planner": "static",
    "deterministic": True,
    "ctx": 256,
    "ubatch": 32,
}
FAILED = r"reading \S+ at byte \d+ failed: Input/output error"
ENDED = r"the file ends inside the tensor \S+, at byte \d+: it was truncated while in use; get it again"


# --- models and requests


@pytest.fixture(
    scope="module",
    # What fails and what follows from it is the same with the larger one: more reads of other sizes.
    params=["tiny", pytest.param("Q4_K_M", marks=(pytest.mark.slow, exhaustive))],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of a few MB, or of some dozen."""
    path = tmp_path_factory.mktemp("streamed") / f"{request.param}.gguf"
    if request.param == "tiny":
        return write_gguf(TINY, path)
    write_made(path, MADE, request.param, seed=0)
    return path


@pytest.fixture(scope="module")
def right(model: Path) -> tuple[list[int], bytes]:
    """What the model says with all weights in memory."""
    with LocalModel(model, **OPTIONS) as llm:
        return said(llm)


def said(llm: LocalModel) -> tuple[list[int], bytes]:
    """An answer, and logits of every token of a text."""
    logits = llm.logits([*PROMPT, 9, 11, 13])
    return tokens_of(llm), logits.tobytes()


def tokens_of(llm: LocalModel) -> list[int]:
    return list(llm.generate([list(PROMPT)], TEN)[0].tokens)


def submit(llm: LocalModel, params: SamplingParams = TEN, prompt: Sequence[int] = PROMPT) -> Answer:
    answer = Answer()
    answer.id = llm.submit(GenerateRequest(params, tokens=tuple(prompt)), answer)
    return answer


def refusal(answer: Answer) -> str:
    """What an answer ended with, which must be an error about the file."""
    assert answer.wait().last.kind == "error", answer.events
    assert isinstance(answer.last.error, ModelFileError)
    return str(answer.last.error)


def reads_of(llm: LocalModel, disk: Disk) -> int:
    """How many reads an answer takes."""
    disk.arm(None)
    tokens_of(llm)
    return disk.reads


def some(model: Path, count: int) -> list[int]:
    """The first of `count` reads, and others: a few, or in the slow tests many."""
    first, others = (1, 1) if model.stem == "tiny" else (3, 6)
    return sorted({*range(min(first, count)), *Random(1).sample(range(count), min(count, others))})


# --- the disk fails


@pytest.mark.parametrize("fault", [-errno.EIO, 0], ids=["EIO", "short"])
@pytest.mark.parametrize(
    ("streaming", "room"),
    [("none", 0), ("balanced", 2 * MIB), ("synchronous", MIB), ("balanced", 1 << 40)],
    ids=["nothing stays", "some stays", "synchronous", "only rows are read"],
)
def test_who_asks_while_the_disk_fails_hears_it(
    model: Path, right: tuple[list[int], bytes], streaming: str, room: int, fault: int
) -> None:
    """At whichever read it begins to fail, in whichever pass of an answer."""
    with opened(model, room, streaming=streaming, **OPTIONS) as (llm, disk, _):
        assert said(llm) == right
        assert (seen(llm).streamed_bytes == 0) == (room > 1 << 30)
        for first in some(model, reads_of(llm, disk) // 2):
            with disk.failing(from_read(first, fault)):
                answer = submit(llm)
                assert_matches(refusal(answer), str(model), FAILED if fault else ENDED)
                tokens = answer.tokens
                assert tokens == right[0][: len(tokens)]
            assert said(llm) == right


def assert_matches(text: str, path: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=f"^{path}: {pattern}$"):
        raise ValueError(text)


def test_one_read_that_fails_ends_one_answer_or_none(model: Path, right: tuple[list[int], bytes]) -> None:
    """What fails while it is read ahead of the pass that needs it is read again by that."""
    with opened(model, **OPTIONS) as (llm, disk, _):
        for nth in some(model, reads_of(llm, disk)):
            with disk.failing(only_read(nth, -errno.EIO)):
                answer = submit(llm).wait()
            if answer.last.kind == "done":
                assert answer.tokens == right[0]
            else:
                assert_matches(refusal(answer), str(model), FAILED)
        assert said(llm) == right


@pytest.mark.parametrize("every", [2, 7, 50, 400])
def test_a_disk_that_fails_now_and_then(model: Path, right: tuple[list[int], bytes], every: int) -> None:
    with opened(model, MIB, **OPTIONS) as (llm, disk, _):
        with disk.failing(every_read(every, -errno.EIO)):
            for _ in range(6):
                answer = submit(llm).wait()
                assert answer.last.kind == "error" or answer.tokens == right[0]
        assert said(llm) == right


@pytest.mark.parametrize("fault", [-errno.EINTR, 4608, 5000], ids=["EINTR", "4608 bytes", "5000 bytes"])
def test_reads_that_are_disturbed_or_short_go_on(
    model: Path, right: tuple[list[int], bytes], fault: int
) -> None:
    with opened(model, **OPTIONS) as (llm, disk, _):
        with disk.failing(every_read(3, fault)):
            assert said(llm) == right


def test_all_in_a_step_hear_it_and_those_who_come_later_do_not(
    model: Path, right: tuple[list[int], bytes]
) -> None:
    with opened(model, MIB, **OPTIONS) as (llm, disk, _):
        with disk.failing(from_read(30, -errno.EIO)):
            together = llm.call(lambda _: [submit(llm, prompt=(*PROMPT, n)) for n in range(4)])
            for answer in together:
                assert_matches(refusal(answer), str(model), FAILED)
        assert said(llm) == right


@pytest.mark.slow
def test_nothing_is_left_behind_of_requests_that_failed(model: Path, right: tuple[list[int], bytes]) -> None:
    """In the slow tests more of them than there are places for sequences."""
    with opened(model, MIB, **OPTIONS) as (llm, disk, _):
        random = Random(2)
        assert said(llm) == right
        before = held()
        for _ in range(150 if model.stem != "tiny" else 20):
            first = random.randrange(60)
            with disk.failing(from_read(first, -errno.EIO)):
                # Each prompt is new: nothing of it is known.
                refusal(submit(llm, prompt=[random.randrange(2, 300) for _ in range(8)]))
        assert said(llm) == right
        after = held()
        assert after["threads"] <= before["threads"]
        assert after["files"] <= before["files"]
        assert after["memory"] - before["memory"] < 16 * MIB
    eventually(lambda: not readers())


def held() -> dict[str, int]:
    """What a process has of what may leak."""
    gc.collect()  # the objects of a closed model know each other, and the mapping of its cache has two files
    with open("/proc/self/status", encoding="ascii") as lines:
        memory = next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
    names = {"threads": "/proc/self/task", "files": "/proc/self/fd"}
    return {"memory": memory, **{what: len(os.listdir(path)) for what, path in names.items()}}


def readers() -> list[str]:
    """The threads of rings that are open."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has just ended
            found.append(Path("/proc/self/task", task, "comm").read_text())
    return [name for name in found if "reader" in name]


# --- the file changes


@contextmanager
def cut(path: Path) -> Iterator[None]:
    size = path.stat().st_size
    with restored(path):
        with open(path, "r+b") as file:
            file.seek(size // 2)
            tail = file.read()
            file.truncate(size // 2)
        yield
        with open(path, "r+b") as file:
            file.seek(size // 2)
            file.write(tail)


@contextmanager
def written_to(path: Path) -> Iterator[None]:
    with restored(path):
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read()
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        yield
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(last)


@contextmanager
def restored(path: Path) -> Iterator[None]:
    """The time of its last change, as if it had not been touched."""
    before = path.stat()
    yield
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@contextmanager
def replaced(path: Path) -> Iterator[None]:
    aside, other = path.with_suffix(".aside"), path.with_suffix(".other")
    shutil.copy2(path, other)
    os.link(path, aside)
    other.replace(path)  # at once: another thread looks meanwhile
    yield
    aside.replace(path)


@contextmanager
def gone(path: Path) -> Iterator[None]:
    aside = path.with_suffix(".aside")
    path.rename(aside)
    yield
    aside.rename(path)


CHANGES = {
    cut: r"is \d+ bytes long and was \d+: it was changed while in use; open it again",
    written_to: "was written to: it was changed while in use; open it again",
    replaced: "is another file now: it was changed while in use; open it again",
    gone: "was changed while in use: No such file or directory; open it again",
}
changes = pytest.mark.parametrize(
    ("change", "what"), CHANGES.items(), ids=[change.__name__ for change in CHANGES]
)
Change = Callable[[Path], AbstractContextManager[None]]


@changes
@pytest.mark.parametrize("room", [0, MIB, 1 << 40])
def test_a_file_that_changed_since_the_last_answer_is_refused_until_it_is_back(
    model: Path, right: tuple[list[int], bytes], tmp_path: Path, change: Change, what: str, room: int
) -> None:
    path = Path(shutil.copy(model, tmp_path / "model.gguf"))
    with opened(path, room, **OPTIONS) as (llm, _, _):
        for _ in range(2):
            assert said(llm) == right
            with change(path):
                for _ in range(2):
                    assert_matches(refusal(submit(llm)), str(path), what)
        assert said(llm) == right


@pytest.mark.slow
@changes
def test_a_file_that_changes_in_the_middle_of_an_answer_ends_it(
    model: Path, right: tuple[list[int], bytes], tmp_path: Path, change: Change, what: str
) -> None:
    path = Path(shutil.copy(model, tmp_path / "model.gguf"))
    with opened(path, MIB, **OPTIONS) as (llm, disk, _):
        for nth in some(model, reads_of(llm, disk) // 2):
            with ExitStack() as undo:
                changed = threading.Event()

                def judge(
                    n: int, size: int, nth: int = nth, undo: ExitStack = undo, done: threading.Event = changed
                ) -> None:
                    if n == nth:
                        undo.enter_context(change(path))
                        done.set()

                with disk.failing(judge):
                    answer = submit(llm)
                    assert_matches(refusal(answer), str(path), what)
                    tokens = answer.tokens
                    assert changed.wait(30)  # or it would be undone before it is done
                assert tokens == right[0][: len(tokens)]
            assert said(llm) == right


# --- what stays changes while the disk fails


@pytest.mark.slow
def test_another_budget_while_the_disk_fails_changes_no_answer(
    model: Path, right: tuple[list[int], bytes]
) -> None:
    """Pieces go and others come: those that do not come must not be taken for there."""
    with opened(model, 4 * MIB, **OPTIONS) as (llm, disk, memory):
        said(llm)
        memory.leave(0)
        refused, stayed = 0, set()
        for nth in range(0, 40, 11 if model.stem == "tiny" else 5):
            more = [1, 4, 2, 5][nth % 4] * MIB
            with disk.failing(from_read(nth, -errno.EIO)):
                try:
                    llm.set_ram(memory.ram + more)
                except ModelFileError as e:
                    assert_matches(str(e), str(model), FAILED)
                    refused += 1
            assert said(llm) == right
            llm.set_ram(memory.ram + more)
            assert said(llm) == right
            stayed.add(seen(llm).locked_bytes)
        assert refused > 1
        assert len(stayed) > 1


@pytest.mark.slow
def test_who_asks_hears_nothing_of_pieces_that_cannot_be_brought_in(
    model: Path, right: tuple[list[int], bytes]
) -> None:
    """There is more room again, but the disk fails just then: the engine goes on with what it has."""
    with opened(model, 0, **OPTIONS) as (llm, disk, memory):
        assert said(llm) == right
        disk.arm(None)
        llm.generate([list(PROMPT)], SamplingParams(max_tokens=1))
        first = disk.reads  # and then comes the first look at what there is room for
        for nth in range(first // 2, first + 20, 6 if model.stem == "tiny" else 3):
            memory.leave(3 * MIB)
            with disk.failing(from_read(nth, -errno.EIO)):
                answer = submit(llm).wait()
                assert answer.tokens == right[0][: len(answer.tokens)]
                if answer.last.kind == "error":
                    assert_matches(refusal(answer), str(model), FAILED)
            assert said(llm) == right
            memory.leave(-3 * MIB)
            assert said(llm) == right


# --- cancelling


def test_a_cancel_waits_for_reads_in_flight_and_for_no_other(
    model: Path, right: tuple[list[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts = 0
    restart = Streamer.restart

    def counting(self: Streamer) -> None:
        nonlocal restarts
        restarts += 1
        restart(self)

    monkeypatch.setattr(Streamer, "restart", counting)
    with opened(model, **OPTIONS) as (llm, disk, _):
        for at in some(model, reads_of(llm, disk) // 2):
            gates = Gates(at)
            disk.arm(gates)
            answer = submit(llm)
            assert gates.holding.wait(20)
            before = restarts
            llm.cancel(answer.id)
            # Each reader may be on its way into a read, and so may each thread that computes.
            gates.limit = disk.reads + READERS + len(os.sched_getaffinity(0))
            gates.in_flight.set()
            assert answer.wait().last.finish_reason == "cancelled"
            gates.later.set()
            disk.arm(None)
            assert answer.tokens == right[0][: len(answer.tokens)]
            assert said(llm) == right
            assert restarts <= before + 1  # a second one would wait for what is read ahead by then


class Gates:
    """Holds up all reads from one on; those from `limit` on longer."""

    def __init__(self, first: int) -> None:
        self.first, self.limit = first, 1 << 40
        self.holding, self.in_flight, self.later = (threading.Event() for _ in range(3))

    def __call__(self, number: int, size: int) -> None:
        if number >= self.first:
            self.holding.set()
            (self.in_flight if number < self.limit else self.later).wait(20)


@pytest.mark.slow
def test_a_cancel_at_any_time_harms_no_other_request(model: Path, right: tuple[list[int], bytes]) -> None:
    with opened(model, MIB, **OPTIONS) as (llm, disk, _):
        assert said(llm) == right
        before = held()
        for at in some(model, reads_of(llm, disk)):
            begun = threading.Event()
            disk.arm(Signal(at, begun))
            answer = submit(llm, SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
            assert begun.wait(20)
            llm.cancel(answer.id)
            assert answer.wait().last.kind == "done"
            assert answer.tokens[:10] == right[0][: len(answer.tokens)]
            assert tokens_of(llm) == right[0]
        assert said(llm) == right
        after = held()
        assert after["threads"] <= before["threads"]
        assert after["files"] <= before["files"]


class Signal:
    """Says when a read begins."""

    def __init__(self, which: int, begun: threading.Event) -> None:
        self.which, self.begun = which, begun

    def __call__(self, number: int, size: int) -> None:
        if number == self.which:
            self.begun.set()


def test_closing_in_the_middle_of_a_pass_waits_for_reads_in_flight_only(model: Path) -> None:
    files = []
    for _ in range(3):
        with opened(model, **OPTIONS) as (llm, disk, _):
            gates = Gates(40)
            disk.arm(gates)
            answer = submit(llm)
            assert gates.holding.wait(20)
            closing = threading.Thread(target=llm.close)
            closing.start()
            assert not answer.over.wait(0.01)
            gates.in_flight.set()
            closing.join(20)
            assert not closing.is_alive()
            assert answer.wait().last.kind == "error"
            eventually(lambda: not readers())
        files.append(held()["files"])
    assert files[2] <= files[1]


# --- killed

COMMAND = """
from hetrun.cli import main
from tests.support.streamed import made_small
with made_small():
    main()
"""


def left(before: set[str]) -> set[str]:
    """Shared memory that is new, and that no process holds: others make some as well, and take it away."""
    new = shared() - before
    if new:
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):  # it has just ended, or is another user's
                held = maps.read_text()
                new = {path for path in new if path not in held}
    return {path for path in new if os.path.exists(path)}


def shared() -> set[str]:
    """Shared memory of anybody."""
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(range(6), 2))
def test_a_command_that_is_killed_leaves_nothing(model: Path, tmp_path: Path, home: Path, seed: int) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    before, memory = os.listdir(model.parent), shared()
    options = ["-m", str(model), "--backend", "llamacpp", "--planner", "static", "--ctx", "256"]
    options += ["--ubatch", "32", "-n", "200", "--ignore-eos"]
    ram = str(least_of(model) + MIB)
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "run", "hi", *options, "--ram", ram],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(scratch)},
        start_new_session=True,
    )
    assert process.stdout is not None
    if seed % 2:  # while it answers
        process.stdout.read(Random(seed).randrange(1, 50))
    else:  # while it is loaded
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(Random(seed).random() / 2)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    eventually(lambda: not session(process.pid))
    assert (os.listdir(model.parent), os.listdir(scratch)) == (before, [])
    eventually(lambda: not left(memory))
    assert not [path for path in home.rglob("*") if path.name.startswith(".") or ".part" in path.name]


def least_of(model: Path) -> int:
    with made_small():
        return least(model, **OPTIONS)


def session(pid: int) -> list[int]:
    """The processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            facts = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has just ended
        if int(facts[3]) == pid and facts[0] != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, pytest.param(5, marks=exhaustive)])
async def test_a_worker_that_is_killed_again_and_again_is_followed_by_one_that_answers(
    model: Path, right: tuple[list[int], bytes], times: int
) -> None:
    memory, random = shared(), Random(3)
    settings = Settings.resolve(
        environ=None, model=str(model), ram=str(least_of(model) + MIB), ctx="256", ubatch="32",
        backends=["llamacpp"], planner="static", deterministic=True,
    )  # fmt: skip
    client = WorkerClient(settings, engine="tests.support.streamed:engine")
    pids = set()
    try:
        for _ in range(times):
            await client.info()
            pids.add(client.pid)
            request = GenerateRequest(
                SamplingParams(max_tokens=200, temperature=0, ignore_eos=True), tokens=PROMPT
            )
            events = []
            after = random.randrange(1, 12)
            async for event in client.stream(request):
                events.append(event)
                if len(events) == after:
                    os.kill(client.pid, signal.SIGKILL)
            assert events[-1].kind == "error"
            assert "was killed" in str(events[-1].error)
            answer = [e async for e in client.stream(GenerateRequest(TEN, tokens=PROMPT))]
            assert [e.token for e in answer[:-1]] == right[0]
        pids.add(client.pid)
    finally:
        await client.close()
    assert len(pids) == times + 1
    await asyncio.to_thread(eventually, lambda: not [p for p in pids if Path(f"/proc/{p}").exists()])
    await asyncio.to_thread(eventually, lambda: not left(memory))
