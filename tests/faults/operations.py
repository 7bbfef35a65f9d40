"""What is done while calls fail: each operation gives something that can be compared."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.errors import EngineStopped, HetrunError
from hetrun.loader.open_model import open_model
from tests.faults.injector import Injector

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from hetrun.client.interface import ChatClient
    from hetrun.tools.batch.request_lines import ForAll

PROMPT = tuple(range(5, 45))
OPTIONS: Mapping[str, Any] = {
    "backends": ["llamacpp"],
    "planner": "static",
    "deterministic": True,
    "ctx": 256,
    "ubatch": 32,
    "spec": "off",
    "ram": 1 << 30,
}
HUB = "FAULTS_HUB"  # the address of a hub that the parent runs


@dataclass(frozen=True, slots=True)
class Place:
    """Files that operations work with: `models` are there, and `room` is the operation's own."""

    models: Path
    room: Path
    injector: Injector

    @property
    def gguf(self) -> Path:
        return self.models / "tiny.gguf"


@dataclass(frozen=True, slots=True)
class Operation:
    """`run` does it and gives what it always gives, of which `look` sees more when no call fails.

    `faults` are sentences about files that it left, where it has failed; `again` brings everything back to
    where it can run once more. `recovers`: where its engine ends there is a new one the next time.
    """

    run: Callable[[], object]
    look: Callable[[], object] = lambda: None
    again: Callable[[], object] = lambda: None
    faults: Callable[[], list[str]] = list
    recovers: bool = False


Maker = Callable[[Place], AbstractContextManager[Operation]]
MAKERS: dict[str, Maker] = {}


def operation(name: str) -> Callable[[Callable[[Place], Iterator[Operation]]], Maker]:
    """Gives a function a name among the operations."""

    def register(make: Callable[[Place], Iterator[Operation]]) -> Maker:
        MAKERS[name] = contextmanager(make)
        return MAKERS[name]

    return register


# --- models


@operation("gguf")
def _gguf(place: Place) -> Iterator[Operation]:
    def run() -> object:
        source = open_model(place.gguf)
        return source.architecture, sorted(w.name for w in source.weights())

    yield Operation(run)


@operation("folder")
def _folder(place: Place) -> Iterator[Operation]:
    def run() -> object:
        source = open_model(place.models / "folder")
        return source.architecture, sorted(w.name for w in source.weights())

    yield Operation(run)


@operation("load")
def _load(place: Place) -> Iterator[Operation]:
    def run() -> object:
        with LocalModel(place.gguf, **OPTIONS) as llm:
            return llm.n_vocab, llm.info.context

    yield Operation(run)


@operation("prompt")
def _prompt(place: Place) -> Iterator[Operation]:
    with LocalModel(place.gguf, **OPTIONS) as llm:
        yield Operation(lambda: llm.logits(PROMPT).tobytes())


@operation("decode")
def _decode(place: Place) -> Iterator[Operation]:
    with LocalModel(place.gguf, **OPTIONS) as llm:
        yield Operation(lambda: first_tokens(llm))


def first_tokens(llm: LocalModel, count: int = 6) -> list[int]:
    """Of the answer to a prompt."""
    done = llm.generate([list(PROMPT)], SamplingParams(max_tokens=count, temperature=0))
    return list(done[0].tokens)


@operation("stream")
def _stream(place: Place) -> Iterator[Operation]:
    from tests.support.streamed import opened

    options = {name: value for name, value in OPTIONS.items() if name != "ram"}
    with opened(place.models / "larger.gguf", disk=None, system=True, **options) as (llm, _, _):
        yield Operation(lambda: first_tokens(llm, 3))


# --- files of ours


@operation("prefix-save")
def _prefix_save(place: Place) -> Iterator[Operation]:
    target = place.room / "prompts.cache"
    with LocalModel(place.gguf, **OPTIONS) as llm:
        first_tokens(llm)
        llm.save_prompts(target)
        before = target.read_bytes()

        yield Operation(
            lambda: llm.save_prompts(target),
            target.read_bytes,
            faults=lambda: _only(place.room, {target.name: before}),
        )


