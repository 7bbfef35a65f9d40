"""What runs on each node: an actor, and `hetrun serve` as its child.

The model is not in the actor's process: what crashes there costs an engine, and the actor can say so.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from hetrun.client.address import address
from hetrun.errors import printable
from hetrun.system.subprocesses import begin, ending
from hetrun.tools.batch.http_worker import Worker
from hetrun.tools.batch.request_lines import Ask
from hetrun.tools.batch.worker import Away
from hetrun_ray.serving import SOCKET
from hetrun_ray.words import NodeAnswer, NodeGone

LOOK_S = 0.1
END_S = 5.0
MOST_SAID = 4096  # bytes of the engine's log that are read
PREFIX = "hetrun-ray-"  # of folders
STALE_S = 60.0  # no process is about to lock a folder that is older
WRONG_INPUT = 2  # hetrun's exit code when what it was given is no good


@dataclass(frozen=True, slots=True)
class ReadyEngine:
    """An engine that is ready."""

    lanes: int
    model: str  # its name
    nbytes: int  # of its file, where that was named by its path


class NodeEngine:
    """The actor. Each method may be called while others run."""

    def __init__(self, options: Mapping[str, str]) -> None:
        _sweep()
        self._folder, self._lock = _private_folder()
        self._log: IO[bytes] = tempfile.TemporaryFile()
        folder = repr(self._folder).replace("{", "{{").replace("}", "}}")
        code = f"from hetrun_ray.serving import main; main({{pipe}}, {folder})"
        self._process, self._life = begin(code, self._log.fileno(), _environment(options))
        self._worker = Worker(address(f"unix:{self._folder}/{SOCKET}", "ray"))
        self._model = Path(options.get("HETRUN_MODEL", "")).expanduser()

    async def hello(self) -> None:
        """Whether the actor runs."""

    async def begin(self) -> ReadyEngine | str:
        """Once the engine answers; or why it does not."""
        while self._process.poll() is None:
            try:
                model = await self._worker.look()
            except Away:
                await asyncio.sleep(LOOK_S)
            else:
                nbytes = self._model.stat().st_size if self._model.is_file() else 0
                return ReadyEngine(self._worker.lanes, model, nbytes)
        return await self.lives()

    async def lives(self) -> str:
        """Waits for the engine's end; how it came."""
        while (code := self._process.poll()) is None:
            await asyncio.sleep(LOOK_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - MOST_SAID))
        said = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        last = printable(said[-1].removeprefix("hetrun: ")) if said else "it said nothing"
        return last if code == WRONG_INPUT else f"its engine {ending(code)}: {last}"

    async def answer(self, url: str, body: Mapping[str, object]) -> NodeAnswer | NodeGone:
        """What the engine answers."""
        try:
            reply = await self._worker.answer(Ask(0, 0, "", "own", url, dict(body)))
        except Away as away:
            return NodeGone(str(away), away.after_s, away.blameless)
        return NodeAnswer(reply.status, reply.body)

    async def end(self) -> None:
        """End the engine; nothing of it is left behind this."""
        family: list[psutil.Process] = []
        with suppress(psutil.Error):
            engine = psutil.Process(self._process.pid)
            family = [*engine.children(recursive=True), engine]
        self._life.close()
        ended = asyncio.to_thread(psutil.wait_procs, family, END_S)
        for left in (await ended)[1]:
            with suppress(psutil.Error):
                left.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> tuple[str, int]:
    """A new folder, and a lock on it that ends with our process."""
    folder = tempfile.mkdtemp(prefix=PREFIX)
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def _sweep() -> None:
    """Remove what the killed left: where a node dies, Ray kills the engine before it can tidy up."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is another user's, or in use
            if time.time() - folder.stat().st_mtime < STALE_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)


def _environment(options: Mapping[str, str]) -> dict[str, str]:
    """Ours without what would say something else than all are told."""
    # Ray gives an actor a thread for each CPU that it claims, which is a place in its queue here.
    here = {k: v for k, v in os.environ.items() if not k.startswith("HETRUN_") and k != "OMP_NUM_THREADS"}
    return {**here, **options}
