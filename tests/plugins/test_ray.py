"""hetrun-ray on a Ray cluster of this machine: batches over its nodes while they die and others come.

Ray runs in processes of its own here: it leaves sockets and files open, which is an error in tests. Nor is
the package installed: what it is built to lies on the path of the cluster and of the command.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.models.tiny import TinyLlama, write_gguf
from tests.plugins.strangers import PLUGINS, wheel_of
from tests.support.tiers import exhaustive

pytestmark = pytest.mark.slow
WITH_RAY = exhaustive  # a cluster of real processes takes minutes

PATIENCE_S = 240.0
LINES = 600
# Nodes of one CPU each, which last until standard input ends.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster
node = dict(num_cpus=1, object_store_memory=80 << 20)
# A node that does not answer is given up sooner than in real clusters.
soon = {f"health_check_{what}": n for what, n in dict(
    initial_delay_ms=1000, period_ms=1000, timeout_ms=3000, failure_threshold=3).items()}
head = dict(**node, include_dashboard=False, temp_dir=sys.argv[1], _system_config=soon)
cluster = Cluster(True, head_node_args=head)
nodes = []
print(cluster.address, flush=True)
for line in sys.stdin:
    what, *words = line.split()
    if what == "add":
        nodes.append(cluster.add_node(**node, env_vars=dict(word.split("=") for word in words)))
    elif what == "remove":
        cluster.remove_node(nodes.pop(), allow_graceful=False)
    elif what == "end":
        cluster.remove_node(cluster.head_node, allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
"""
# The command, which does not wait so long for a worker to come back.
IMPATIENT = (
    "from hetrun.tools.batch import runner; runner.PATIENCE_S = 4; from hetrun.cli import main; main()"
)


