"""What a template could do that has broken out of Jinja's sandbox: code runs in its process, in its place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hetrun.errors import TemplateError
from hetrun.system.sandbox import bpf, kernel, landlock, seccomp
from hetrun.system.sandbox.kernel import Unrestricted
from hetrun.text.chat import ChatTemplate, sandbox_process as processes
from hetrun.text.chat.renderer import TemplateWorker
from hetrun.text.chat.template import CHATML
from tests.support.restrictions import needs_landlock, needs_seccomp

# The real process, as it starts and restricts itself; where it would render the second text, it runs Python.
# What that may want to import is there: an attacker would bring it along.
BROKEN_OUT = (
    "import ctypes, errno, mmap, os, resource, select, signal, socket, sys, threading, time; "
    "from hetrun.text.chat import sandbox_main; render = sandbox_main.rendered; "
    "seen = dict(ctypes=ctypes, errno=errno, mmap=mmap, os=os, resource=resource, select=select, "
    "signal=signal, socket=socket, sys=sys, threading=threading, time=time, "
    "libc=ctypes.CDLL(None, use_errno=True)); "
    "sandbox_main.rendered = lambda template, variables, most: "
    "eval(variables['code'], seen) if 'code' in variables else render(template, variables, most); "
    "sandbox_main.main({pipe})"
)
MOST_CALLS = 470  # numbers that kernels have given away so far, and a few more
UPROBES = {335, 336}  # a debugger's, which no filter sees: they end a process in which there is none
HI = [{"role": "user", "content": "Hi"}]
REFUSED = (
    *("PermissionError: ", "Permission denied", "can't start new thread"),
    "not allowed to raise maximum limit",
)


@pytest.fixture(scope="module")
def worker() -> Iterator[TemplateWorker]:
    with pytest.MonkeyPatch.context() as monkeypatch, TemplateWorker(ChatTemplate(CHATML, "x")) as worker:
        monkeypatch.setattr(processes, "CHILD", BROKEN_OUT)
        yield worker


# What it tries, and how the attempt shows that it has failed.
FILES = {
    "read a file": "open('/etc/passwd').read()",
    "write a file": "os.open('/tmp/hetrun-broken-out', os.O_WRONLY | os.O_CREAT)",
    "list a folder": "str(os.listdir('/'))",
    "look at a file": "str(os.stat('/etc/passwd'))",
    "delete a file": "str(os.unlink('/tmp/hetrun-broken-out'))",
    "rename a file": "str(os.rename('/tmp/hetrun-broken-out', '/tmp/hetrun-2'))",
    "open its own memory": "str(os.open('/proc/self/mem', os.O_RDWR))",
    "make an empty file in memory": "str(os.memfd_create('x'))",
}
OTHERS = {
    "connect by TCP": "str(socket.socket())",
    "send by UDP": "str(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))",
    "find a Unix socket": "str(socket.socket(socket.AF_UNIX))",
    "make a pair of sockets": "str(socket.socketpair())",
    "fork": "str(os.fork())",
    "start a thread": "str(threading.Thread(target=print).start())",
    "run a program": "str(os.execv('/bin/true', ['true']))",
    "signal its parent": "str(os.kill(os.getppid(), 0))",
    "signal all processes": "str(os.kill(-1, 0))",
    "look at its parent's memory": "str(os.pidfd_open(os.getppid()))",
    "have more descriptors": "str(resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))",
    "limit its parent": "str(resource.prlimit(os.getppid(), resource.RLIMIT_AS, (1, 1)))",
    "make code": "str(mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC))",
    "copy a descriptor": "str(os.dup(0))",
    "wait with epoll": "str(select.epoll())",
    "take another identity": "str(os.setuid(12345))",
}


def attempted(worker: TemplateWorker, code: str) -> str:
    """What the code makes, or why the process fails with it."""
    with pytest.raises(TemplateError) as caught:
        print("the template's process did it:", repr(worker.render(HI, code=code)))
    return str(caught.value)


@needs_seccomp
@pytest.mark.parametrize("what", [*FILES, *OTHERS])
def test_a_template_that_broke_out_reaches_nothing(worker: TemplateWorker, what: str) -> None:
    assert worker.render(HI, code="str(6 * 7)") == "42"
    pid = worker.pid
    said = attempted(worker, (FILES | OTHERS)[what])
    assert any(words in said for words in REFUSED), said
    # Its process goes on, and so do honest conversations.
    assert worker.render(HI).endswith("assistant\n")
    assert worker.pid == pid


@needs_seccomp
def test_calls_past_python(worker: TemplateWorker) -> None:
    """Calls that Python has no function for, by number: none that the filter does not know does anything."""
    allowed = {bpf_number for name, bpf_number in numbers().items() if name in seccomp.COMPUTING}
    allowed |= {numbers()[name] for name in ("mmap", "mprotect", "prlimit64", "setrlimit", "tgkill", "kill")}
    allowed |= UPROBES
    asked = [number for number in range(MOST_CALLS) if number not in allowed]
    code = (
        f"str([n for n in {asked} if not (libc.syscall(n, -1, -1, -1, -1, -1, -1) == -1 and "
        "ctypes.get_errno() == errno.EPERM)])"
    )
    assert json.loads(worker.render(HI, code=code)) == []


@needs_seccomp
def test_calls_with_other_numbers_end_the_process(worker: TemplateWorker) -> None:
    if not (machine := bpf.this_machine()) or not machine.has_x32:
        pytest.skip("only x86-64 has calls of a second kind")
    said = attempted(worker, f"str(libc.syscall({0x40000000 + 2}, b'/etc/passwd', 0))")
    assert "its process crashed (SIGSYS)" in said
    assert worker.render(HI).endswith("assistant\n")  # another process


def numbers() -> Mapping[str, int]:
    machine = bpf.this_machine()
    assert machine is not None
    return machine.numbers


@needs_landlock
def test_landlock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no seccomp, and the limit on descriptors was raised again."""
    without = (
        "from hetrun.system.sandbox import inside; import resource; limit = resource.setrlimit; "
        "inside._keep_from_calls = lambda: None; "
        "resource.setrlimit = lambda kind, most: kind == resource.RLIMIT_NOFILE or limit(kind, most); "
    )
    monkeypatch.setattr(processes, "CHILD", without + BROKEN_OUT)
    with TemplateWorker(ChatTemplate(CHATML, "x")) as worker:
        assert worker.render(HI, code="str(os.dup(0) > 2)") == "True"
        for what in ("read a file", "write a file", "list a folder"):
            assert "Permission denied" in attempted(worker, FILES[what]), what
        assert "Permission denied" in attempted(worker, "str(os.execv('/bin/true', ['true']))")


def test_without_both_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that knows neither: the process is as it was, within its limits."""
    monkeypatch.setenv("HETRUN_SANDBOX", "off")
    monkeypatch.setattr(processes, "CHILD", BROKEN_OUT)
    with TemplateWorker(ChatTemplate(CHATML, "x")) as worker:
        assert worker.render(HI, code="str(os.getpid())") == str(worker.pid)
        assert "Seccomp:\t0" in Path(f"/proc/{worker.pid}/status").read_text()
        assert worker.render(HI).endswith("assistant\n")


@needs_seccomp
def test_it_is_on() -> None:
    with TemplateWorker(ChatTemplate(CHATML, "x")) as worker:
        worker.check()
        status = Path(f"/proc/{worker.pid}/status").read_text()
        assert "Seccomp:\t2" in status
        assert "NoNewPrivs:\t1" in status


def test_refused_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel says that lacks them, or a container that forbids to ask."""

    def missing(number: int, *arguments: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(kernel, "call", missing)
    assert landlock.version() == 0
    assert not seccomp.is_there()
    with pytest.raises(Unrestricted, match="this kernel does not have it"):
        landlock.restrict({})
