"""Threads follow what others take of this machine's own cores (test_cpu_contention.py: on a clock).

Anything else may run here as well, and what is burnt here slows that down: only for `make test-all`, alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import pytest

from hetrun.api.local_model import LocalModel
from hetrun.engine.loaded_model import LoadedModel
from hetrun.executor.autotune.cpu_contention import OtherPrograms
from hetrun.executor.autotune.decisions import SPARE
from hetrun.executor.compiled_plan import PassTiming
from hetrun.executor.executor import Executor
from tests.engine.test_cpu_contention import planned, step, threads
from tests.models import tiny
from tests.models.tiny import TinyLlama
from tests.support.burners import CORES, burners
from tests.support.pass_listener import PassListener

MODEL = TinyLlama("crowded", layers=8, embd=512, ffn=2048, heads=8, kv_heads=4, context=512, quant="Q8_0")
FASTER = 0.97  # of the time of a pass with fewer threads: what all of them have to reach
PATIENCE_S = 30.0  # that either may take here, where anything else may run as well

pytestmark = [
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.usefixtures("all_threads"),
    pytest.mark.skipif(CORES < 2, reason="one core: there are no fewer threads"),
]


def run_until(loaded: LoadedModel, what: Callable[[], bool]) -> bool:
    """Steps until it is so, or until it has taken too long."""
    end = perf_counter() + PATIENCE_S
    while not what() and perf_counter() < end:
        step(loaded)
    return what()


@contextmanager
def timed(executor: Executor) -> Iterator[dict[int, list[float]]]:
    """The seconds of passes meanwhile, by their threads."""
    observer, found = executor._observer, defaultdict[int, list[float]](list)

    def listen(ran: PassTiming) -> None:
        found[ran.threads].append(ran.seconds)

    executor.observe(PassListener(listen, before=observer))
    try:
        yield found
    finally:
        executor.observe(observer)


def all_threads_pay(passes: dict[int, list[float]]) -> bool:
    """Whether trials of all threads were faster than fewer: beside other guests of a host they may not be."""
    fewer = [s for threads, seconds in passes.items() if threads < CORES for s in seconds]
    return CORES not in passes or median(passes[CORES]) < FASTER * median(fewer)


def others_compute() -> bool:
    """Whether other programs take cores here while we do nothing."""
    others, start = OtherPrograms(), perf_counter()
    others.look(start)
    sleep(2)
    found = others.look(perf_counter())
    return found is None or found > SPARE


def test_threads_follow_what_others_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hetrun.executor.autotune")
    monkeypatch.setattr("hetrun.executor.autotune.measurement.backend_probe.others_running", lambda: 0.0)

    def watch(loaded: LoadedModel) -> None:
        model, autotuner = planned(loaded)
        force = autotuner._crowd
        assert run_until(loaded, lambda: force.quiet and threads(model) == {CORES})
        works = set(autotuner.forecast.works())
        with burners():
            assert run_until(loaded, lambda: force.crowded and threads(model) != {CORES})
            assert set(autotuner.forecast.works()) == works, "nothing is learnt from a crowd"
        with timed(model._executor) as passes:
            back = run_until(loaded, lambda: force.quiet and threads(model) == {CORES})
        if not back:
            assert others_compute() or not all_threads_pay(passes), "cores are free, and no one uses them"
            pytest.skip("other programs keep this machine busy")
        reasons = [c.reason for c in autotuner.changes if c.became == "in force"]
        assert any(f"instead of {CORES}" in why for why in reasons)
        assert all(why in caplog.text for why in reasons)

    with LocalModel(
        tiny.write_gguf(MODEL, tmp_path / "crowded.gguf"),
        backends=["llamacpp"],
        ctx=256,
        planner="measured",
        eager=True,
    ) as llm:
        llm.call(watch)


def test_threads_that_the_user_named_stay(tmp_path: Path) -> None:
    def watch(loaded: LoadedModel) -> None:
        with burners():
            end = perf_counter() + 2
            run_until(loaded, lambda: perf_counter() > end)
            assert {p.threads for p in loaded.model.plans.plans.values()} == {CORES}

    with LocalModel(
        tiny.write_gguf(MODEL, tmp_path / "named.gguf"),
        backends=["llamacpp"],
        threads=CORES,
        ctx=256,
        planner="measured",
    ) as llm:
        llm.call(watch)
