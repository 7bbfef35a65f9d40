"""The process that runs chat templates, as honest ones see it; the others are in tests/hostile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FunctionType

import pytest

from hetrun.errors import EngineStopped, HetrunError
from hetrun.system.sandbox.child import ENVIRONMENT
from hetrun.text.chat import ChatTemplate, sandbox_process as processes
from hetrun.text.chat.jinja_sandbox import TemplateTimeout, compiled, line_of, rendered
from hetrun.text.chat.renderer import TemplateWorker
from hetrun.text.chat.template import CHATML, MOST_SOURCE
from tests.support.limits import Within

HI = [{"role": "user", "content": "Hi"}]


def ended(pid: int) -> bool:
    """Whether there is no such process, or only its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


def test_one_process_for_all_conversations() -> None:
    with TemplateWorker(ChatTemplate(CHATML, "x")) as worker, ThreadPoolExecutor(8) as threads:
        worker.warm()
        pid = worker.pid
        texts = list(threads.map(lambda i: worker.render([{"role": "user", "content": str(i)}]), range(100)))
        assert worker.pid == pid
    assert texts == [f"<|im_start|>user\n{i}<|im_end|>\n<|im_start|>assistant\n" for i in range(100)]


def test_warming_does_not_wait(monkeypatch: pytest.MonkeyPatch, within: Within) -> None:
    with TemplateWorker(ChatTemplate("x" * MOST_SOURCE, "x")) as worker:
        with within(0.5):
            worker.warm()
        assert worker.pid
        assert worker.render(HI) == "x" * MOST_SOURCE
    monkeypatch.setattr(processes, "CHILD", "import time; time.sleep(3600)")  # it never answers
    worker = TemplateWorker(ChatTemplate("x" * MOST_SOURCE, "x"))
    worker.warm()
    assert worker.pid
    worker.close()


def test_a_killed_process_is_started_again() -> None:
    with TemplateWorker(ChatTemplate("{{ messages[0].content }}", "x")) as worker:
        assert worker.render(HI) == "Hi"
        first = worker.pid
        assert first
        os.kill(first, signal.SIGKILL)
        while not ended(first):
            time.sleep(0.01)
        assert worker.render(HI) == "Hi"
        assert worker.pid != first


def test_what_the_process_has_given_up() -> None:
    with TemplateWorker(ChatTemplate(CHATML, "x")) as worker:
        worker.check()
        proc = Path(f"/proc/{worker.pid}")
        names = [os.readlink(path) for path in (proc / "fd").iterdir()]
        assert sorted(name.partition(":")[0] for name in names) == ["/dev/null"] * 3 + ["socket"]
        environment = (proc / "environ").read_bytes().split(b"\0")
        assert {entry.partition(b"=")[0] for entry in environment if entry} <= {
            name.encode() for name in ENVIRONMENT
        }
        found = {line[:26].strip(): line[26:].split() for line in (proc / "limits").read_text().splitlines()}
        for name in ("Max file size", "Max open files", "Max processes", "Max core file size"):
            assert found[name][:2] == ["0", "0"], name
        assert int(found["Max address space"][0]) < 512 << 20


def test_the_process_ends_with_its_parent(within: Within) -> None:
    code = (
        "from hetrun.text.chat import ChatTemplate; import os\n"
        "from hetrun.text.chat.renderer import TemplateWorker\n"
        "worker = TemplateWorker(ChatTemplate('x', 'x')); worker.check(); print(worker.pid, flush=True)\n"
        "os._exit(0)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    with within(10):
        while not ended(int(said)):
            time.sleep(0.01)


def test_a_worker_that_nobody_has_any_more_ends_its_process() -> None:
    worker = TemplateWorker(ChatTemplate("x", "x"))
    worker.check()
    pid = worker.pid
    del worker
    assert not Path(f"/proc/{pid}").exists()


def test_closing_ends_what_runs() -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    worker = TemplateWorker(ChatTemplate("{% if messages | length > 1 %}" + loop + "{% endif %}", "x"))
    assert worker.render(HI) == ""
    failed: list[BaseException] = []

    def render() -> None:
        try:
            worker.render([*HI, *HI])
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=render)
    thread.start()
    time.sleep(0.1)
    worker.close()
    thread.join()
    assert [type(error) for error in failed] == [EngineStopped]
    with pytest.raises(EngineStopped):
        worker.render(HI)
    worker.close()


def test_closing_ends_what_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CHILD", "import time; time.sleep(60)")
    worker = TemplateWorker(ChatTemplate("x", "x"))
    worker.warm()
    closer = threading.Timer(0.1, worker.close)
    closer.start()
    with pytest.raises(EngineStopped):
        worker.render(HI)
    closer.join()


def test_a_process_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CHILD", "raise SystemExit(7)")
    with (
        TemplateWorker(ChatTemplate(CHATML, "x")) as worker,
        pytest.raises(HetrunError, match=r"did not start \(\w+, exit code 7\); see whether this works: "),
    ):
        worker.render(HI)


def test_jinja_is_for_the_child_alone() -> None:
    code = (
        "import sys; from hetrun.text.chat import ChatTemplate\n"
        "from hetrun.text.chat.renderer import TemplateWorker\n"
        "worker = TemplateWorker(ChatTemplate('{{ 1 + 1 }}', 'x'))\n"
        "assert worker.render([{'role': 'user', 'content': ''}]) == '2'; assert 'jinja2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_the_child_imports_little() -> None:
    code = "import sys, hetrun.text.chat.sandbox_main; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=30
    )
    modules = found.stdout.split()
    assert {m for m in modules if m.startswith("hetrun.") and not m.startswith("hetrun.text.chat")} <= {
        "hetrun.errors",
        "hetrun.system",
        "hetrun.text",
        "hetrun.system.files",
        "hetrun.system.sandbox",
        "hetrun.system.sandbox.bpf",
        "hetrun.system.sandbox.framing",
        "hetrun.system.sandbox.inside",
        "hetrun.system.sandbox.kernel",
        "hetrun.system.sandbox.landlock",
        "hetrun.system.sandbox.seccomp",
        "hetrun.system.terminal_text",
    }
    assert not {"numpy", "subprocess", "asyncio", "socket", "multiprocessing"} & {*modules}


def test_a_place_without_a_line() -> None:
    """Where a template is interrupted between two lines, Python names none; the one that called is named."""

    def nowhere() -> None:
        raise TemplateTimeout

    code = nowhere.__code__.replace(co_filename="<template>", co_linetable=b"")
    template = compiled("\n{{ f() }}")
    with pytest.raises(TemplateTimeout) as caught:
        rendered(template, {"f": FunctionType(code, {"TemplateTimeout": TemplateTimeout})}, 9)
    assert line_of(caught.value, template) == 2