@operation("prefix-load")
def _prefix_load(place: Place) -> Iterator[Operation]:
    target = place.room / "prompts.cache"
    with LocalModel(place.gguf, **OPTIONS) as llm:
        first_tokens(llm)
        llm.save_prompts(target)

        def run() -> object:
            return llm.load_prompts(target)

        yield Operation(
            run,
            again=lambda: first_tokens(llm),
            faults=lambda: _only(place.room, {target.name: target.read_bytes()}),
        )


@operation("convert")
def _convert(place: Place) -> Iterator[Operation]:
    from hetrun.tools.convert import ConversionOptions, convert_model
    from hetrun.tools.convert.quant_mixtures import by_option

    target = place.room / "out.gguf"
    wish = ConversionOptions(place.gguf, by_option("q8_0"), target, threads=2, force=True)
    convert_model(wish)
    before = target.read_bytes()

    yield Operation(
        lambda: convert_model(wish).bytes_after,
        target.read_bytes,
        faults=lambda: _only(place.room, {target.name: before}),
    )


@operation("repack")
def _repack(place: Place) -> Iterator[Operation]:
    """In place. After a failure the same command goes on: no byte is lost."""
    from hetrun.tools.convert import in_place
    from hetrun.tools.convert.reorder import RepackOptions, repack_model

    in_place.WINDOW, in_place.PIECE = 60_000, 20_000  # of which a tiny model has several
    room, right = place.room / "repack", (place.models / "repacked.gguf").read_bytes()
    path = room / "model.gguf"

    def again() -> None:
        shutil.rmtree(room, ignore_errors=True)
        room.mkdir()
        shutil.copyfile(place.models / "tiny.gguf", path)

    def run() -> object:
        return repack_model(RepackOptions(path, in_place=True)).bytes_after

    def faults() -> list[str]:
        try:
            run()
        except HetrunError as error:
            return [f"the same command does not go on: {error}"]
        return _only(room, {path.name: right})

    again()
    yield Operation(run, lambda: _only(room, {path.name: right}), again, faults)


