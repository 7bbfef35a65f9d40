"""Filters of system calls, run by an interpreter: for machines that are not this one, too."""

from __future__ import annotations

import struct

import pytest

from hetrun.system.sandbox import bpf
from hetrun.system.sandbox.bpf import ALLOW, KILL, ArgumentTest, CallRule, assembled

AMD, ARM = bpf.MACHINES["x86_64"], bpf.MACHINES["aarch64"]


def decided(code: bytes, number: int, audit: int, *arguments: int) -> int:
    """The answer of a filter to a call, as the kernel finds it."""
    seen = struct.pack("=iIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    program = list(bpf.INSTRUCTION.iter_unpack(code))
    loaded, at = 0, 0
    while True:
        kind, yes, no, value = program[at]
        at += 1
        match kind:
            case bpf.LOAD:
                (loaded,) = struct.unpack_from("=I", seen, value)
            case bpf.AND:
                loaded &= value
            case bpf.JUMP_EQUAL:
                at += yes if loaded == value else no
            case bpf.JUMP_AT_LEAST:
                at += yes if loaded >= value else no
            case bpf.END:
                return int(value)
            case _:
                raise AssertionError(f"an instruction that is not known: {kind:#x}")


@pytest.mark.parametrize("machine", [AMD, ARM], ids=["x86_64", "aarch64"])
def test_rules_decide_in_order(machine: bpf.Machine) -> None:
    no = bpf.refusal(13)
    code = assembled(
        [
            CallRule("read", ALLOW),
            CallRule("mmap", no, (ArgumentTest(2, 4, mask=4),)),
            CallRule("mmap", ALLOW),
            CallRule("prlimit64", ALLOW, (ArgumentTest(0, 0), ArgumentTest(1, 9))),
            CallRule("write", ALLOW),
        ],
        bpf.refusal(),
        machine,
    )

    def of(name: str, *arguments: int) -> int:
        return decided(code, machine.numbers[name], machine.audit, *arguments)

    assert of("read") == ALLOW
    assert of("mmap", 0, 0, 3) == ALLOW
    assert of("mmap", 0, 0, 7) == of("mmap", 0, 0, 4) == no
    assert of("prlimit64", 0, 9) == ALLOW
    assert of("prlimit64", 1, 9) == of("prlimit64", 0, 7) == bpf.refusal()
    assert of("write") == ALLOW
    assert of("socket") == bpf.refusal()
    assert decided(code, 100_000, machine.audit) == bpf.refusal()


def test_calls_of_another_machine_end_the_process() -> None:
    for machine, other in ((AMD, ARM), (ARM, AMD)):
        code = assembled([CallRule("read", ALLOW)], ALLOW, machine)
        assert decided(code, machine.numbers["read"], other.audit) == KILL
        assert decided(code, machine.numbers["read"], 0x40000003) == KILL  # 32 bits on x86
    code = assembled([CallRule("read", ALLOW)], ALLOW, AMD)
    assert decided(code, bpf.X32 + AMD.numbers["read"], AMD.audit) == KILL
    assert decided(code, -1, AMD.audit) == KILL


def test_a_call_that_a_machine_does_not_have_is_no_rule() -> None:
    assert "select" not in ARM.numbers
    rules = [CallRule("select", ALLOW)]
    assert len(assembled(rules, KILL, ARM)) == len(assembled([], KILL, ARM))


def test_numbers_are_of_one_call_each() -> None:
    for machine in (AMD, ARM):
        assert len(set(machine.numbers.values())) == len(machine.numbers)
