"""An engine with scripted answers, for tests of everything that stands in front of one.

The last message (or the text) of a request says what happens:

    say WORDS       answers with these words, one token each
    muse WORDS      the same, within a thought that the prompt has begun
    silence         gives no sign until it is cancelled
    forever WORD    answers with this (or "ha") until it is cancelled, or `max_tokens` is reached
    refuse          is refused when it is submitted
    fail            fails after two tokens
    unfit KIND      is found to have a structure of this kind that cannot be compiled
    odd             fails with an error that cannot be pickled
    crash           kills the process after two tokens, as a native assertion does
    once FILE WORDS kills the process before the first token, unless the file is there; then as `say`
    stop            fails as an engine does whose thread has ended
    lock S          waits in a native call for a lock, for S seconds or for ever, and answers then
    hold            the same for ever, keeping the interpreter lock: no other thread runs
    options         answers with the options it was made with

If an embedding is wanted, it comes instead of an answer: the length, the first letter, the last one, and 1.
If a document is ranked, a tenth of its prompt's length comes.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from hetrun.client.events import (
    CurrentStep,
    Event,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    PromptProgress,
    Streaming,
    Timings,
    TokenLogprob,
    Usage,
)
from hetrun.client.queries import (
    Counts,
    Detokenize,
    EngineState,
    FillPrompt,
    LayerPlace,
    Layers,
    PlanForecast,
    PlanNow,
    PromptLength,
    Question,
    RankPrompts,
    Render,
    SetRam,
    Slot,
    SlotAction,
    SlotDone,
    StateQuery,
    Tokenize,
    TokenizerFacts,
    TokenizerInfo,
    WhatIf,
)
from hetrun.errors import (
    BackendError,
    BudgetError,
    ContextFull,
    EngineStopped,
    HetrunError,
    ModelFileError,
    OptionError,
    Overloaded,
    UserError,
)
from hetrun.option_types import parse_size
from hetrun.planner.plan import PlanSet

INFO = ModelInfo(
    name="Fake by Nemo v2",
    path="/models/fake.gguf",
    architecture="llama",
    n_vocab=256,
    context=2048,
    parameters=135_000_000,
    file_bytes=98_000_000,
    template_origin="the model",
    load_s=0.5,
    width=4,
)
REFUSED, ENDLESS = "/models/bad.gguf", "/models/endless.gguf"  # one cannot be loaded, the other is never
LEAST_RAM, DEADLY_RAM = 1 << 20, 13 << 20  # less is refused; with so much the process dies
TIMINGS = Timings(load_s=0.5, ttft_s=0.12, prompt_tok_s=800.0, decode_tok_s=150.0)


class LockedError(Exception):
    """Cannot cross a pipe."""

    def __init__(self) -> None:
        super().__init__("this error holds a lock")
        self.lock = threading.Lock()


@dataclass
class Job:
    number: int
    request: GenerateRequest
    on_event: Callable[[Event], None]
    tokens: Iterator[str]
    cancelled: bool = False
    text: str = ""
    done: int = 0
    prompt_tokens: int = field(default=7)

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.done, cached_tokens=3)


class FakeEngine:
    """Has the part of `LLM` that fronts use; one thread gives each running request a token in turn."""

    doing: CurrentStep | None = None  # while a token is made

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Callable[[float], None] | None = None,
        pace_s: float = 0.001,
        **options: object,
    ) -> None:
        if model == REFUSED:
            raise ModelFileError(REFUSED, "it is not a model")
        for step in range(101):
            if progress is not None:
                progress(step / 100)
            if model == ENDLESS and step == 50:
                threading.Event().wait()
        self.info = INFO
        self.options = options
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[int] = []
        self.refusals: list[HetrunError] = []  # of the next requests, which are none of `requests`
        self.idle = threading.Event()
        self.idle.set()
        self.slow = threading.Event()  # what a slow template waits for
        self._pace_s = pace_s
        self._closing = threading.Event()
        self._orders: queue.SimpleQueue[Job | None] = queue.SimpleQueue()  # None: it is closed
        self._jobs: dict[int, Job] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerateRequest, on_event: Callable[[Event], None]) -> int:
        prompt = _prompt(request)
        if prompt == "refuse":
            raise ContextFull("the prompt has 5000 tokens and the context 2048: shorten it")
        if self.refusals:
            on_event(Event("error", error=self.refusals.pop(0)))
            return 0
        self.requests.append(request)
        number = len(self.requests)
        job = Job(number, request, on_event, self.reply(prompt))
        self._jobs[number] = job
        self.idle.clear()
        self._orders.put(job)
        return number

    def reply(self, prompt: str) -> Iterator[str]:
        """The tokens of an answer."""
        return _reply(prompt, self.options)

    def ask(self, question: Question[Any]) -> Any:  # noqa: ANN401 - each question has its own
        """A token for each byte of a text, and a template that writes roles and contents."""
        match question:
            case Tokenize(text, add_special):
                order, _, file = text.partition(" ")
                if order == "die" or (order == "once" and not Path(file).exists()):
                    Path(file or os.devnull).touch()
                    os.kill(os.getpid(), signal.SIGABRT)
                    threading.Event().wait()
                return [0] * add_special + list(text.encode())
            case FillPrompt():
                parts = (question.prefix, question.suffix, question.prompt, str(question.max_tokens))
                said = "|".join([*map(str, parts), *(f"{s.filename}={s.text}" for s in question.extra)])
                if "refuse" in said:
                    raise OptionError("no fill")
                return list(f"say {said}".encode())
            case RankPrompts(query, documents):
                if query == "refuse":
                    raise OptionError("document 0: no rank")
                return [list(f"say {query} {document}".encode()) for document in documents]
            case Detokenize(tokens):
                return [bytes([token]) for token in tokens]
            case TokenizerInfo():
                return TokenizerFacts(256, 0, 1, True, "<s>", "</s>", "{{ messages }}", "the model")
            case Render(messages, options):
                if messages[-1]["content"] == "slow":
                    self.slow.wait()
                if messages[-1]["content"] == "refuse":
                    raise OptionError("no render")
                return "".join(f"[{m['role']}]{m['content']}" for m in messages) + repr(dict(options))
            case PromptLength(pictures):
                return 100 * len(pictures)
            case PlanNow():
                return {"format": 3, "plans": []}
            case SlotAction(action, slot, path):
                return self.act(action, slot, path)
            case SetRam(nbytes):
                return dict(self.set_ram(nbytes).memory)
            case StateQuery():
                slots = [Slot(7, "answer", 1.5, 10, 10, 4, 3, 100, place=1), Slot(8, "waiting", 0.5)]
                counts = Counts({"stop": 2, "error": 1}, 70, 9, 30, 8, 6, 2, 0.25, 40, 0.5)
                budget = self.streaming.budget if self.streaming else None
                memory = {"weights": 98 << 20, "KV": 40 << 20, "limit": 1 << 30}
                gpu, now = "vram" in self.options, perf_counter()
                return EngineState(
                    *(counts, tuple(slots), 64, 2048, budget, self.streaming, memory, 200 << 20),
                    threads={"decode": 1, "prefill": 2},
                    reason="two threads instead of one (9 ms -> 6 ms)",
                    devices={"cuda": {"weights": 3 << 30, "left": 1 << 30, "limit": 4 << 30}} if gpu else {},
                    crossed={"cuda": int(3e9 * now)} if gpu else {},
                    in_use={"weights": 98 << 20, "KV": 2 << 20, "helper processes": 14 << 20},
                    waited_s=1.0,
                    at=now,
                )
            case Layers():
                streamed = 1_000_000 if self.streaming else 0
                crossing = 2_000_000 if "vram" in self.options else 0
                runs = {"cuda": 9} if crossing else {"llamacpp": 9}, {"amx": 9}
                middle = [LayerPlace(f"blk.{i}", 3_000_000, streamed, crossing, *runs) for i in range(6)]
                ends = {"llamacpp": 1}
                return (
                    LayerPlace("embed", 0, 0, 0, ends, ends),
                    *middle,
                    LayerPlace("output", 9, 0, 0, ends, ends),
                )
            case WhatIf(changes):
                return _foreseen(changes)
        raise AssertionError(question)

    def act(self, action: str, slot: int, path: str) -> SlotDone:
        """A slot's file holds its number; the third one is in use."""
        if slot == 3:
            raise Overloaded(f"slot {slot} is answering a request", 1.0)
        if action == "save":
            Path(path).write_text(str(slot))
        if action == "restore" and not Path(path).exists():
            raise UserError(f"{Path(path).name} does not exist")
        return SlotDone(20 + slot, 0 if action == "erase" else Path(path).stat().st_size)

    def set_ram(self, ram: int) -> PlanSet:
        if ram == DEADLY_RAM:
            os.kill(os.getpid(), signal.SIGABRT)
            threading.Event().wait()  # another thread may be the one that dies of it, later
        if ram < LEAST_RAM:
            raise BudgetError(f"{ram} bytes are too little: this model needs at least {LEAST_RAM}")
        self.options["ram"] = ram
        return PlanSet({}, 64, "a test", {"weights": ram - 1000, "KV": 1000})

    @property
    def streaming(self) -> Streaming | None:
        """Weights come from disk where there is a budget."""
        ram = self.options.get("ram")
        return Streaming(3, 300, 2e9, 0.25, 100.0, 900, 100, ram, LEAST_RAM) if isinstance(ram, int) else None

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        if request_id in self._jobs:
            self._jobs[request_id].cancelled = True

    def close(self) -> None:
        self._closing.set()
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        running: list[Job] = []
        while True:
            # Without anything to do it sleeps: tests of the chat wait until the process is idle.
            while not running or not self._orders.empty():
                if (order := self._orders.get()) is None:
                    return
                running.append(order)
            if self._closing.wait(self._pace_s):
                return
            for job in running.copy():
                if not self._step(job):
                    running.remove(job)
                    del self._jobs[job.number]
            if not self._jobs:
                self.idle.set()

    def _step(self, job: Job) -> bool:
        """One token; whether there is more to come."""
        params = job.request.params
        if job.cancelled:
            return self._finish(job, "cancelled")
        if job.request.echo and not job.done:
            job.on_event(Event("prompt", echo=_pieces(job.request), slot=job.number % 64))
        if job.request.progress and not job.done:
            for computed in (3, job.prompt_tokens):
                job.on_event(Event("prompt", progress=PromptProgress(job.prompt_tokens, 3, computed, 0.25)))
        if job.request.prompt_only:
            return self._finish(job, "length")
        if params.prompt_logprobs is not None and not job.done:
            best = ((65, -0.1), (66, -0.2))[: params.prompt_logprobs]
            bests = (b"A", b"B")[: params.prompt_logprobs]
            scores = [TokenLogprob(66, -0.2, best, piece, bests) for piece in _pieces(job.request)[1:]]
            job.on_event(Event("prompt", prompt_logprobs=tuple(scores)))
        if params.max_tokens is not None and job.done >= params.max_tokens:
            return self._finish(job, "length")
        self.doing = CurrentStep(perf_counter(), 0.001, "blk.7.ffn")
        if _prompt(job.request) == "silence":
            return True
        try:
            text = next(job.tokens)
        except StopIteration:
            return self._finish(job, "stop")
        except Exception as error:
            job.on_event(Event("error", error=error, usage=job.usage))
            return False
        finally:
            self.doing = None
        job.done += 1
        job.text += text
        logprob = None
        if params.logprobs is not None:
            others = tuple((token, -1.0 - token) for token in range(params.logprobs))
            pieces = (b"A", b"\xc3", b"C", b"D", b"E")[: params.logprobs]  # the second is half a character
            logprob = TokenLogprob(job.done, -0.5 / job.number, others, text.encode(), pieces)
        opened = "<think>" if job.done == 1 and _prompt(job.request).startswith("muse") else ""
        if not job.request.pooling:
            job.on_event(Event("token", text=text, token=job.done, logprob=logprob, opened=opened))
        return True

    def _finish(self, job: Job, reason: FinishReason) -> bool:
        scored = reason == "stop" and job.request.params.logprobs is not None
        end = TokenLogprob(0, -0.25, piece=b"<end>") if scored else None
        embedding = None
        if job.request.pooling == "rank" and reason == "stop":
            embedding = struct.pack("<f", len(_prompt(job.request)) / 10)
        elif job.request.pooling and reason == "stop":
            prompt = _prompt(job.request)
            embedding = struct.pack("<4f", len(prompt), ord(prompt[0]), ord(prompt[-1]), 1)
        stopped = next((stop for stop in job.request.params.stop if stop in job.text), "")
        job.on_event(
            Event(
                *("done", "", None, end, reason, job.usage, TIMINGS),
                embedding=embedding,
                stopped=stopped if reason == "stop" else "",
                slot=job.number % 64,
            )
        )
        return False


