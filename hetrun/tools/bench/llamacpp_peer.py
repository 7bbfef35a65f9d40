"""The peer's process: llama.cpp itself through its C interface, as llama-bench runs it.

It loads once and then waits on its pipe: nothing of it runs while the other side is measured.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetrun.errors import HetrunError, UserError
from hetrun.tools.bench.cases import BenchCase, Passage
from hetrun.tools.bench.process import obey

PACKAGE = "llama_cpp"
N_BATCH = 512
SENT = 64  # rows of logits in one message
CELLS = 256  # tokens: llama.cpp looks at the cache in pieces of this size


@dataclass(frozen=True, slots=True)
class OpenPeer:
    """Load a model; answered with `PeerOpened`."""

    path: str
    repack: bool  # weights into the layouts that are fastest; without it they stay in the file, mapped
    kv_type: str = "f16"
    load: str = "mmap"  # how: mmap, or none, which copies the weights into memory


@dataclass(frozen=True, slots=True)
class PeerOpened:
    version: str
    n_vocab: int


@dataclass(frozen=True, slots=True)
class PreparePeerCase:
    """Make room for a case; answered with None."""

    case: BenchCase


@dataclass(frozen=True, slots=True)
class RunPeerCase:
    """Measure the case once, or another that needs no more room; answered with tokens per second."""

    threads: int
    seed: int
    case: BenchCase | None = None
    text: Passage | None = None  # what is read and written; None: random tokens


@dataclass(frozen=True, slots=True)
class Logits:
    """The logits behind each token; answered with the bytes of float32 rows, SENT at a time at most."""

    tokens: Sequence[int]
    context: int
    threads: int
    ubatch: int  # tokens that are computed at once


Order = OpenPeer | PreparePeerCase | RunPeerCase | Logits


def main(descriptor: int) -> None:
    """The process's whole life; it ends when the other end of the pipe does."""
    peer: list[LlamaCpp] = []
    obey(descriptor, "llama.cpp", lambda order: _answers(peer, order))


def _answers(peer: list[LlamaCpp], order: object) -> Iterator[object]:
    """What is sent back."""
    match order:
        case OpenPeer(path, repack, kv_type, load):
            peer.append(LlamaCpp(path, repack, kv_type, load))
            yield PeerOpened(peer[0].version, peer[0].n_vocab)
        case PreparePeerCase(case):
            peer[0].begin(case)
            yield None
        case RunPeerCase(threads, seed, other, text):
            yield peer[0].run(threads, seed, other, text)
        case Logits(tokens, context, threads, ubatch):
            for rows in peer[0].logits(tokens, context, threads, ubatch):
                for a in range(0, len(rows), SENT):
                    yield rows[a : a + SENT].tobytes()


