"""`hetrun run -f`: a file of requests, its results as JSON lines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import stat
import sys
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Literal, TypeVar

from hetrun.cli.output import in_json, say
from hetrun.cli.progress import ProgressRow, rows
from hetrun.cli.serve import loaded
from hetrun.cli.workers import elsewhere
from hetrun.client import sampler_plugins
from hetrun.client.engine_client import WorkerClient
from hetrun.client.events import ModelInfo
from hetrun.client.interface import ChatClient
from hetrun.client.queries import StateQuery, StepSeconds
from hetrun.client.sampling_params import DEFAULT_TEMPERATURE
from hetrun.config import Settings
from hetrun.errors import HetrunError, OptionError, UserError
from hetrun.planner.precision import precision_of
from hetrun.sampling.sampler import random_seed
from hetrun.system.units import counted
from hetrun.tools.batch.line_reader import LineReader
from hetrun.tools.batch.output_file import LineOutput, OutputFile
from hetrun.tools.batch.reorder_buffer import LineHeap, waiting_beside, waiting_path
from hetrun.tools.batch.request_lines import CHAT, COMPLETIONS, ForAll, RequestReader
from hetrun.tools.batch.resume import FinishedRequests
from hetrun.tools.batch.runner import BLOCK, BatchChannels, BatchRun, BatchTally, StaysFull
from hetrun.tools.batch.worker import Place, PluginPlace

T = TypeVar("T")

SOME_FAILED = 3  # exit code
KINDS: Mapping[str, Literal["text", "json"]] = {
    **{".txt": "text", ".jsonl": "json", ".ndjson": "json", ".json": "json"}
}
POLL_S = 0.1
RECENT_S = 20.0  # over which the speed is measured
LOOK_S = 0.5  # between two looks at how far answers are
ASK_S = 2.0  # between two questions what steps take
# Before there is a result: what a request may be like. Few answers need more tokens.
GUESSED_PROMPT, GUESSED_ANSWER = 64, 256


@dataclass(frozen=True)
class Files:
    """What is read, what is written, and how."""

    source: str  # "-": standard input
    output: Path | None = None
    resume: bool = False
    unordered: bool = False
    workers: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """That of pictures which lines name by a path."""
        found = Path() if self.source == "-" else Path(self.source).expanduser().parent
        return found.resolve()


def run_file(
    settings: Settings,
    files: Files,
    sampling: Mapping[str, object],
    *,
    raw: bool,
    as_json: bool,
    verbose: bool,
) -> int:
    """Answer every line of a file; the exit code."""
    if files.resume and files.output is None:
        raise OptionError("--resume continues a file of results: name it with -o")
    for name in ("logprobs", "prompt_logprobs"):
        if name in sampling:
            raise OptionError(f"{name} is for single prompts: in a file, set it in each line")
    began = monotonic()
    with reading(files.source) as lines, writing(files) as (output, held):
        ends = BatchChannels(lines, output, FinishedRequests(output if files.resume else None), held)
        try:
            tally = asyncio.run(until_told(_run(settings, files, ends, dict(sampling), raw)))
        except StaysFull as full:
            say(str(full))
            return SOME_FAILED
        except (asyncio.CancelledError, KeyboardInterrupt):
            if files.output:
                say(stopped_in_words(files.output, files.resume, ends.tally, ends.done.count))
            raise KeyboardInterrupt from None
    seconds = monotonic() - began
    if as_json and files.output:
        print(in_json(summary(tally, seconds)))
    elif verbose or tally.failed or sys.stderr.isatty():
        say(in_words(tally, seconds))
    return SOME_FAILED if tally.failed else 0


async def until_told(work: Coroutine[object, object, T]) -> T:
    """The work's result; Ctrl-C and SIGTERM end it.

    As callbacks of the loop: asyncio's own handler for Ctrl-C cancels in the midst of whatever runs, also
    between a look whether a future is done and its result, which is an InvalidStateError then.
    """
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()

    def stop() -> None:
        task.cancel()
        loop.remove_signal_handler(signal.SIGINT)  # a second one ends at once

    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a job in the background
        loop.add_signal_handler(signal.SIGINT, stop)
    return await task


@contextmanager
def reading(source: str) -> Iterator[LineReader]:
    """The lines of a file, or of standard input."""
    if source == "-":
        if sys.stdin.isatty():
            say("reading requests from the terminal, one a line (Ctrl-D ends)")
        yield LineReader(sys.stdin.fileno(), "standard input")
        return
    try:
        fd = os.open(Path(source).expanduser(), os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise UserError(f"-f {source} cannot be opened: {getattr(error, 'strerror', error)}") from None
    try:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise UserError(f"-f {source} is a folder: give a file with one request per line")
        yield LineReader(fd, source)
    finally:
        os.close(fd)


@contextmanager
def writing(files: Files) -> Iterator[tuple[LineOutput, LineHeap]]:
    """Where results go, and where they wait."""
    if files.output is None:
        yield LineOutput(sys.stdout.fileno(), "standard output"), LineHeap()
        return
    source = None if files.source == "-" else Path(files.source)
    with OutputFile(files.output, files.resume, source) as output:
        with waiting_beside(output, files.resume) as file:
            yield output, LineHeap(file)


async def _run(
    settings: Settings, files: Files, ends: BatchChannels, sampling: dict[str, object], raw: bool
) -> BatchTally:
    kind = KINDS.get(Path(files.source).suffix.lower())
    if files.workers:
        async with elsewhere(files.workers, settings) as places:
            starts = any(isinstance(place, PluginPlace) for place in places)
            for_all = said_of_all(settings, sampling, raw, None, starts)
            return await _shown(ends, RequestReader(for_all, kind), places, files, settings, None)
    for_all = said_of_all(settings, sampling, raw, None)
    if _has_no_request(ends.lines, RequestReader(for_all, kind)):
        return await _shown(ends, RequestReader(for_all, kind), [], files, settings, None)
    client = WorkerClient(settings)
    try:
        _server()  # imported while the worker loads
        await loaded(client, asyncio.Event())
        info = await client.info()
        place = await _here(client, settings)
        reader = RequestReader(said_of_all(settings, sampling, raw, info), kind)
        return await _shown(ends, reader, [place], files, settings, client)
    finally:
        await client.close()


def _has_no_request(lines: LineReader, reader: RequestReader) -> bool:
    """Whether no line of a file is a request, as far as that shows at once; no model is needed then."""
    if lines.size is None:  # a pipe is read when the model is there
        return False
    asks = [reader.read(line) for line in lines.ahead(BLOCK)]
    return lines.at_end and all(ask is None or ask.fault for ask in asks)


def _server() -> ModuleType:
    from hetrun.server import app

    return app


async def _here(client: ChatClient, settings: Settings) -> Place:
    from hetrun.tools.batch.local_worker import LocalPlace

    places = (await client.ask(StateQuery())).places
    app = _server().create_app(
        client,
        strict=settings.strict,
        tool_parser=settings.tool_parser,
        reasoning_format=settings.reasoning_format,
    )
    # Some wait for a place, so that none is ever empty.
    return LocalPlace(app, places + min(max(2, places // 4), settings.queue))


def said_of_all(
    settings: Settings,
    sampling: dict[str, object],
    raw: bool,
    info: ModelInfo | None,
    starts: bool = False,
) -> ForAll:
    """What the command line says of every request. `starts`: places start engines as it says."""
    from hetrun.server import chat, sampling as fields
    from hetrun.server.routes import completions

    body = dict(sampling)
    chosen = {"max_tokens": settings.max_tokens, "temperature": settings.temperature}
    body |= {name: value for name, value in chosen.items() if value is not None}
    own: dict[str, object] = {}
    if info and info.temperature is None and "temperature" not in body:
        own["temperature"] = DEFAULT_TEMPERATURE  # as of a single prompt
    brought = tuple(sampler_plugins.parameters())  # by samplers of packages
    known = {CHAT: (*chat.KNOWN, *brought), COMPLETIONS: (*completions.KNOWN, *brought)}
    seed = 0 if settings.seed is None and settings.deterministic else settings.seed
    identity = [body, own, seed, raw, settings.system, *_of_the_model(settings, info, starts)]
    return ForAll(
        known,
        limits=fields.LIMITS,
        forms=fields.FORMS,
        body=body,
        own=own,
        system=settings.system,
        raw=raw,
        seed=random_seed() if seed is None else seed,
        digest=hashlib.blake2b(json.dumps(identity, default=str).encode(), digest_size=16).digest(),
    )


def _of_the_model(settings: Settings, info: ModelInfo | None, starts: bool) -> list[object]:
    numbers = (precision_of(settings.precision), settings.kv_type, settings.deterministic)
    if info is None:
        return [settings.model, *numbers] if starts else []
    return [info.name, info.architecture, info.file_bytes, info.template_origin, *numbers]


# --- what people see


async def _shown(
    ends: BatchChannels,
    reader: RequestReader,
    places: Sequence[Place],
    files: Files,
    settings: Settings,
    client: ChatClient | None,
) -> BatchTally:
    batch = BatchRun(
        ends,
        reader,
        places,
        in_order=not files.unordered,
        same=settings.deterministic,
        folder=files.folder,
    )
    running = asyncio.ensure_future(batch.run())
    try:
        with rows("answers") as show:
            if show is None:
                return await running
            outlook = BatchOutlook(client, settings.max_tokens, sum(place.lanes for place in places))
            while not (await asyncio.wait((running,), timeout=POLL_S))[0]:
                show(outlook.row(batch.tally, ends.lines))
                await outlook.ask()
        return running.result()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, HetrunError):
            await running


class BatchOutlook:
    """How fast a batch is, and when it will be over.

    By what the engine expects of its steps first, and by what became of requests once enough are answered.
    No engine knows how long answers will be: they are taken to be as long as those that have ended, or as
    most_tokens if that is little. Where neither is known, nothing is said.
    """

    def __init__(self, client: ChatClient | None, most_tokens: int | None, together: int) -> None:
        self._client, self._together = client, together
        short = most_tokens is not None and most_tokens <= GUESSED_ANSWER
        self._answer: float | None = most_tokens if short else None  # tokens of an answer
        self._seen: deque[tuple[float, float, int]] = deque([(monotonic(), 0.0, 0)])
        self._changed_at = monotonic()  # when there was something new to see
        self._step: float | None = None  # seconds of a step of all that run together
        self._alone = self._prompt = 0.0  # seconds of a step of one answer, and of a prompt
        self._each: float | None = None  # seconds of a request, of which several run at a time
        self._rate = 0.0  # tokens a second
        self._enough = max(1, together // 2)  # answers, by which the time of one is known
        self._running: tuple[int, ...] = ()  # tokens of the answers that are being written
        self._written = 0  # tokens of all answers so far
        self._left = together  # requests
        self._ask_at = self._step_at = float("-inf")

    async def ask(self) -> None:
        """Ask the engine, now and then: how far answers are and, until there are results, what steps take,
        which it learns meanwhile."""
        if self._client is None or monotonic() < self._ask_at:
            return
        self._ask_at = monotonic() + LOOK_S
        with suppress(HetrunError):  # an outlook is no reason to end what it is of
            state = await self._client.ask(StateQuery())
            self._written = state.counts.answer_tokens
            self._running = tuple(slot.answer_tokens for slot in state.slots)
            if monotonic() >= self._step_at:
                self._step_at = monotonic() + ASK_S
                await self._ask_for_steps(self._client)

    async def _ask_for_steps(self, client: ChatClient) -> None:
        depth = GUESSED_PROMPT + (self._answer or GUESSED_ANSWER) / 2
        step = await client.ask(StepSeconds(tuple([(1, depth)] * self._lanes)))
        alone = await client.ask(StepSeconds(((1, depth),)))
        prompt = await client.ask(StepSeconds(((GUESSED_PROMPT, 0.0),)))
        if step is not None and alone is not None and prompt is not None:
            self._step, self._alone, self._prompt = step, alone, prompt

    @property
    def _lanes(self) -> int:
        """How many requests run together: in the end fewer than there are places."""
        return max(1, min(self._together, self._left))

    def row(self, tally: BatchTally, lines: LineReader) -> ProgressRow:
        """What the bar shows now."""
        now = monotonic()
        if (good := tally.answered - tally.failed) and tally.answer_tokens:
            self._answer = tally.answer_tokens / good
        begun = [min(1.0, tokens / self._answer) for tokens in self._running] if self._answer else []
        total = _total(tally, lines)
        if total is not None:
            self._left = max(0, total - tally.before - tally.answered)
        # Between two looks at the engine, answers may end that still count as running.
        begun = sorted(begun)[: self._left]
        self._look(now, tally, tally.answered + sum(begun))
        left = None if total is None else self._seconds_left(now, tally, self._left - sum(begun))
        return ProgressRow(tally.before + tally.answered, total, _remarks(tally, self._rate), left)

    def _look(self, now: float, tally: BatchTally, done: float) -> None:
        """Measure the speed up to the last thing that was seen, so that it does not fall until the next."""
        _, done_before, tokens_before = self._seen[-1]
        done = max(done, done_before)
        tokens = max(tally.answer_tokens, self._written, tokens_before)
        if (done, tokens) != (done_before, tokens_before):
            self._changed_at = now
        self._seen.append((now, done, tokens))
        while len(self._seen) > 2 and now - self._seen[0][0] > RECENT_S:
            self._seen.popleft()
        then, done_then, tokens_then = self._seen[0]
        seconds = self._changed_at - then
        if seconds > 0 and tokens > tokens_then:
            self._rate = (tokens - tokens_then) / seconds
        elif self._client is not None and now - self._changed_at > RECENT_S:
            self._rate = 0.0  # a server tells of its tokens only with results
        if seconds > 0 and done > done_then and (tally.answered >= self._enough or self._step is None):
            self._each = seconds / (done - done_then) if tally.answered else None
        if tally.answered >= self._enough:
            self._step_at = now + ASK_S

    def _seconds_left(self, now: float, tally: BatchTally, requests: float) -> float | None:
        """Of several requests; one that is half done counts half."""
        if not self._left:
            return 0.0
        each, first = self._each, 0.0
        if each is None and self._step is not None and self._answer is not None:
            each = self._answer * self._step / self._lanes + self._prompt
            if not tally.answered and self._left > 1:  # the first one runs alone
                first = max(0.0, self._answer - max(self._running, default=0)) * self._alone
                requests = self._left - 1
        if each is None:
            return None
        left = first + each * requests - (now - self._changed_at)
        return left if left > 0 else None  # it takes longer than was known


def _total(tally: BatchTally, lines: LineReader) -> int | None:
    """How many requests there are; by their sizes, as long as not all are read."""
    if tally.complete or not lines.size or not lines.at:
        return tally.read if tally.complete else None
    return max(tally.read, round(tally.read * lines.size / lines.at))


def _remarks(tally: BatchTally, rate: float) -> str:
    failed = f", {tally.failed} failed" if tally.failed else ""
    running = f"{tally.running} running, " if tally.running else ""
    return tally.waits_for or f"{running}{counted(rate, 'token', '.0f')}/s{failed}"


def summary(tally: BatchTally, seconds: float) -> dict[str, object]:
    """What `run -f -o --json` prints."""
    return {
        "requests": tally.read,
        "answered_before": tally.before,
        "answered": tally.answered,
        "failed": tally.failed,
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.answer_tokens,
        "seconds": seconds,
    }


def stopped_in_words(output: Path, resume: bool, tally: BatchTally, before: int) -> str:
    """What has been done when a run is stopped, and how to go on; `before`: results that the file had."""
    done = max(tally.before + tally.answered, before)
    waiting = waiting_path(output)
    files = f"{output} and {waiting}" if waiting.exists() else str(output)
    if not done:
        kept = "nothing is answered yet"
    elif tally.complete:
        kept = f"{done} of {counted(tally.read, 'request')} answered and kept in {files}"
    else:
        kept = f"{counted(done, 'request')} answered and kept in {files}"
    same = "the same command" if resume else "the same command with --resume"
    return f"stopped: {kept}; {same} finishes the file"


def in_words(tally: BatchTally, seconds: float) -> str:
    """One line on how it went."""
    before = f", {tally.before} from an earlier run" if tally.before else ""
    rate = counted(tally.answer_tokens / seconds, "token", ".0f")
    said = f"{counted(tally.answered, 'result')} in {seconds:.1f} s{before}; {rate}/s with loading"
    if not tally.failed:
        return said
    return f"{said}; {tally.failed} of {tally.answered} failed, the first: {tally.first_failure}"
