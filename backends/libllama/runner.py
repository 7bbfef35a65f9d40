"""A model and a context of llama.cpp."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from hetrun.backend import Floats, Ints
from hetrun.backend.library_model import WholeSetup
from hetrun.backends.llamacpp import amx_check, ggml_api, libllama_api
from hetrun.errors import BackendError, BudgetError, Cancelled, ModelFileError, OptionError

Progress = Callable[[float], None]
Heard = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_float, ctypes.c_void_p)
EVERYTHING = -1  # as a sequence's beginning or end


class LlamaRunner:
    """Runs batches; sequences share one pool of KV cells, so that a fork copies nothing."""

    def __init__(
        self, path: Path, setup: WholeSetup, progress: Progress | None = None, trial: bool = False
    ) -> None:
        """In a `trial` the weights are mapped: quick, and no copy that takes memory.

        Otherwise they are read, into the layout that is fastest: cutting a mapped file short ends, by SIGBUS,
        every process that works on it, and writing to it changes the model while it answers.
        """
        self.native_seconds = 0.0
        self._lib = libllama_api.library()
        self._path = path
        self._model = self._context = None
        # ggml asks after each node whether to stop. libc's strlen of this string is the answer (0 or 1):
        # a C function, so that no thread of ggml ever enters the interpreter.
        self._stop = ctypes.create_string_buffer(2)
        self._arrays = BatchArrays(setup.ubatch)
        try:
            self._model = self._load(progress, trial)
            self._context = self._open(setup)
            self._memory = self._lib.llama_get_memory(self._context)
            if not self._memory or self._lib.llama_model_has_encoder(self._model):
                raise ModelFileError(str(path), "it is not a model that generates text token by token")
        except BaseException:
            self.close()
            raise
        self.n_vocab = int(self._lib.llama_vocab_n_tokens(self._lib.llama_model_get_vocab(self._model)))
        self._window = int(self._lib.llama_model_n_swa(self._model))
        self._has_state = self._lib.llama_model_is_recurrent(self._model) or self._lib.llama_model_is_hybrid(
            self._model
        )

    def _load(self, progress: Progress | None, trial: bool) -> int:
        params = self._lib.llama_model_default_params()
        no_devices = (ctypes.c_void_p * 1)(None)  # an empty list; without one every GPU would be taken
        heard = Heard(lambda fraction, _: progress(fraction) is None if progress else True)
        params.devices = ctypes.addressof(no_devices)
        params.n_gpu_layers = 0
        params.load_mode = libllama_api.LOAD_MMAP if trial else libllama_api.LOAD_READ
        # The library has one switch for all layouts, so without its AMX there are none.
        params.use_extra_bufts = not trial and amx_check.usable()
        self._tiles = None if trial else amx_check.keeper()
        params.progress_callback = ctypes.cast(heard, ctypes.c_void_p)
        model = self._lib.llama_model_load_from_file(os.fsencode(self._path), params)
        if not model:
            raise ModelFileError(str(self._path), "llama.cpp cannot load it; get or convert it again")
        return int(model)

    def _open(self, setup: WholeSetup) -> int:
        params = self._lib.llama_context_default_params()
        params.n_ctx = setup.context * setup.sequences
        params.n_batch = params.n_ubatch = setup.ubatch
        params.n_seq_max = setup.sequences + 1
        params.n_outputs_max = setup.wanted
        params.n_threads = params.n_threads_batch = self._threads = setup.threads
        params.type_k = params.type_v = setup.kv_quant.ggml_id
        params.abort_callback = ggml_api.libc_address("strlen")
        params.abort_callback_data = ctypes.addressof(self._stop)
        params.offload_kqv = params.op_offload = False
        params.kv_unified = True
        # A window's cache of its own has no room for what two forks share behind the window.
        params.swa_full = True
        context = self._lib.llama_init_from_model(self._model, params)
        if context:
            return int(context)
        name = setup.kv_quant.name.lower()
        if name != "f16":
            raise OptionError(f"llama.cpp does not run {self._path.name} with --kv-type {name}; leave it out")
        raise BudgetError(
            f"llama.cpp could not make a context for {setup.sequences} sequences of {setup.context} tokens "
            f"with {self._path.name}; a smaller --ctx may help"
        )

    def run(self, tokens: Ints, positions: Ints, sequences: Ints, wanted: NDArray[np.bool_]) -> Floats:
        batch = self._arrays.fill(tokens, positions, sequences, wanted)
        rows, pointer = int(np.count_nonzero(wanted)), None
        start = perf_counter()
        if self._tiles:
            self._tiles.restore(self._threads)
        status = self._lib.llama_decode(self._context, batch)
        if rows and not status:
            pointer = self._lib.llama_get_logits(self._context)
        self.native_seconds += perf_counter() - start
        if status == libllama_api.ABORTED:
            raise Cancelled("the computation was stopped")
        if status == libllama_api.NO_ROOM:
            raise BudgetError("llama.cpp's KV cache is full; ask for fewer sequences or a smaller --ctx")
        if status:
            raise BackendError(f"llama.cpp ended a batch of {len(tokens)} tokens with status {status}")
        if not pointer:
            return np.empty((0, self.n_vocab), np.float32)
        return np.ctypeslib.as_array(pointer, (rows, self.n_vocab))

    def recover(self) -> bool:
        # States move to other places inside a run: after half of one it is unknown where they are.
        if self._has_state:
            self._lib.llama_memory_clear(self._memory, True)
        return not self._has_state

    def copy(self, source: int, target: int) -> None:
        self._lib.llama_memory_seq_cp(self._memory, source, target, EVERYTHING, EVERYTHING)

    def cut(self, seq: int, n: int) -> bool:
        if n and self._lib.llama_memory_seq_rm(self._memory, seq, n, EVERYTHING):
            # The cells of tokens that had left the window may have been used again.
            first = self._lib.llama_memory_seq_pos_min(self._memory, seq)
            if 0 <= first <= max(0, n - self._window):
                return True
        self._lib.llama_memory_seq_rm(self._memory, seq, EVERYTHING, EVERYTHING)
        return n == 0

    def cancel(self) -> None:
        self._stop[0] = b"\x01"

    def rearm(self) -> None:
        self._stop[0] = b"\x00"

    def close(self) -> None:
        if self._context:
            self._lib.llama_free(self._context)
        if self._model:
            self._lib.llama_model_free(self._model)
        self._context = self._model = None


class BatchArrays:
    """The arrays behind a llama_batch, made once."""

    def __init__(self, tokens: int) -> None:
        self._token = np.zeros(tokens, np.int32)
        self._position = np.zeros(tokens, np.int32)
        self._sequence = np.zeros(tokens, np.int32)
        self._one = np.ones(tokens, np.int32)  # each token belongs to one sequence
        self._sequence_at = self._sequence.ctypes.data + 4 * np.arange(tokens, dtype=np.uintp)
        self._wanted = np.zeros(tokens, np.int8)
        self._batch = libllama_api.LlamaBatch(
            0,
            self._token.ctypes.data,
            None,
            self._position.ctypes.data,
            self._one.ctypes.data,
            self._sequence_at.ctypes.data,
            self._wanted.ctypes.data,
        )

    def fill(
        self, tokens: Ints, positions: Ints, sequences: Ints, wanted: NDArray[np.bool_]
    ) -> libllama_api.LlamaBatch:
        """A batch of these tokens; the next one overwrites it."""
        n = self._batch.n_tokens = len(tokens)
        self._token[:n] = tokens
        self._position[:n] = positions
        self._sequence[:n] = sequences
        self._wanted[:n] = wanted
        return self._batch
