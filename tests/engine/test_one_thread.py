"""Every native call is made by the engine's thread: breaking this halves the speed for good."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.backend import Unavailable
from hetrun.backend.registry import backends
from hetrun.client.events import GenerateRequest
from tests.models import cases, tiny

pytestmark = pytest.mark.skipif(
    isinstance(backends()["llamacpp"].probe(), Unavailable), reason="ggml is not installed"
)


class Recorder:
    """Puts a note of the calling thread in front of every function of a library."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.calls: dict[str, set[int]] = {}

    def watch(self, library: object, names: list[str]) -> None:
        for name in names:
            self._patch.setattr(library, name, self._noted(name, getattr(library, name)))

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: object) -> object:
            self.calls.setdefault(name, set()).add(threading.get_ident())
            return function(*arguments)

        return noted


def test_only_the_engine_thread_calls_ggml_and_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetrun.backends.llamacpp import ggml_api, libllama_api

    recorder = Recorder(monkeypatch)
    recorder.watch(ggml_api.library(), [*ggml_api._BASE, *ggml_api._CPU, *ggml_api._UNLOCKED])
    recorder.watch(libllama_api.library(), list(libllama_api.PROTOTYPES))
    path = tiny.write_gguf(cases.GQA, tmp_path / "tiny.gguf")

    with LocalModel(path) as llm:
        engine = llm._engine.thread_id

        def work(i: int) -> str:
            llm.tokenize(f"text {i}")
            llm.logits([1, 2, 3 + i])
            assert llm.plan.to_json()
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            for event in llm.stream(f"stream {i}", params):
                assert event.kind != "error"
            return llm.generate([f"one {i}", "two"], params)[0].text

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, range(3)))
        said = ({"role": "user", "content": "hello"},)
        llm.collect([GenerateRequest(SamplingParams(max_tokens=2), messages=said)])

    for needed in (
        "ggml_backend_graph_compute",
        "llama_tokenize",
        "ggml_backend_tensor_alloc",
        "ggml_mul_mat",
    ):
        assert needed in recorder.calls
    elsewhere = {name: idents - {engine} for name, idents in recorder.calls.items() if idents - {engine}}
    assert not elsewhere
