"""What a template may take, and the numbers with which its process says that it took more."""

from __future__ import annotations

MIB = 1 << 20

# An honest template takes a millisecond. A long conversation takes longer, and more memory: a text that is
# not ASCII has up to four bytes for each character, in each of a few copies.
CPU_S = 0.5
CPU_S_PER_MIB = 0.05
MEMORY = 192 * MIB
MEMORY_PER_BYTE = 32

# Waiting, by the clock on the wall, without the time in which it had no core.
WALL_PER_CPU = 2.4

MOST_INPUT = 32 * MIB  # bytes of messages: more than any context holds
MOST_OUTPUT = MIB  # characters, and
OUTPUT_PER_INPUT = 4  # as many more for each byte of the messages
MOST_BYTES = 6  # of a character in JSON

# Exit codes of the child.
NO_TIME = 3
NO_MEMORY = 4
TOO_LONG = f"it computes for more than {CPU_S} s, as in a loop without an end"
TOO_LARGE = f"it takes more than {MEMORY // MIB} MiB of memory"


def seconds(size: int) -> float:
    """Seconds of computing for messages of this many bytes."""
    return CPU_S + CPU_S_PER_MIB * size / MIB


def memory(size: int) -> int:
    """Bytes of memory above what the process has when it starts."""
    return MEMORY + MEMORY_PER_BYTE * size


def output(size: int) -> int:
    """Characters that may be written."""
    return MOST_OUTPUT + OUTPUT_PER_INPUT * size