class LlamaCpp:
    """A loaded model and one context at a time."""

    def __init__(self, path: str, repack: bool, kv_type: str, load: str) -> None:
        self._c: Any = import_module("llama_cpp.llama_cpp")
        self._quiet = self._c.llama_log_callback(lambda level, text, data: None)
        self._c.llama_log_set(self._quiet, ctypes.c_void_p(0))
        params = self._c.llama_model_default_params()
        params.use_extra_bufts = repack
        params.load_mode = getattr(self._c, f"LLAMA_LOAD_MODE_{load.upper()}")
        self._model = self._c.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise UserError(f"llama.cpp cannot load {path}, so there is no comparison with it")
        self.n_vocab: int = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(self._model))
        self.version = f"llama-cpp-python {import_module(PACKAGE).__version__}"
        self._kv_type: int = getattr(self._c, f"GGML_TYPE_{kv_type.upper()}")
        self._context: Any = None
        self._case = BenchCase("decode", 1)
        self._read = np.empty((0, 0), np.int32)  # the prompts in the cache

    def begin(self, case: BenchCase) -> None:
        """A context for a case: flash attention, a place for each sequence."""
        self._case = case
        self._open_context(case.batch, case.context)

    def _open_context(self, sequences: int, tokens: int, ubatch: int = N_BATCH) -> None:
        if self._context:
            self._c.llama_free(self._context)
        self._read = np.empty((0, 0), np.int32)
        params = self._c.llama_context_default_params()
        params.n_ctx = sequences * -(-tokens // CELLS) * CELLS
        params.n_batch, params.n_ubatch = N_BATCH, min(ubatch, N_BATCH)
        params.n_seq_max = sequences
        params.flash_attn_type = self._c.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = params.type_v = self._kv_type
        self._context = self._c.llama_init_from_model(self._model, params)
        if not self._context:
            raise HetrunError(f"llama.cpp could not make a context of {params.n_ctx} tokens")
        self._memory = self._c.llama_get_memory(self._context)

    def run(
        self, threads: int, seed: int, other: BenchCase | None = None, text: Passage | None = None
    ) -> float:
        """Measure the case once, or another that needs no more room."""
        case = other or self._case
        prompts = case.prompts(self.n_vocab, seed) if text is None else text.prompts
        if case.kind == "prefill":
            self._use(threads)
            self._clear()
            seconds = self._decode(self._batches(prompts, 0))
            return case.batch * case.tokens / seconds
        self._use(len(os.sched_getaffinity(0)))  # what is not measured shall not take long
        self._fill(prompts)
        if not case.tokens:
            return 0.0
        self._use(threads)
        chosen = self._random(case, seed) if text is None else text.answers
        steps = [b for i in range(case.tokens) for b in self._batches(chosen[:, i : i + 1], case.prompt + i)]
        return case.batch * case.tokens / self._decode(steps)

    def _random(self, case: BenchCase, seed: int) -> NDArray[np.int32]:
        """What is written where nothing was given."""
        return np.random.default_rng(seed).integers(0, self.n_vocab, (case.batch, case.tokens), np.int32)

    def _use(self, threads: int) -> None:
        """For single tokens and for many."""
        self._c.llama_set_n_threads(self._context, threads, threads)

    def _fill(self, prompts: NDArray[np.int32]) -> None:
        """Have just the prompts in the cache."""
        length = prompts.shape[1]
        here = [self._c.llama_memory_seq_pos_max(self._memory, s) + 1 for s in range(len(prompts))]
        # States that are not keys and values cannot be taken back.
        if (
            np.array_equal(self._read, prompts)
            and min(here) >= length
            and all(self._c.llama_memory_seq_rm(self._memory, s, length, -1) for s in range(len(prompts)))
        ):
            return
        self._clear()
        # The last token by itself, as those that follow: what a step needs, code too, is in memory then.
        self._decode(self._batches(prompts[:, :-1], 0) + self._batches(prompts[:, -1:], length - 1))
        self._read = prompts

    def _clear(self) -> None:
        """Nothing was read."""
        self._c.llama_memory_clear(self._memory, False)
        self._read = np.empty((0, 0), np.int32)

    def _batches(self, tokens: NDArray[np.int32], first: int, every: bool = False) -> list[Any]:
        """Tokens of some sequences, [sequence, position from `first` on], as batches; logits for the last
        token of each sequence, or for every one."""
        n_sequences, length = tokens.shape
        flat = [(s, i) for s in range(n_sequences) for i in range(length)]
        batches = []
        for a in range(0, len(flat), N_BATCH):
            piece = flat[a : a + N_BATCH]
            batch = self._c.llama_batch_init(len(piece), 0, 1)
            batch.n_tokens = len(piece)
            for j, (s, i) in enumerate(piece):
                batch.token[j], batch.pos[j] = tokens[s, i], first + i
                batch.n_seq_id[j], batch.seq_id[j][0] = 1, s
                batch.logits[j] = every or i == length - 1
            batches.append(batch)
        return batches

    def _decode(self, batches: list[Any]) -> float:
        """Seconds that it takes; the batches are gone then."""
        decode, wait, context = self._c.llama_decode, self._c.llama_synchronize, self._context
        begin = perf_counter()
        for batch in batches:
            status = decode(context, batch)
            if status:
                raise HetrunError(f"llama.cpp ended a batch with status {status}")
            wait(context)
        seconds = perf_counter() - begin
        for batch in batches:
            self._c.llama_batch_free(batch)
        return seconds

    def logits(
        self, tokens: Sequence[int], context: int, threads: int, ubatch: int
    ) -> Iterator[NDArray[np.float32]]:
        """The logits behind each token of a text."""
        self._open_context(1, context, ubatch)
        self._use(threads)
        for a in range(0, len(tokens), N_BATCH):
            piece = np.asarray(tokens[a : a + N_BATCH], np.int32)[None]
            self._decode(self._batches(piece, a, every=True))
            pointer = self._c.llama_get_logits(self._context)
            yield np.ctypeslib.as_array(pointer, (piece.shape[1], self.n_vocab))
