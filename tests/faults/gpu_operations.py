"""Operations on an emulated GPU, whose calls fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from hetrun.api.local_model import LocalModel
from hetrun.backend import Available, Backend, Descriptor, registry
from tests.cuda.emulated.device import emulated
from tests.faults.device_calls import FailingDriver
from tests.faults.operations import OPTIONS, Operation, Place, first_tokens, operation

GPU = {**OPTIONS, "backends": ["cuda"], "deterministic": False}


def _made() -> Backend:
    return emulated(FailingDriver(), name="cuda")


@contextmanager
def _gpu() -> Iterator[None]:
    """A GPU among the backends."""
    undo = registry.register(
        Descriptor("cuda", partial(Available, "a test"), _made, preference=-1, own_memory=True)
    )
    try:
        yield
    finally:
        undo()


@operation("gpu-load")
def _gpu_load(place: Place) -> Iterator[Operation]:
    def run() -> object:
        with LocalModel(place.gguf, **GPU) as llm:
            return llm.n_vocab, llm.info.context

    with _gpu():
        yield Operation(run)


@operation("gpu-decode")
def _gpu_decode(place: Place) -> Iterator[Operation]:
    """A prompt, and some tokens more."""
    with _gpu(), LocalModel(place.gguf, **GPU) as llm:
        yield Operation(lambda: first_tokens(llm, 3))
