"""What is killed, or loses its power: the operations that write files of the user's, and how each is judged.

An operation says with a mark what the user was told ("saved", "done", the path of what was pulled): that must
be there afterwards, however the machine stopped. What was not told may be missing, but is never taken for
whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from hetrun.errors import HetrunError, UserError
from tests.crashes.models import MODEL_OPTIONS, PROMPTS, models, room

if TYPE_CHECKING:
    from hetrun.tui.store.store import ConversationStore
    from hetrun.tui.store.tree import Conversation, Tree

HUB_FILES = "CRASHES_HUB"  # what the hub has, which the parent runs: sums of files
Mark = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Crash:
    """What there is afterwards, and what the user had been told."""

    folder: Path
    told: Sequence[str]  # before it
    all_told: Sequence[str]  # where nothing comes between
    inodes: Mapping[int, int]  # those of files that were copied, by what they were before

    @property
    def is_done(self) -> bool:
        """Whether the user was told everything."""
        return len(self.told) == len(self.all_told)

    @property
    def allowed(self) -> set[str]:
        """Of operations that tell in each mark what there is: what was told last, and what was on its way."""
        return {*self.all_told[max(0, len(self.told) - 1) : len(self.told) + 1]}


@dataclass(frozen=True, slots=True)
class Operation:
    """`begin` makes the files that are there before, `run` is what is cut short, and `judge` recovers and
    says in sentences what is wrong. `load` imports what these need."""

    run: Callable[[Path, Mark], None]
    judge: Callable[[Crash], Iterable[str]]
    begin: Callable[[Path], None] = lambda folder: None
    load: Callable[[], object] = lambda: None


# --- pull


def _set_hub(folder: Path) -> None:
    os.environ["HF_HOME"] = str(folder)
    from hetrun.loader.hub import download

    download.LARGE = 1 << 16
    download.PAUSE_S = 0.0


def _models() -> Mapping[str, str]:
    return {"o/one": "tiny.gguf", "o/folder": ""}


def _pull(folder: Path, mark: Mark) -> None:
    _set_hub(folder)
    from hetrun.loader.hub.download import fetch
    from hetrun.loader.hub.names import RepositoryModel

    for repo, which in _models().items():
        fetch(RepositoryModel(repo, which))
        mark(repo)


def _judge_pull(crash: Crash) -> Iterable[str]:
    _set_hub(crash.folder)
    from hetrun.loader.hub.download import fetch
    from hetrun.loader.hub.names import RepositoryModel
    from hetrun.loader.hub.resolve import cached

    for repo, which in _models().items():
        wanted = RepositoryModel(repo, which)
        path = cached(wanted)
        if path is None and repo in crash.told:
            yield f"{repo} was pulled, and is gone"
        yield from (f"{fault}, and is offered" for fault in _wrong(repo, path))
        yield from (f"{fault}, after pulling it again" for fault in _wrong(repo, fetch(wanted)[0]))
        yield from (
            f"{fault}, where nothing is downloaded, after pulling" for fault in _wrong(repo, cached(wanted))
        )


def _wrong(repo: str, path: Path | None) -> Iterable[str]:
    """Which files of a model are not what the hub has."""
    if path is None:
        return
    folder = path if path.is_dir() else path.parent
    digests: dict[str, str] = json.loads(os.environ[HUB_FILES])[repo]
    for name, digest in digests.items():
        here = folder / name
        if here.exists() and hashlib.sha256(here.read_bytes()).hexdigest() != digest:
            yield f"{repo}/{name} is not what it should be"
        elif not here.exists() and (path.is_dir() or here == path):
            yield f"{repo}/{name} is missing"


# --- convert, and repack in place


def _convert(folder: Path, mark: Mark) -> None:
    from hetrun.tools.convert import ConversionOptions, convert_model
    from hetrun.tools.convert.quant_mixtures import by_option

    source = folder / "tiny.gguf"
    convert_model(ConversionOptions(source, by_option("q8_0"), folder / "out.gguf", threads=1, force=True))
    mark("converted")


def _begin_convert(folder: Path) -> None:
    for name in ("tiny.gguf", "out.gguf"):
        shutil.copyfile(models() / "tiny.gguf", folder / name)


def _judge_convert(crash: Crash) -> Iterable[str]:
    before, target = (crash.folder / "tiny.gguf").read_bytes(), crash.folder / "out.gguf"
    found = target.read_bytes() if target.exists() else b""
    _convert(crash.folder, lambda text: None)
    after = target.read_bytes()
    if found == before:
        yield from ["the converted model is gone"] if crash.told else []
    elif found != after:
        yield "the new file is neither the old model nor the converted one"
    yield from _left_behind(crash.folder, {"tiny.gguf", "out.gguf"})


def _left_behind(folder: Path, wanted: set[str]) -> Iterable[str]:
    yield from (f"{name} is left behind" for name in sorted({p.name for p in folder.iterdir()} - wanted))


def _repack(folder: Path, mark: Mark) -> None:
    from hetrun.tools.convert import in_place
    from hetrun.tools.convert.reorder import RepackOptions, repack_model

    in_place.WINDOW, in_place.PIECE = 150_000, 40_000
    repack_model(RepackOptions(folder / "model.gguf", in_place=True))
    mark("repacked")


def _begin_repack(folder: Path) -> None:
    shutil.copyfile(models() / "mixture.gguf", folder / "model.gguf")


def _judge_repack(crash: Crash) -> Iterable[str]:
    from hetrun.loader.open_model import open_model

    path = crash.folder / "model.gguf"
    before, after = ((models() / name).read_bytes() for name in ("mixture.gguf", "repacked.gguf"))
    _move_journal(path.with_name("model.gguf.repack-journal"), crash.inodes)
    try:
        open_model(path)
    except HetrunError:
        yield from ["the repacked model cannot be opened"] if crash.told else []
    else:
        if path.read_bytes() not in ({after} if crash.told else {before, after}):
            yield "a model that is half repacked is opened"
    _repack(crash.folder, lambda text: None)
    if path.read_bytes() != after:
        yield "the model is not what repacking makes of it"
    yield from _left_behind(crash.folder, {"model.gguf"})


def _move_journal(path: Path, inodes: Mapping[int, int]) -> None:
    """A power cut leaves files their numbers; copies of them have others."""
    try:
        found = json.loads(path.read_bytes())
        found["inode"] = inodes.get(found["inode"], found["inode"])
    except (OSError, ValueError):
        return
    path.write_text(json.dumps(found))


# --- batches


def _questions() -> str:
    rng = Random(3)
    words = [f"question {i} " + "wörter " * rng.choice((1, 3, 20, 400)) for i in range(24)]
    return "".join(f"{line.strip()}\n" for line in words)


def _batch(folder: Path, resume: bool) -> None:
    """As `hetrun run -f` does it, with a place that answers at once or a little later."""
    from hetrun.cli.batch import Files, reading, writing
    from hetrun.tools.batch.request_lines import Ask, RequestReader
    from hetrun.tools.batch.resume import FinishedRequests
    from hetrun.tools.batch.runner import BatchChannels, BatchRun
    from tests.batch.fakes import ALL, Echo

    async def late(ask: Ask) -> None:
        for _ in range(60 if ask.index % 5 == 2 else 1):
            await asyncio.sleep(0)

    files = Files(str(folder / "in.txt"), folder / "out" / "out.jsonl", resume)
    with reading(files.source) as lines, writing(files) as (output, held):
        ends = BatchChannels(lines, output, FinishedRequests(output if resume else None), held)
        asyncio.run(BatchRun(ends, RequestReader(ALL), [Echo(6, late)], same=True).run())


def _begin_batch(folder: Path) -> None:
    (folder / "in.txt").write_text(_questions())
    (folder / "out").mkdir()


def _run_batch(folder: Path, mark: Mark) -> None:
    _batch(folder, resume=False)
    mark("done")


def _begin_resumed(folder: Path) -> None:
    """Some lines, half a line, and results that wait."""
    _begin_batch(folder)
    _batch(folder, resume=False)
    path = folder / "out" / "out.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:7]) + lines[7][:-20])
    path.with_name("out.jsonl.waiting").write_bytes(b"".join(lines[9:12]) + lines[12][:30])


def _run_resumed(folder: Path, mark: Mark) -> None:
    _batch(folder, resume=True)
    mark("done")


def _judge_batch(crash: Crash) -> Iterable[str]:
    path = crash.folder / "out" / "out.jsonl"
    found = path.read_bytes() if path.exists() else b""
    try:
        _batch(crash.folder, resume=True)
    except UserError as error:
        if any(line in found for line in _right_results().splitlines()):
            yield f"what can be read is refused: {error}"
        path.unlink()  # no line of it reached the disk, and something else did: its user has to say so
        _batch(crash.folder, resume=True)
    _batch(crash.folder, resume=True)
    after = path.read_bytes()
    if after != _right_results():
        yield f"after --resume the results are others: {_differences(after)}"
    if crash.told and found != _right_results():
        yield "results of a finished batch are gone"
    yield from _left_behind(path.parent, {"out.jsonl"})


def _right_results() -> bytes:
    folder = room() / "batch"
    if not folder.exists():
        folder.mkdir()
        _begin_batch(folder)
        _batch(folder, resume=False)
    return (folder / "out" / "out.jsonl").read_bytes()


def _differences(found: bytes) -> str:
    lines, right = found.splitlines(), _right_results().splitlines()
    which = [i for i in range(max(len(lines), len(right))) if lines[i : i + 1] != right[i : i + 1]]
    return f"{len(lines)} lines instead of {len(right)}, the first that differs is {which[:1]}"


# --- conversations


def _talk(folder: Path, mark: Mark) -> None:
    from hetrun.tui.store.store import ConversationStore
    from hetrun.tui.store.tree import TurnPicture

    store = ConversationStore(folder / "data" / "hetrun" / "conversations.db")

    def told() -> None:
        mark(_said(store))

    told()
    picture = Random(1).randbytes(9000)
    shown = TurnPicture(hashlib.sha256(picture).hexdigest(), "a.png", 3, 3, len(picture))
    for number in range(3):
        conversation = store.begin(f"talk {number}")
        told()
        asked = store.add(conversation.id, None, "user", "why? " * 300, pictures=[(shown, picture)])
        told()
        answer = store.add(conversation.id, asked.id, "assistant", "")
        told()
        for length in (10, 400, 2000):
            answer.text = "because " * length
            store.write(answer)
            told()
        store.rename(conversation.id, f"renamed {number}")
        told()
    store.delete(1)
    told()
    store.save_preset("short", "be short", {"temperature": 0.5})
    told()
    store.close()


def _said(store: ConversationStore) -> str:
    """All that is kept, as one text."""
    found = []
    for c in sorted(store.conversations(), key=lambda c: c.id):
        turns = [
            [t.id, t.parent, t.text, [_digest(store.picture(p.digest)) for p in t.pictures]]
            for t in store.tree(c)
        ]
        found.append([c.title, c.leaf, turns])
    return _digest(json.dumps([found, sorted(store.presets())]).encode()) + f" {len(found)} conversations"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _judge_talk(crash: Crash) -> Iterable[str]:
    from hetrun.tui.store.store import ConversationStore

    path = crash.folder / "data" / "hetrun" / "conversations.db"
    store = ConversationStore(path)
    found = _said(store)
    if found not in crash.allowed:
        at = crash.all_told.index(found) if found in crash.all_told else -1
        yield f"what was saved is lost: {len(crash.told)} changes were, what is there is change {at + 1}"
    store.begin("afterwards")
    now = _said(store)
    store.close()
    again = ConversationStore(path)
    if _said(again) != now:
        yield "what was said afterwards is lost"
    again.close()


def _begin_export(folder: Path) -> None:
    (folder / "notes").mkdir()


def _export(folder: Path, mark: Mark) -> None:
    from hetrun.tui.store import export

    conversation, tree, picture = _conversation()
    for name in ("talk.json", "talk.md"):
        export.write(folder / "notes" / name, conversation, tree, lambda digest: picture)
        mark(name)


def _judge_export(crash: Crash) -> Iterable[str]:
    from hetrun.tui.store import export

    folder = room() / "export"
    if not folder.exists():
        folder.mkdir()
        _begin_export(folder)
        _export(folder, lambda text: None)
    right = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for name in ("talk.json", "talk.md"):
        path = crash.folder / "notes" / name
        if not path.exists():
            yield from [f"{name} was exported, and is gone"] if name in crash.told else []
        elif path.read_bytes() != right[Path("notes", name)]:
            yield f"{name} is there, and not whole"
        elif name.endswith(".json"):
            export.read(path)
    if "talk.md" in crash.told:
        here = {p.relative_to(crash.folder) for p in crash.folder.rglob("*") if p.is_file()}
        yield from (f"{path} was exported, and is gone" for path in sorted(right.keys() - here))


def _conversation() -> tuple[Conversation, Tree, bytes]:
    """One with a picture, long enough for some pages."""
    from hetrun.tui.store.tree import Conversation, Tree, Turn, TurnPicture

    picture = b"\x89PNG\r\n\x1a\n" + Random(1).randbytes(9000)
    shown = TurnPicture(hashlib.sha256(picture).hexdigest(), "a.png", 3, 3, len(picture))
    asked = Turn(1, None, "user", "why? " * 3000, pictures=(shown,))
    answered = Turn(2, 1, "assistant", "because " * 3000)
    return Conversation(1, "talk", leaf=2), Tree([asked, answered], 2), picture


# --- the prefix cache's file


def _begin_prompts(folder: Path) -> None:
    _save_prompts(folder, PROMPTS[:1])


def _run_prompts(folder: Path, mark: Mark) -> None:
    _save_prompts(folder, PROMPTS)
    mark(_digest((folder / "prompts.cache").read_bytes()))


def _save_prompts(folder: Path, prompts: Sequence[Sequence[int]]) -> None:
    from hetrun import SamplingParams
    from hetrun.api.local_model import LocalModel

    with LocalModel(models() / "tiny.gguf", **MODEL_OPTIONS) as llm:
        llm.generate([list(prompt) for prompt in prompts], SamplingParams(max_tokens=3, temperature=0))
        llm.save_prompts(folder / "prompts.cache")


@cache
def _old_prompts() -> str:
    folder = room() / "prompts"
    folder.mkdir()
    _begin_prompts(folder)
    return _digest((folder / "prompts.cache").read_bytes())


def _judge_prompts(crash: Crash) -> Iterable[str]:
    from hetrun.api.local_model import LocalModel

    path = crash.folder / "prompts.cache"
    found = _digest(path.read_bytes()) if path.exists() else ""
    with LocalModel(models() / "tiny.gguf", **MODEL_OPTIONS) as llm:
        try:
            count = llm.load_prompts(path)
        except HetrunError:
            count = 0
        if count and found not in {_old_prompts(), *crash.all_told}:
            yield "a file of prompts is taken that is not what was written"
        if crash.told and (found != crash.told[-1] or not count):
            yield "the prompts that were saved are gone"
        llm.save_prompts(path)


# --- what is measured and compiled


def _measure(folder: Path, mark: Mark) -> None:
    from hetrun.backends.llamacpp import amx_check
    from hetrun.planner.costmodel import store

    for number in range(1, 4):
        store.write(folder / "times.json", [], _facts(number))
        mark(f"times {number}")
    amx_check._write(folder / "amx" / "mark", "works")
    if _program(folder) != COMPILED:
        raise AssertionError("the program is another one")


def _facts(number: int) -> dict[tuple[str, str], float]:
    return {("disk", f"fact {i}"): 0.5 * number for i in range(300)}


class _Compiler:
    """Stands for NVRTC, which is not on every machine: what it makes is not looked at here."""

    version = (1, 0)

    def architecture(self, capability: tuple[int, int]) -> str:
        return f"--gpu-architecture=sm_{capability[0]}{capability[1]}"

    def compile(self, *given: object) -> tuple[bytes, str]:
        return COMPILED, ""


def _program(folder: Path) -> bytes:
    """A program from the cache, or one that a stand-in compiles."""
    from hetrun.backends.cuda import programs

    vars(programs)["compiler"] = _Compiler
    made = programs.Programs((9, 0), folder / "cuda", lambda line: None)
    return made.program(programs.Source("small"))


def _judge_measured(crash: Crash) -> Iterable[str]:
    from hetrun.backends.llamacpp import amx_check
    from hetrun.planner.costmodel import store

    if store.read(crash.folder / "times.json")[1] not in ({}, *map(_facts, (1, 2, 3))):
        yield "times are read that were not written"
    if amx_check._read(crash.folder / "amx" / "mark") not in (None, "works"):
        yield "another verdict about AMX than was written"
    if _program(crash.folder) != COMPILED:
        yield "a compiled program is taken that is not what was written"
    _measure(crash.folder, lambda text: None)


COMPILED = Random(7).randbytes(30_000)


def _loading(*modules: str) -> Callable[[], None]:
    """Import these before anything is recorded: reading modules is no part of an operation."""

    def load() -> None:
        for name in modules:
            import_module(name)

    return load


_load_hub = _loading("huggingface_hub", "hetrun.loader.hub.download", "hetrun.loader.hub.resolve")
_load_model = _loading(
    "hetrun.api.local_model", "hetrun.backends.llamacpp.backend", "hetrun.tools.convert.reorder"
)
_load_batch = _loading("hetrun.cli.batch", "tests.batch.fakes")


OPERATIONS = {
    "pull": Operation(_pull, _judge_pull, load=_load_hub),
    "convert": Operation(_convert, _judge_convert, _begin_convert, _load_model),
    "repack": Operation(_repack, _judge_repack, _begin_repack, _load_model),
    "batch": Operation(_run_batch, _judge_batch, _begin_batch, _load_batch),
    "resume": Operation(_run_resumed, _judge_batch, _begin_resumed, _load_batch),
    "conversations": Operation(_talk, _judge_talk),
    "export": Operation(_export, _judge_export, _begin_export),
    "prompts": Operation(_run_prompts, _judge_prompts, _begin_prompts, _load_model),
    "measured": Operation(_measure, _judge_measured, load=_load_model),
}
