"""Programs of C in which threads run our libraries as ggml's threads, readers and owners do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Program:
    """One of them, and the C files of the libraries that it is linked with."""

    name: str
    libraries: tuple[str, ...]

    @property
    def source(self) -> Path:
        return FOLDER / f"{self.name}.c"


PROGRAMS = (
    Program("ring_threads", ("ring_reader.c",)),
    Program("slot_threads", ("expert_slots.c",)),
    Program("page_threads", ("pages.c",)),
    Program("product_threads", ("products.c",)),
    Program("attention_threads", ("attention.c",)),
    Program("state_threads", ("recurrent.c",)),
    Program("guard_threads", ("sigbus.c",)),
)