def _only(folder: Path, wanted: Mapping[str, bytes]) -> list[str]:
    """What is wrong with a folder that has to hold these files, as they were, and nothing else."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    said = [f"{name} was left behind" for name in found.keys() - wanted.keys()]
    return said + [f"{name} is not what it was" for name in wanted if found.get(name) != wanted[name]]


# --- downloads


@operation("pull")
def _pull(place: Place) -> Iterator[Operation]:
    """From a hub in another process."""
    home = place.room / "hub"
    os.environ.update({"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": os.environ[HUB], "HF_HOME": str(home)})
    from importlib import import_module

    from hetrun.loader.hub import download
    from hetrun.loader.hub.names import RepositoryModel

    import_module("tqdm").tqdm.monitor_interval = 0  # it would begin a thread that stays
    download.LARGE = 1 << 16
    download.PAUSE_S = 0.0
    wanted = RepositoryModel("o/r", "tiny.gguf")
    right = (place.models / "tiny.gguf").read_bytes()

    def run() -> object:
        return download.fetch(wanted)[0]

    def look() -> object:
        return [p.read_bytes() == right for p in home.rglob("tiny.gguf")]

    def faults() -> list[str]:
        blobs = [p for p in home.rglob("*.gguf") if p.is_file()]
        return [f"{p.name} is there and is not whole" for p in blobs if p.read_bytes() != right]

    yield Operation(run, look, again=lambda: shutil.rmtree(home, ignore_errors=True), faults=faults)


# --- servers and batches


@operation("batch")
def _batch(place: Place) -> Iterator[Operation]:
    from tests.batch.fakes import ALL, results

    source, target = place.room / "in.txt", place.room / "out.jsonl"
    source.write_text("".join(f"question {i}\n" for i in range(6)))
    with LocalModel(place.gguf, **OPTIONS) as llm:

        def run() -> object:
            return _run_batch(_app(llm), source, target, ALL)  # an app belongs to one event loop

        def look() -> object:
            return [(row["index"], row["text"]) for row in results(target)]

        def faults() -> list[str]:
            lines = target.read_bytes() if target.exists() else b""
            whole = not lines or lines.endswith(b"\n")
            return [] if whole else ["half a line was left in the results"]

        yield Operation(run, look, again=lambda: target.unlink(missing_ok=True), faults=faults)


def _app(llm: LocalModel) -> ASGIApp:
    from hetrun.client.engine_client import LocalClient

    return _app_of(LocalClient(llm))


def _app_of(client: ChatClient) -> ASGIApp:
    from hetrun.server.app import create_app

    return create_app(client, sampling={"temperature": 0, "max_tokens": 4})


def _run_batch(app: ASGIApp, source: Path, target: Path, for_all: ForAll) -> object:
    import asyncio

    from hetrun.cli.batch import Files, reading, writing
    from hetrun.tools.batch.local_worker import LocalPlace
    from hetrun.tools.batch.request_lines import RequestReader
    from hetrun.tools.batch.resume import FinishedRequests
    from hetrun.tools.batch.runner import BatchChannels, BatchRun

    with reading(str(source)) as lines, writing(Files(str(source), target)) as (output, held):
        ends = BatchChannels(lines, output, FinishedRequests(None), held)
        tally = asyncio.run(BatchRun(ends, RequestReader(for_all), [LocalPlace(app, 4)]).run())
    if tally.failed:
        raise HetrunError(tally.first_failure)
    return tally.written


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=90)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@operation("serve")
def _serve(place: Place) -> Iterator[Operation]:
    """The client is a thread whose calls do not fail."""
    path = place.room / "s"
    with (
        LocalModel(place.gguf, **OPTIONS) as llm,
        _listening(_app(llm), path),
        ThreadPoolExecutor(1, initializer=place.injector.exempt) as client,
    ):
        yield Operation(lambda: client.submit(_ask, path).result())


@operation("worker")
def _worker(place: Place) -> Iterator[Operation]:
    """A server whose engine is a process of its own, the only one whose calls fail: where it ends of that the
    next answer is a new one's."""
    import asyncio

    from hetrun.client.engine_client import WorkerClient
    from hetrun.config import Settings

    path = place.room / "s"
    place.injector.leave()
    settings = Settings.resolve(environ=None, model=str(place.gguf), **OPTIONS)
    worker = WorkerClient(settings)

    def ready() -> None:
        _wait_for(lambda: asyncio.run(worker.info()))

    try:
        with _listening(_app_of(worker), path):
            ready()
            yield Operation(lambda: _ask(path), again=ready, recovers=True)
    finally:
        asyncio.run(worker.close())


def _wait_for(ask: Callable[[], object]) -> None:
    """Until it is no error."""
    end = time.monotonic() + 90
    while True:
        try:
            ask()
            return
        except HetrunError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


@contextmanager
def _listening(app: ASGIApp, path: Path) -> Iterator[None]:
    import asyncio

    from hetrun.server.listen import ListenAddress, listening, serve

    ready = threading.Event()
    ends: list[Callable[[], object]] = []

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        ends.append(lambda: loop.call_soon_threadsafe(stop.set))
        with listening(ListenAddress(uds=path)) as bound:
            await serve(app, bound, stop, ready.set)

    thread = threading.Thread(target=asyncio.run, args=(run(),), name="server")
    thread.start()
    ready.wait(20)
    try:
        yield
    finally:
        ends[0]()
        thread.join()


def _ask(path: Path) -> object:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    connection = _UnixConnection(path)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        reply = connection.getresponse()
        answer = json.loads(reply.read())
    except (OSError, http.client.HTTPException) as error:
        raise HetrunError(f"the connection ended: {type(error).__name__}") from error
    finally:
        connection.close()
    if reply.status == 503:
        raise EngineStopped(answer["error"]["message"])
    if reply.status != 200:
        raise HetrunError(f"{reply.status} {answer['error']['message']}")
    return answer["choices"][0]["message"]["content"]