@dataclass(frozen=True)
class Nodes:
    """A cluster, and the process that has it."""

    process: subprocess.Popen[str]
    address: str

    def do(self, what: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"

    def actors(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in found if _told(process)[:1] == ["ray::Engine"]]


@dataclass(frozen=True)
class Bench:
    """What tests have in common."""

    packages: Path  # where hetrun-ray is
    model: Path
    source: Path  # of requests
    alone: bytes  # their results when nothing is disturbed

    def command(self, *more: str | Path, code: str = "from hetrun.cli import main; main()") -> list[str]:
        options = ("-n", "24", "--temp", "0", "--deterministic", "-m", self.model, "-f", self.source)
        return [sys.executable, "-c", code, "run", *map(str, (*options, *more))]

    def begin(self, *more: str | Path, code: str = "from hetrun.cli import main; main()") -> Running:
        process = subprocess.Popen(
            self.command(*more, code=code), env=_environment(self.packages), stderr=subprocess.PIPE, text=True
        )
        return Running(process)

    def engines(self) -> list[psutil.Process]:
        """All that have the package in their command: Ray's driver, the servers, their models' processes."""
        return [p for p in psutil.process_iter() if any(str(self.packages) in word for word in _told(p))]


@dataclass(frozen=True)
class Running:
    """A batch."""

    process: subprocess.Popen[str]

    def ended(self) -> tuple[int, str]:
        """The exit code, and what it said."""
        _, said = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, said


def _told(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _folder(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return ""


def _environment(packages: Path) -> dict[str, str]:
    here = {name: value for name, value in os.environ.items() if not name.startswith(("HETRUN_", "RAY_"))}
    return {**here, "PYTHONPATH": str(packages), "HETRUN_PLANNER": "static", "RAY_USAGE_STATS_ENABLED": "0"}


def until(so: Callable[[], bool], running: Running | None = None) -> None:
    began = time.monotonic()
    while not so():
        assert running is None or running.process.poll() is None, "it has ended before"
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.02)


def lines(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    wheel = wheel_of(PLUGINS / "hetrun-ray", folder)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, str(folder / "packages"), str(wheel)], check=True)
    return folder / "packages"


@pytest.fixture(scope="module")
def cluster(packages: Path) -> Iterator[Callable[[], Nodes]]:
    """The cluster that is there, or a new one. Each begins with two nodes."""
    begun: list[Nodes] = []
    # Ray's sockets lie in it: no path of pytest's is short enough.
    folder = tempfile.mkdtemp(prefix="ray")
    Path(folder, "ray").mkdir()  # where it writes which cluster is there

    def there() -> Nodes:
        if not begun or begun[-1].process.poll() is not None:
            env = _environment(packages) | {"TMPDIR": folder}
            process = subprocess.Popen(
                [sys.executable, "-c", CLUSTER, folder],
                env=env, cwd=folder, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            assert process.stdout is not None
            begun.append(Nodes(process, process.stdout.readline().strip()))
            begun[-1].do("add")
        return begun[-1]

    try:
        yield there
    finally:
        for nodes in begun:
            _end(nodes)
        for process in psutil.process_iter():  # of nodes that were killed: they notice that after a while
            if _folder(process) == folder:
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _end(nodes: Nodes) -> None:
    family = (
        psutil.Process(nodes.process.pid).children(recursive=True) if nodes.process.poll() is None else []
    )
    nodes.process.communicate(timeout=60)
    _, left = psutil.wait_procs(family, 10)
    for process in left:
        process.kill()


@pytest.fixture(scope="module")
def bench(packages: Path, cluster: Callable[[], Nodes], tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("batch")
    model = write_gguf(TinyLlama("tiny", layers=2, context=512), folder / "tiny.gguf")
    (folder / "in.txt").write_text("".join(f"Say {i}\n" for i in range(LINES)))
    nodes = cluster()
    first = Bench(packages, model, folder / "in.txt", b"")
    running = first.begin("-o", folder / "alone.jsonl", "--workers", f"ray:{nodes.address}")
    assert running.ended() == (0, "")  # and Ray says nothing
    assert not first.engines()
    assert not nodes.actors()
    alone = (folder / "alone.jsonl").read_bytes()
    rows = [json.loads(line) for line in alone.splitlines()]
    assert [row["index"] for row in rows] == list(range(LINES))
    assert not [row for row in rows if "error" in row]
    # Another number of nodes, or none, has no part in the answers.
    locally = first.begin("-o", folder / "here.jsonl").ended()
    assert locally == (0, "")
    here = [json.loads(line)["text"] for line in (folder / "here.jsonl").read_bytes().splitlines()]
    assert [row["text"] for row in rows] == here
    return Bench(packages, model, folder / "in.txt", alone)


@WITH_RAY
def test_an_actor_and_a_node_that_are_killed_cost_nothing(
    bench: Bench, cluster: Callable[[], Nodes], tmp_path: Path
) -> None:
    nodes, output = cluster(), tmp_path / "out"
    running = bench.begin("-o", output, "--workers", f"ray:{nodes.address}")
    until(lambda: lines(output) > 30 and len(nodes.actors()) == 2, running)
    killed = nodes.actors()[0]
    killed.kill()
    before = lines(output)
    # Another actor begins on the node whose one was killed.
    until(lambda: lines(output) > before + 30 and len(nodes.actors()) == 2, running)
    nodes.do("remove")
    code, said = running.ended()
    assert code == 0, said
    assert output.read_bytes() == bench.alone
    assert "Others take its requests" in said
    assert all(line.startswith("ray node ") for line in said.splitlines()), said
    until(lambda: not bench.engines() and not nodes.actors())
    nodes.do("add")


@WITH_RAY
def test_a_node_that_joins_takes_the_place_of_one_that_left(
    bench: Bench, cluster: Callable[[], Nodes], tmp_path: Path
) -> None:
    nodes, output = cluster(), tmp_path / "out"
    (tmp_path / "in.txt").write_text("".join(f"Say {i}\n" for i in range(5 * LINES)))
    running = bench.begin("-f", tmp_path / "in.txt", "-o", output, "--workers", f"ray:{nodes.address}")
    until(lambda: lines(output) > 30 and len(nodes.actors()) == 2, running)
    before = {actor.pid for actor in nodes.actors()}
    nodes.do("remove")
    nodes.do("add")
    until(lambda: len({actor.pid for actor in nodes.actors()} - before) == 1, running)
    code, said = running.ended()
    assert code == 0, said
    data = output.read_bytes()
    assert data.startswith(bench.alone)
    assert [json.loads(line)["index"] for line in data.splitlines()] == list(range(5 * LINES))
    until(lambda: not bench.engines() and not nodes.actors())


def _has_more(output: Path, than: int) -> bool:
    return lines(output) > than


@WITH_RAY
def test_the_command_may_be_killed_and_goes_on(
    bench: Bench, cluster: Callable[[], Nodes], tmp_path: Path
) -> None:
    nodes, output = cluster(), tmp_path / "out"
    more = ("-o", output, "--workers", f"ray:{nodes.address}", "--resume")
    for sign, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        enough = lines(output) + 30
        running = bench.begin(*more)
        until(partial(_has_more, output, enough), running)
        assert lines(output) < LINES
        running.process.send_signal(sign)
        assert running.ended()[0] == code
        until(lambda: not bench.engines() and not nodes.actors())
    assert bench.begin(*more).ended() == (0, "")
    assert output.read_bytes() == bench.alone


@WITH_RAY
def test_rays_driver_may_be_killed_and_the_engines_end(
    bench: Bench, cluster: Callable[[], Nodes], tmp_path: Path
) -> None:
    nodes, output = cluster(), tmp_path / "out"
    more = ("-o", output, "--workers", f"ray:{nodes.address}")
    running = bench.begin(*more, code=IMPATIENT)
    until(lambda: lines(output) > 30, running)
    (driver,) = [p for p in bench.engines() if "hetrun_ray.cluster" in " ".join(_told(p))]
    driver.kill()
    code, said = running.ended()
    assert code == 1
    assert "there was no answer for 4 s" in said
    until(lambda: not bench.engines() and not nodes.actors())
    assert bench.begin(*more, "--resume").ended() == (0, "")
    assert output.read_bytes() == bench.alone


@WITH_RAY
def test_a_node_without_the_model_is_named_and_the_others_go_on(
    bench: Bench, cluster: Callable[[], Nodes], tmp_path: Path
) -> None:
    nodes, output = cluster(), tmp_path / "out"
    with_it = tmp_path / "with"
    with_it.mkdir()
    (with_it / "m.gguf").symlink_to(bench.model)
    (tmp_path / "short").write_text("Say 1\nSay 2\n")
    where = ("-o", output, "--workers", f"ray:{nodes.address}")
    code, said = bench.begin("-m", "~/m.gguf", *where).ended()
    assert code == 2
    *_, last = said.splitlines()
    assert re.search(
        r"none of the 2 nodes of the Ray cluster could start an engine; .*m\.gguf does not exist", last
    )
    nodes.do(f"add HOME={with_it}")
    code, said = bench.begin("-m", "~/m.gguf", "-f", tmp_path / "short", *where, "--resume").ended()
    nodes.do("remove")
    assert code == 0, said
    assert lines(output) == 2
    until(lambda: not bench.engines() and not nodes.actors())


@WITH_RAY
def test_a_node_that_does_not_begin_holds_nothing_up(
    bench: Bench, cluster: Callable[[], Nodes], tmp_path: Path
) -> None:
    nodes, output = cluster(), tmp_path / "out"
    family = psutil.Process(nodes.process.pid).children(recursive=True)
    raylets = [process for process in family if process.name() == "raylet"]
    stopped = max(raylets, key=lambda process: process.create_time())  # the head began first
    stopped.suspend()
    try:
        code, said = bench.begin("-o", output, "--workers", f"ray:{nodes.address}").ended()
    finally:
        stopped.resume()
    assert code == 0, said
    assert output.read_bytes() == bench.alone
    until(lambda: not bench.engines() and not nodes.actors())
    nodes.do("remove")
    nodes.do("add")


@WITH_RAY
def test_addresses_that_are_no_good_are_one_sentence(
    bench: Bench, cluster: Callable[[], Nodes], tmp_path: Path
) -> None:
    here = f"ray:{cluster().address}"
    for where, why in (
        (f"{here} ray:other:6379", "--workers has two addresses with ray"),
        ("ray:127.0.0.1:1", r"nothing listens there \(.*\); `ray start --head` begins a cluster"),
        ("ray://host:10001", "give ray:auto on a machine of the cluster"),
        ("rai:auto", "must be like .* or begin with ray:"),
    ):
        code, said = bench.begin("-o", tmp_path / "out", "--workers", *where.split()).ended()
        assert code == 2, said
        # Ray may know a node yet that was killed a moment before.
        (sentence,) = [line for line in said.splitlines() if not line.startswith("ray node ")]
        assert re.search(why, sentence), sentence
    until(lambda: not bench.engines())


def test_folders_that_the_killed_left_are_taken_away(tmp_path: Path) -> None:
    code = """
import os
from hetrun_ray import engine
stale, young, locked = [engine._private_folder() for _ in range(3)]
for folder, _ in (stale, locked):
    os.utime(folder, (0, 0))
os.close(stale[1])
engine._sweep()
print([os.path.exists(folder) for folder, _ in (stale, young, locked)])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=_environment(PLUGINS / "hetrun-ray") | {"TMPDIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "[False, True, True]\n", done.stderr


@WITH_RAY
def test_when_all_nodes_are_gone_the_end_is_clear_and_a_new_cluster_goes_on(
    bench: Bench, cluster: Callable[[], Nodes], tmp_path: Path
) -> None:
    """Nothing is left of the cluster; the next one who wants it has another."""
    nodes, output = cluster(), tmp_path / "out"
    running = bench.begin("-o", output, "--workers", f"ray:{nodes.address}", code=IMPATIENT)
    until(lambda: lines(output) > 30, running)
    nodes.do("remove")
    nodes.do("end")
    code, said = running.ended()
    assert code == 1
    *_, last = said.splitlines()
    assert re.search(
        "EngineStopped: there was no answer for 4 s: .* Results written so far are kept; "
        "continue with --resume",
        last,
    )
    assert 30 < lines(output) < LINES
    until(lambda: not bench.engines() and not nodes.actors())
    nodes.process.kill()
    _end(nodes)
    again = cluster()
    assert bench.begin("-o", output, "--workers", f"ray:{again.address}", "--resume").ended() == (0, "")
    assert output.read_bytes() == bench.alone
    until(lambda: not bench.engines() and not again.actors())
