"""Seccomp: which calls the kernel still takes from this process, for ever and for its children too."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

from hetrun.system.sandbox import bpf, kernel
from hetrun.system.sandbox.bpf import ALLOW, ArgumentTest, CallRule
from hetrun.system.sandbox.kernel import Unrestricted

SET_MODE_FILTER, GET_ACTION_AVAIL = 1, 2
ALL_THREADS = 1
PROT_EXEC = 4
RLIMIT_AS = 9
AF_UNIX, AF_NETLINK = 1, 16

# What a Python makes of calls that computes, keeps its time and its memory, and talks over a pipe that it
# has. The others fail as if they were forbidden: one that asks for a file in order to word its error goes on
# without.
COMPUTING = (
    *("read", "write", "munmap", "brk", "mremap", "madvise", "futex", "membarrier", "rseq", "sched_yield"),
    *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "restart_syscall"),
    *("setitimer", "getitimer", "clock_gettime", "clock_getres", "clock_nanosleep", "gettimeofday", "time"),
    *("poll", "ppoll", "select", "pselect6", "getrandom", "getpid", "gettid", "exit", "exit_group"),
)

# What no engine and no library of one needs, and what would lead around other restrictions: other processes'
# memory, file systems, namespaces, the kernel itself.
_FOREIGN = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "open_by_handle_at", "bpf"),
    *("mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "quotactl", "acct"),
    *("keyctl", "add_key", "request_key", "init_module", "finit_module", "delete_module", "kexec_load"),
    *("reboot", "swapon", "swapoff", "settimeofday", "clock_settime", "sethostname", "setdomainname"),
)


def computing_only() -> None:
    """Nothing but to compute, and to read and write what is open. Unrestricted: the kernel does not do that.

    Memory cannot become code, a limit can only be set to memory, and a signal sent to this process alone.
    """
    allowed = [CallRule(name, ALLOW) for name in COMPUTING]
    allowed += [
        *(
            CallRule(name, bpf.refusal(), (ArgumentTest(2, PROT_EXEC, mask=PROT_EXEC),))
            for name in ("mmap", "mprotect")
        ),
        *(CallRule(name, ALLOW) for name in ("mmap", "mprotect")),
        CallRule("prlimit64", ALLOW, (ArgumentTest(0, 0), ArgumentTest(1, RLIMIT_AS))),
        CallRule("setrlimit", ALLOW, (ArgumentTest(0, RLIMIT_AS),)),
        *(CallRule(name, ALLOW, (ArgumentTest(0, os.getpid()),)) for name in ("kill", "tgkill")),
    ]
    _apply(allowed, bpf.refusal())


def without_network(families: Sequence[int] = ()) -> None:
    """No sockets but those of some families, and nothing that is foreign to a computing program, on all
    threads. Unrestricted: the kernel does not do that."""
    refused = bpf.refusal(errno.EACCES)
    rules = [CallRule("socket", ALLOW, (ArgumentTest(0, family),)) for family in families]
    _apply([*rules, CallRule("socket", refused), *_foreign()], ALLOW)


def without_foreign_calls() -> None:
    """The same with all sockets."""
    _apply(_foreign(), ALLOW)


def is_there() -> bool:
    """Whether the kernel takes filters from this process, and hetrun knows this machine's calls."""
    machine = bpf.this_machine()
    if machine is None:
        return False
    action = ctypes.c_uint32(bpf.ALLOW)
    try:
        kernel.call(
            machine.numbers["seccomp"],
            ctypes.c_uint(GET_ACTION_AVAIL),
            ctypes.c_uint(0),
            ctypes.byref(action),
        )
    except OSError:
        return False
    return True


def _foreign() -> list[CallRule]:
    return [CallRule(name, bpf.refusal()) for name in _FOREIGN]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _apply(rules: Sequence[CallRule], otherwise: int) -> None:
    machine = bpf.this_machine()
    if machine is None:
        raise Unrestricted(f"seccomp: the calls of {os.uname().machine} are not known")
    code = bpf.assembled(rules, otherwise, machine)
    program = _Program(len(code) // bpf.INSTRUCTION.size, code)
    kernel.promise_no_more_rights()
    try:
        left_out = kernel.call(
            machine.numbers["seccomp"],
            ctypes.c_uint(SET_MODE_FILTER),
            ctypes.c_uint(ALL_THREADS),
            ctypes.byref(program),
        )
    except OSError as error:
        raise Unrestricted(f"seccomp: {error.strerror}") from error
    if left_out:  # the number of a thread that has a filter of its own
        raise Unrestricted(f"seccomp: thread {left_out} has other restrictions")