def deadlock(libc: ctypes.CDLL, seconds: float | None) -> None:
    """Wait in a native call for a lock that no one gives back, or after some seconds only."""
    lock = ctypes.create_string_buffer(64)  # all zeroes is a lock that is free
    libc.pthread_mutex_lock(lock)
    if seconds is not None:
        threading.Timer(seconds, libc.pthread_mutex_unlock, (lock,)).start()
    libc.pthread_mutex_lock(lock)


def _foreseen(changes: Mapping[str, object]) -> PlanForecast:
    """More context takes more memory, and half the threads are half as fast."""
    if wrong := [name for name in ("ctx", "threads") if not str(changes.get(name, "1")).isdecimal()]:
        raise OptionError(f"{wrong[0]} must be an integer, not {changes[wrong[0]]!r}")
    context = int(str(changes.get("ctx", 2048)))
    ram = parse_size(changes.get("ram", "1GiB"))
    if ram < LEAST_RAM:
        raise BudgetError(f"{ram} bytes are too little: this model needs at least {LEAST_RAM}")
    threads = int(str(changes.get("threads", 2)))
    memory = {"weights": 98 << 20, "KV": context << 14, "limit": ram}
    kv_type = str(changes.get("kv_type", "f16"))
    speeds = 75.0 * threads, 50.0 * threads, 400.0 * threads
    return PlanForecast(context, *speeds, memory, {}, 0, True, threads, kv_type, ("from a test",))


