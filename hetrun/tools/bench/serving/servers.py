"""The two servers that are measured, each in processes of its own: `hetrun serve`, and llama.cpp's."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hetrun.api.model_path import model_path
from hetrun.config import Settings
from hetrun.errors import HetrunError, OptionError, UserError
from hetrun.loader.open_model import is_folder
from hetrun.system import subprocesses
from hetrun.tools.bench.hetrun_side import spec_of
from hetrun.tools.bench.serving.http_load import RequestRefused, ServerEndpoint

LLAMA_SERVER = "llama-server"
POLL_S = 0.02
LOADING_S = 600.0  # the longest that a model may take to load
GRACE_S = 5.0
LAST_WORDS = 400  # letters of a server's log that are quoted when it died
FEATURES = re.compile(r"\b(AVX\w*|AMX\w*|NEON|SVE|REPACK) = 1\b")
SLOT = 256  # tokens: a slot's room is rounded up to this

# What `hetrun serve` is told by the settings of `hetrun bench`; addresses and keys are ours to choose.
NOT_PASSED = frozenset({"model", "host", "port", "uds", "url", "api_key", "strict", "ollama"})


@dataclass(frozen=True, slots=True)
class ServerCapacity:
    """How many conversations of how many tokens a server must hold at once."""

    conversations: int
    tokens: int


class ServerProcess:
    """A server's process and everything that it started."""

    def __init__(
        self, command: Sequence[str], endpoint: ServerEndpoint, env: Mapping[str, str] | None = None
    ) -> None:
        self._endpoint = endpoint
        self._log: IO[bytes] = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=env
        )
        try:
            asyncio.run(self._ready())
        except BaseException:
            self.close()
            raise

    @property
    def endpoint(self) -> ServerEndpoint:
        """Where it listens."""
        return self._endpoint

    @property
    def pid(self) -> int:
        """Of the process that listens."""
        return self._process.pid

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time so far: `front` is the process that listens, `others` are its children."""
        first, *others = (_cpu_seconds(pid) for pid in tree(self.pid))
        return {"front": first, "others": sum(others)}

    def close(self) -> None:
        """End it: kindly, then not."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
                break
        self._log.close()
        if self._endpoint.uds is not None:
            self._endpoint.uds.unlink(missing_ok=True)  # where one is left behind, the next cannot listen

    async def _ready(self) -> None:
        """Until it answers that it is well."""
        begin = time.monotonic()
        while time.monotonic() < begin + LOADING_S:
            if (code := self._process.poll()) is not None:
                raise HetrunError(
                    f"the server {subprocesses.ending(code)} before it answered: {self._last_words()}"
                )
            with suppress(OSError, RequestRefused):
                connection = await self._endpoint.connect()
                try:
                    await connection.get("/health")
                    return
                finally:
                    connection.leave()
            await asyncio.sleep(POLL_S)
        raise HetrunError(f"the server did not answer within {LOADING_S:.0f} s: {self._last_words()}")

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-LAST_WORDS:].decode(errors="replace").strip() or "it said nothing"


def hetrun_serve(settings: Settings, folder: Path) -> ServerProcess:
    """`hetrun serve` with these settings on a socket in the folder."""
    endpoint = ServerEndpoint(uds=folder / "hetrun.sock", key=settings.api_key)
    command = subprocesses.python(
        "from hetrun.cli import main; main()",
        "serve",
        "-m",
        str(model_path(settings)),
        "--uds",
        str(endpoint.uds),
    )
    return ServerProcess(command, endpoint, env=os.environ | _as_environment(settings))


def _as_environment(settings: Settings) -> dict[str, str]:
    """What was said on our command line, in the words that another process of ours reads."""
    said = {n: getattr(settings, n) for n in settings.origins if n not in NOT_PASSED}
    said["spec"] = spec_of(settings)
    return {
        f"HETRUN_{name.upper()}": ",".join(value) if isinstance(value, tuple) else str(value)
        for name, value in said.items()
        if value not in (None, ())
    }


@dataclass(frozen=True, slots=True)
class LlamaServer:
    """llama.cpp's server: where it lies, which build it is, and what its CPU code was compiled for."""

    program: Path
    version: str
    features: tuple[str, ...]

    def start(self, model: Path, room: ServerCapacity, threads: int, folder: Path) -> ServerProcess:
        """With the settings that are fastest without giving other answers: flash attention, repacked weights,
        a slot for each conversation, nothing saved for later but what a slot has seen."""
        endpoint = ServerEndpoint(
            uds=folder / f"{LLAMA_SERVER}-{room.conversations}-{room.tokens}-{threads}.sock"
        )
        slot = -(-room.tokens // SLOT) * SLOT
        options = {
            "-m": model,
            "-c": slot * room.conversations,  # which it divides among the slots
            "--parallel": room.conversations,
            "-t": threads,
            "-tb": len(os.sched_getaffinity(0)),
            "-ub": 512,
            "--flash-attn": "on",
            "--cache-ram": 0,
            "--host": endpoint.uds,
        }
        command = [str(self.program), *(str(word) for option in options.items() for word in option)]
        return ServerProcess([*command, "--cont-batching", "--repack"], endpoint)


def find_llama_server(wanted: str, model: Path) -> LlamaServer:
    """The program that `--vs llama-server` or `--vs llama-server=PATH` means, asked what it is."""
    name, _, path = wanted.partition("=")
    if name != LLAMA_SERVER:
        raise OptionError(
            f"servers are compared with {LLAMA_SERVER} or {LLAMA_SERVER}=PATH, not {wanted!r} "
            "(llama.cpp, its library, is for runs without --clients, --shared-prefix and --arrival)"
        )
    found = shutil.which(path or LLAMA_SERVER)
    if found is None:
        raise UserError(
            f"{path or LLAMA_SERVER} is not a program here: build llama.cpp's server (cmake -B build && "
            f"cmake --build build -t {LLAMA_SERVER}) and say --vs {LLAMA_SERVER}=PATH"
        )
    if is_folder(model):
        raise UserError(
            f"{model}: {LLAMA_SERVER} reads GGUF files only; write one with hetrun convert {model} -q f16"
        )
    version = re.search(r"version: (.*)", _said_by(found, "--version"))
    # It says what it was compiled for before it looks for its model.
    chatter = _said_by(found, "--log-verbosity", "4", "-m", os.devnull)
    features = tuple(dict.fromkeys(FEATURES.findall(chatter)))
    return LlamaServer(Path(found), version[1].strip() if version else "of an unknown version", features)


def _said_by(program: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{program} does not run here: {error}") from None
    return done.stdout.decode(errors="replace")


# --- the system's books on processes


def tree(pid: int) -> list[int]:
    """A process and all that it started and that still run; it comes first."""
    found = [pid]
    for parent in found:  # grows while it is walked
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                with suppress(OSError):
                    found += map(int, (task / "children").read_text().split())
    return found


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
