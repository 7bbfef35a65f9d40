"""The real engine on real files: memory while loading, cancelling inside a native call."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import pytest

from hetrun import LLM, Event, SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.backends.llamacpp import ggml_api
from hetrun.backends.llamacpp.backend import LlamacppBackend
from hetrun.client.events import GenerateRequest
from hetrun.config import default_model
from hetrun.executor.planned_model import PlannedModel
from tests.support.limits import Within
from tests.support.tiers import exhaustive
from tests.tools import make_model

pytestmark = pytest.mark.slow

LOAD = """
import json, sys
from hetrun import LLM
with LLM(sys.argv[1], ctx=512, backends=["llamacpp"]) as llm:
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    io = dict(line.split(":", 1) for line in open("/proc/self/io"))
    print(json.dumps({"peak": int(status["VmHWM"].split()[0]) * 1024, "read": int(io["rchar"])}))
"""


@pytest.fixture(scope="module", params=["tall", pytest.param("1b", marks=exhaustive)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One large enough to see a copy too many."""
    if request.param == "tall":
        path: Path = request.getfixturevalue("tall")
        return path
    path = tmp_path_factory.mktemp("models") / "1b-q4_0.gguf"
    make_model.write_model(path, make_model.SHAPES["1b"], "Q4_0", 0)
    return path


def test_loading_takes_little_more_memory_than_the_file_and_reads_it_once(model: Path) -> None:
    size = model.stat().st_size
    out = subprocess.run([sys.executable, "-c", LOAD, str(model)], capture_output=True, check=True)
    used = json.loads(out.stdout)
    assert used["peak"] <= 1.03 * size + (250 << 20)
    # The interpreter reads its own modules as well, and a child that tries ggml's AMX code does it again.
    assert used["read"] <= size + (120 << 20)


def test_a_cancel_ends_a_native_call_and_leaves_the_cache_as_it_was(
    model: Path, monkeypatch: pytest.MonkeyPatch, within: Within
) -> None:
    """The step is one call of more than a second: without an abort inside, the first token would come."""
    inside = threading.Event()
    statuses: list[int] = []
    compute = LlamacppBackend._run

    def run(self: LlamacppBackend, graph: int) -> int:
        inside.set()
        statuses.append(compute(self, graph))
        return statuses[-1]

    tokens = tuple(i * 7919 % 4000 for i in range(512))
    with LocalModel(model, ctx=1024, backends=["llamacpp"]) as llm:
        monkeypatch.setattr(LlamacppBackend, "_run", run)
        over = threading.Event()
        events: list[Event] = []

        def on_event(event: Event) -> None:
            events.append(event)
            if event.kind != "token":
                over.set()

        request = llm.submit(GenerateRequest(SamplingParams(max_tokens=4), tokens=tokens), on_event)
        assert inside.wait()
        llm.cancel(request)
        with within(10):
            over.wait()
        assert statuses[-1] == ggml_api.ABORTED
        assert [(e.kind, e.finish_reason) for e in events] == [("done", "cancelled")]
        # Nothing is left of it: all sequences are free, and the next answer is that of a fresh engine.
        greedy = SamplingParams(max_tokens=4, temperature=0)
        assert llm.generate([[5, 6, 7]], greedy)[0].tokens == llm.generate([[5, 6, 7]], greedy)[0].tokens
        assert llm.call(lambda loaded: cast(PlannedModel, loaded.model).kv_bytes) == 0


def test_the_default_model_answers() -> None:
    with LLM(default_model(), ctx=512) as llm:
        done = llm.chat(
            [{"role": "user", "content": "What is 2+2?"}], SamplingParams(max_tokens=20, temperature=0)
        )
        assert "4" in done.text
        assert llm.plan.backends == ["llamacpp"]