def _prompt(request: GenerateRequest) -> str:
    if request.messages is not None:
        content = request.messages[-1].get("content", "")
        if isinstance(content, list):  # with pictures
            return "".join(str(part["text"]) for part in content if part["type"] == "text")
        return str(content)
    return request.text or bytes(request.tokens or b"say nothing").decode()


def _pieces(request: GenerateRequest) -> tuple[bytes, ...]:
    """The prompt in tokens: words, bytes where it came as tokens, and two where it came as messages."""
    if request.messages is not None:
        return (b"A", b"B")
    if request.tokens is not None:
        return tuple(bytes([token]) for token in request.tokens)
    *words, last = (request.text or "").split(" ")
    return (*(f"{word} ".encode() for word in words), last.encode())


def _reply(prompt: str, options: Mapping[str, object]) -> Iterator[str]:
    order, _, words = prompt.partition(" ")
    match order:
        case "forever":
            while True:
                yield f"{words or 'ha'} "
        case "fail" | "odd" | "crash":
            yield "one "
            yield "two "
            if order == "fail":
                raise BackendError("the fake backend failed")
            if order == "odd":
                raise LockedError
            os.kill(os.getpid(), signal.SIGABRT)
            threading.Event().wait()
        case "once":
            file, _, words = words.partition(" ")
            if not Path(file).exists():
                Path(file).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield words
        case "stop":
            raise EngineStopped("the fake engine's thread has ended")
        case "lock":
            deadlock(ctypes.CDLL(None), float(words) if words else None)
            yield "free again"
        case "hold":
            deadlock(ctypes.PyDLL(None), None)
        case "unfit":
            raise OptionError(f"{words}: there is a mistake in it")
        case "options":
            yield repr(dict(sorted(options.items())))
        case "say" | "muse":
            yield from (word + " " for word in words.split(" ")[:-1])
            yield words.split(" ")[-1]
        case _:
            yield from ("Hello ", "there", ".")
