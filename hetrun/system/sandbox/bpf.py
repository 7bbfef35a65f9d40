"""Filters of system calls as programs of the kernel's packet filter: rules in, instructions out.

`seccomp` gives them to the kernel. A rule is looked at in order; the first that fits decides.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

ALLOW = 0x7FFF0000
KILL = 0x80000000  # the whole process, by SIGSYS
X32 = 0x40000000  # calls of x86-64 with this bit have other numbers, which no rule knows

# Loads of 32 bits from what the kernel says of a call, jumps, and the end.
LOAD, AND, JUMP_EQUAL, JUMP_AT_LEAST, END = 0x20, 0x54, 0x15, 0x35, 0x06
AT_NUMBER, AT_MACHINE, AT_ARGUMENTS = 0, 4, 16
INSTRUCTION = struct.Struct("=HBBI")
MOST = 255  # instructions that a jump can pass


def refusal(code: int = errno.EPERM) -> int:
    """What a filter answers so that a call fails with this error."""
    return 0x00050000 | code


class Machine(NamedTuple):
    """A kind of machine: how the kernel calls it, and its numbers of calls."""

    audit: int
    numbers: dict[str, int]
    has_x32: bool = False


@dataclass(frozen=True, slots=True)
class ArgumentTest:
    """What an argument has to be: that the bits under `mask` are `value`.

    Only its lower half is looked at: the kernel takes no more of the arguments that are tested here.
    """

    argument: int
    value: int
    mask: int = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class CallRule:
    """The answer to a call whose arguments pass all tests."""

    call: str
    answer: int
    tests: tuple[ArgumentTest, ...] = ()


_NAMES = """
read write close mmap mprotect munmap brk mremap madvise futex rt_sigaction rt_sigprocmask rt_sigreturn
sigaltstack setitimer getitimer prlimit64 setrlimit exit exit_group tgkill kill gettid getpid sched_yield
clock_gettime clock_getres clock_nanosleep gettimeofday restart_syscall getrandom membarrier rseq ppoll
pselect6 seccomp socket ptrace process_vm_readv process_vm_writev mount umount2 pivot_root chroot bpf
keyctl add_key request_key setns unshare open_by_handle_at init_module finit_module delete_module
kexec_load reboot swapon swapoff settimeofday clock_settime clock_adjtime adjtimex sethostname
setdomainname acct quotactl
""".split()
_X86_64 = (
    *(0, 1, 3, 9, 10, 11, 12, 25, 28, 202, 13, 14, 15),
    *(131, 38, 36, 302, 160, 60, 231, 234, 62, 186, 39, 24),
    *(228, 229, 230, 96, 219, 318, 324, 334, 271),
    *(270, 317, 41, 101, 310, 311, 165, 166, 155, 161, 321),
    *(250, 248, 249, 308, 272, 304, 175, 313, 176),
    *(246, 169, 167, 168, 164, 227, 305, 159, 170),
    *(171, 163, 179),
)
_AARCH64 = (
    *(63, 64, 57, 222, 226, 215, 214, 216, 233, 98, 134, 135, 139),
    *(132, 103, 102, 261, 164, 93, 94, 131, 129, 178, 172, 124),
    *(113, 114, 115, 169, 128, 278, 283, 293, 73),
    *(72, 277, 198, 117, 270, 271, 40, 39, 41, 51, 280),
    *(219, 217, 218, 268, 97, 265, 105, 273, 106),
    *(104, 142, 224, 225, 170, 112, 266, 171, 161),
    *(162, 89, 60),
)
MACHINES = {
    "x86_64": Machine(
        0xC000003E,
        # Those with fewer arguments, which the newer machine does not have.
        {**dict(zip(_NAMES, _X86_64, strict=True)), "poll": 7, "select": 23, "time": 201},
        has_x32=True,
    ),
    "aarch64": Machine(0xC00000B7, dict(zip(_NAMES, _AARCH64, strict=True))),
}


@cache
def this_machine() -> Machine | None:
    """The one this process runs on; None: filters for it are not known."""
    # A 32-bit Python on a kernel of 64 bits makes other calls.
    return MACHINES.get(os.uname().machine) if struct.calcsize("P") == 8 else None


def assembled(rules: Iterable[CallRule], otherwise: int, machine: Machine) -> bytes:
    """The filter as the kernel takes it. Calls that this machine does not have are left out."""
    program = [
        (LOAD, 0, 0, AT_MACHINE),
        (JUMP_EQUAL, 1, 0, machine.audit),
        (END, 0, 0, KILL),
        (LOAD, 0, 0, AT_NUMBER),
    ]
    if machine.has_x32:
        program += [(JUMP_AT_LEAST, 0, 1, X32), (END, 0, 0, KILL)]
    for rule in rules:
        if rule.call in machine.numbers:
            program += _of_rule(rule, machine.numbers[rule.call])
    program.append((END, 0, 0, otherwise))
    return b"".join(INSTRUCTION.pack(*each) for each in program)


def _of_rule(rule: CallRule, number: int) -> Sequence[tuple[int, int, int, int]]:
    """A rule in itself: what does not fit passes all of it, and finds the call's number loaded."""
    tests = [_of_test(test) for test in rule.tests]
    inside = sum(map(len, tests)) + len(tests) + 1
    left = inside + (1 if tests else 0)  # the number is loaded again
    assert left <= MOST, "a rule is longer than a jump"
    made: list[tuple[int, int, int, int]] = [(JUMP_EQUAL, 0, left, number)]
    for test, loaded in zip(rule.tests, tests, strict=True):
        made += loaded
        made.append((JUMP_EQUAL, 0, inside - len(made), test.value))
    made.append((END, 0, 0, rule.answer))
    if tests:
        made.append((LOAD, 0, 0, AT_NUMBER))
    return made


def _of_test(test: ArgumentTest) -> list[tuple[int, int, int, int]]:
    loaded = [(LOAD, 0, 0, AT_ARGUMENTS + 8 * test.argument)]
    return loaded if test.mask == 0xFFFFFFFF else [*loaded, (AND, 0, 0, test.mask)]
