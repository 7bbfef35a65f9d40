"""Other programs that keep cores busy while something is measured, and the peer's number of threads."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetrun.config import Settings
from hetrun.errors import OptionError
from hetrun.system import subprocesses
from hetrun.tools import bench
from hetrun.tools.bench import interleave, peer as peer_module
from hetrun.tools.bench.cases import BenchCase, BenchOptions
from hetrun.tools.bench.cpu_load import others
from hetrun.tools.bench.llamacpp_peer import RunPeerCase
from hetrun.tools.bench.memory_bandwidth import MemoryBandwidth
from hetrun.tools.bench.options import TypedBenchOptions, options_of
from hetrun.tools.bench.peer import Peer, default_threads, thread_counts, trial
from hetrun.tools.bench.report import BenchRow, PeerResult, to_csv, to_table
from hetrun.tools.bench.roofline import Limit
from tests.models import tiny
from tests.models.tiny import TinyLlama


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def runs(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(true: Any) -> None:  # noqa: ANN401 - something to ask again and again
    while not true():
        time.sleep(0.01)


def test_each_is_a_busy_program_of_its_own() -> None:
    with others(2) as processes:
        pids = [p.pid for p in processes]
        assert len(set(pids)) == 2
        for pid in pids:
            assert os.getsid(pid) == pid != os.getsid(0)
            until(lambda pid=pid: cpu_seconds(pid) > 0.05)
    assert not any(runs(pid) for pid in pids)
    with others(0) as processes:
        assert processes == ()


def test_they_end_with_an_error() -> None:
    with pytest.raises(ZeroDivisionError), others(1) as (process,):  # noqa: PT012
        assert runs(process.pid)
        raise ZeroDivisionError
    assert not runs(process.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_they_end_with_us_however_we_end(number: signal.Signals) -> None:
    code = (
        "import time; from hetrun.tools.bench.cpu_load import others\n"
        "with others(1) as (process,):\n    print(process.pid, flush=True)\n    time.sleep(600)"
    )
    ours = subprocess.Popen(
        subprocesses.python(code),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # Tests that were started in the background ignore Ctrl-C, and their children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert ours.stdout is not None
    with ours.stdout:
        pid = int(ours.stdout.readline())
        assert runs(pid)
        ours.send_signal(number)
        assert ours.wait() != 0
        until(lambda: not runs(pid))


# --- what is asked for


def asked(**given: Any) -> TypedBenchOptions:  # noqa: ANN401 - its fields
    typed: dict[str, Any] = {"prompt": "512", "generate": "64", "rounds": 5, "output": "table"}
    typed |= dict.fromkeys(("depth", "batch", "vs", "clients", "requests", "shared_prefix", "arrival"))
    return TypedBenchOptions(**(typed | {"explain": False} | given))


def test_the_options_say_how_many() -> None:
    options = options_of(asked(vs="llama.cpp", vs_threads="3", beside="2"))
    assert isinstance(options, BenchOptions)
    assert (options.vs_threads, options.beside) == (3, 2)
    assert options_of(asked()) == BenchOptions()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"vs_threads": "1"}, "give --vs llama.cpp too"),
        ({"vs": "llama.cpp", "vs_threads": "0"}, "--vs-threads must be a number of 1 or more"),
        ({"vs": "llama.cpp", "vs_threads": "1,2"}, "--vs-threads must be one number"),
        ({"beside": "1,2"}, "--beside must be one number"),
        ({"beside": "9999"}, "--beside must be 256 or less"),
        ({"clients": "1", "beside": "1"}, "--beside is for runs in process"),
        ({"clients": "1", "vs_threads": "1"}, "--vs-threads is for runs in process"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        options_of(asked(**given))


# --- the peer's threads


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(
        TinyLlama("beside", layers=1, kv_heads=2), tmp_path_factory.mktemp("b") / "tiny.gguf"
    )


def test_a_fixed_number_of_threads_is_not_searched_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[RunPeerCase] = []
    ask = Peer._ask

    def note(self: Peer, order: Any, kind: Any) -> Any:  # noqa: ANN401 - as Peer's own
        if isinstance(order, RunPeerCase):
            sent.append(order)
        return ask(self, order, kind)

    monkeypatch.setattr(Peer, "_ask", note)
    case = BenchCase("decode", 40, 8)
    with Peer(path, 2) as peer:
        peer.prepare(case)
        assert peer.threads(case) == 2
        assert [(r.threads, r.case) for r in sent] == [(2, BenchCase("decode", 16, 8))]
        assert peer.sample(case, 1) > 0
    sent.clear()
    with Peer(path) as peer:
        peer.prepare(case)
        # Its search takes less than what is measured then, and stands behind the same prompt.
        assert {r.case for r in sent} == {BenchCase("decode", 16, 8)}
        assert {r.threads for r in sent} == set(thread_counts(len(os.sched_getaffinity(0))))
        assert peer.sample(case, 1) > 0
        prompt = BenchCase("prefill", 24, batch=2)
        peer.prepare(prompt)
        assert peer.sample(prompt, 1) > 0


def test_a_trial_is_as_much_as_tells() -> None:
    assert trial(BenchCase("decode", 64, 4096, 16)) == BenchCase("decode", 16, 4096, 16)
    assert trial(BenchCase("decode", 4, 32)) == BenchCase("decode", 4, 32)
    assert trial(BenchCase("prefill", 4096, batch=16)) == BenchCase("prefill", 512)
    for case in (BenchCase("decode", 64, 4096, 16), BenchCase("prefill", 4096, batch=16)):
        assert trial(case).context <= case.context


def test_by_default_it_has_a_thread_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for physical, threads in ((4, 4), (16, 8), (None, 8)):
        monkeypatch.setattr(peer_module, "physical_cores", lambda physical=physical: physical)
        assert default_threads() == threads


# --- together


def test_beside_others_both_sides_run_as_their_users_have_them(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[str] = []

    @contextmanager
    def noted(n: int) -> Iterator[None]:
        log.append(f"begin {n}")
        yield
        log.append("end")

    def memory(n: int, nbytes: float, again: bool) -> MemoryBandwidth:
        log.append("memory")
        return MemoryBandwidth(n, int(nbytes), 1e9, 1e9)

    monkeypatch.setattr(interleave, "PAUSE_S", 0.0)
    monkeypatch.setattr(bench, "others", noted)
    monkeypatch.setattr(bench, "memory", memory)
    monkeypatch.setattr(bench, "default_threads", lambda: 1)
    monkeypatch.setattr(bench, "load_average", lambda: 0.0 if "begin 3" not in log else 9.0)
    settings = Settings.resolve(model=str(path), backends=["libllama"], threads=1)
    bench.main(settings, BenchOptions((0,), (4,), (8,), (1,), 2, vs="llama.cpp", beside=3))
    found = capsys.readouterr()
    # Limits are those of a machine that does nothing else.
    assert log.index("begin 3") < log.index("end")
    assert "memory" not in log[log.index("begin 3") : log.index("end")]
    assert found.err == ""  # what the others do to the load average is no news
    heads, row, *footer = found.out.splitlines()
    assert heads.split()[:4] == ["model", "test", "precision", "beside"]
    assert row.split()[:3] == ["tiny", "tg4@8", "3"]  # libllama has one precision
    assert "threads (default)" in heads
    assert any(line.startswith("beside 3: this many other programs each kept a core busy") for line in footer)
    assert "the number of threads that is its default" in found.out


def test_rows_say_what_ran_beside_and_when_a_limit_was_exceeded() -> None:
    limit = Limit(50.0, "because", memory=MemoryBandwidth(2, 98_000_000, 60e9, 40e9), bound="memory")
    theirs = PeerResult("llama.cpp", "1", 2, (40.0,), limit=limit, chosen="asked")
    one = BenchRow("tiny", "tg4", 1, 2, (60.0,), limit, "fast", theirs, 1.5, beside=1, precision="exact")
    text = to_table([one], explain=False)
    assert "threads (asked)" in text
    assert "the number of threads that was asked for" in text
    assert (
        "of limit: memory gives 60.0 GB/s to 2 threads for blocks of 93 MiB (in part from a cache), 40.0"
        in text
    )
    assert "of limit: more than 100 % means" in text
    assert one.to_json(explain=False)["beside"] == 1
    assert to_csv([one]).splitlines()[1].endswith(",1.2,50.0,0.8,asked,1,exact")
