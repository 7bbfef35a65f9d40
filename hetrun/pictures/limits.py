"""What decoding a picture may take, and the numbers with which its process says that it took more."""

from __future__ import annotations

MIB = 1 << 20

MOST_PIXELS = 64 * MIB  # by a file's header, before anything is decoded
MOST_SIDE = 65_535  # pixels of width or height, as in JPEG
MOST_KEPT = 16 * MIB  # pixels: larger pictures are scaled down, to a half or a quarter of each side

# Of computing: a large photograph takes a second.
OPEN_S = 3.0
DECODE_S = 3.0
DECODE_S_PER_MIB = 0.2  # of pixels
WALL_PER_CPU = 2.4  # waiting, by the clock on the wall, without the time in which it had no core
IDLE_S = 60.0  # without a picture, after which the process ends

MEMORY = 256 * MIB  # above what the process has when it starts
SLACK = 16 * MIB  # of it, for what is not pixels

# Exit codes of the child; 0 is one that was idle.
NO_TIME = 3
NO_MEMORY = 4
FAULTS = {
    NO_TIME: "it takes too long to decode",
    NO_MEMORY: f"it takes more than {MEMORY // MIB} MiB of memory to decode",
}


def seconds(pixels: int) -> float:
    """Seconds of computing for a picture of this size, once its header is read."""
    return DECODE_S + DECODE_S_PER_MIB * pixels / MIB


def scale(pixels: int) -> int:
    """By how much each side is divided, so that no more is kept than may be."""
    divisor = 1
    while pixels > MOST_KEPT * divisor * divisor:
        divisor *= 2
    return divisor
