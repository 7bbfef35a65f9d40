"""What a time belongs to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpWork:
    """Ops of one form on one backend."""

    form: str
    backend: str
    threads: int
    several: bool = False  # tokens of several sequences: each attends to its own keys

    @property
    def other(self) -> OpWork:
        """The same for tokens of several sequences instead of one, or the other way round."""
        return OpWork(self.form, self.backend, self.threads, not self.several)
