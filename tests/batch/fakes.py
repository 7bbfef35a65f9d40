"""Places that answer as a test says, and the files around a batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hetrun.server import chat, sampling
from hetrun.server.routes import completions
from hetrun.tools.batch.line_reader import LineReader
from hetrun.tools.batch.output_file import OutputFile
from hetrun.tools.batch.reorder_buffer import LineHeap, waiting_beside
from hetrun.tools.batch.request_lines import CHAT, COMPLETIONS, Ask, ForAll, RequestReader
from hetrun.tools.batch.result_lines import Reply
from hetrun.tools.batch.resume import FinishedRequests
from hetrun.tools.batch.runner import BatchChannels, BatchRun, BatchTally
from hetrun.tools.batch.worker import Place

ALL = ForAll({CHAT: chat.KNOWN, COMPLETIONS: completions.KNOWN}, sampling.LIMITS, sampling.FORMS)


def reply(text: str, status: int = 200) -> Reply:
    """What a server says."""
    if status != 200:
        return Reply(status, json.dumps({"error": {"message": text, "type": "t", "code": None}}).encode())
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return Reply(200, json.dumps({"id": "chatcmpl-1", "choices": [choice], "usage": usage}).encode())


def said(ask: Ask) -> str:
    """What the user says in a request."""
    messages = ask.body["messages"]
    assert isinstance(messages, list)
    return str(messages[-1]["content"])


class Echo(Place):
    """Answers with what it was asked, behind whatever a test wants to happen before."""

    name = "echo"

    def __init__(self, lanes: int = 8, before: Callable[[Ask], Awaitable[None]] | None = None) -> None:
        self.lanes = lanes
        self.asked: list[int] = []
        self.most = self._now = 0
        self._before = before

    async def answer(self, ask: Ask) -> Reply:
        self.asked.append(ask.index)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await (self._before(ask) if self._before else asyncio.sleep(0))
        finally:
            self._now -= 1
        if said(ask).startswith("bad"):
            return reply("it is bad", 400)
        return reply(f"answer to {said(ask)}")


@contextmanager
def opened(source: Path, output: Path, resume: bool = False) -> Iterator[BatchChannels]:
    """The files of one run."""
    with (
        source.open("rb") as file,
        OutputFile(output, resume, source) as out,
        waiting_beside(out, resume) as waiting,
    ):
        yield BatchChannels(
            LineReader(file.fileno(), str(source)),
            out,
            FinishedRequests(out if resume else None),
            LineHeap(waiting),
        )


def run(
    source: Path,
    output: Path,
    *places: Place,
    resume: bool = False,
    in_order: bool = True,
    for_all: ForAll = ALL,
    watch: Callable[[BatchRun], None] = lambda batch: None,
) -> BatchTally:
    """A whole run."""
    with opened(source, output, resume) as ends:
        batch = BatchRun(ends, RequestReader(for_all), places or (Echo(),), in_order=in_order)
        watch(batch)
        return asyncio.run(batch.run())


def results(output: Path) -> list[dict[str, object]]:
    """Every line of a file of results; each ends."""
    data = output.read_bytes()
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]
