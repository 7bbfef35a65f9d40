"""What an earlier run has answered already."""

from __future__ import annotations

from array import array

from hetrun.errors import UserError
from hetrun.system.units import counted
from hetrun.tools.batch.output_file import LineOutput
from hetrun.tools.batch.request_lines import Ask
from hetrun.tools.batch.result_lines import request_of

# A result is written at most this many requests before one that came earlier: a number that is further away
# is no request's, and no reason to take memory for all those before it.
FAR = 1 << 20
ANSWERED = 1 << 63  # beside the digest, which may be 0


class FinishedRequests:
    """The requests whose results are in a file, by number: eight bytes for each."""

    def __init__(self, output: LineOutput | None = None) -> None:
        """Reads a file of results, whose unfinished last line it takes away."""
        self.count = self._met = 0
        self._same_options = False  # as those of the run before: a line and its result have shown it
        self._digests = array("Q")
        self._waiting: dict[int, int] = {}  # answered and not written
        self._where = output.name if output else ""
        for number, line in enumerate(output.lines() if output else (), 1):
            if (found := request_of(line)) is None:
                raise UserError(
                    f"line {number} of {self._where} is not a result of a batch: choose another file with -o"
                )
            self._add(*found)

    def _add(self, index: int, digest: str) -> None:
        if index >= self.count + FAR:
            raise UserError(
                f"{self._where} has a result of request {index}, which cannot have been answered yet"
            )
        self._digests.extend([0] * (index + 1 - len(self._digests)))
        if self._digests[index]:
            raise UserError(f"{self._where} has two results of request {index}: remove one of them")
        self._digests[index] = ANSWERED | int(digest, 16)
        self.count += 1

    def wait(self, index: int, digest: str) -> bool:
        """A result waits to be written; False: it is there."""
        if self.is_written(index) or index in self._waiting:
            return False
        self._waiting[index] = ANSWERED | int(digest, 16)
        return True

    def is_written(self, index: int) -> bool:
        """Whether a request's result is in the file."""
        return index < len(self._digests) and self._digests[index] != 0

    def has(self, ask: Ask) -> bool:
        """Whether a request was answered. UserError: another one has its number."""
        kept = self._digests[ask.index] if self.is_written(ask.index) else self._waiting.get(ask.index)
        if kept and kept != ANSWERED | int(ask.digest, 16):
            raise UserError(
                f"line {ask.line} is not the request whose result is in {self._where}: {self._what_differs}"
            )
        self._met += bool(kept)
        self._same_options |= bool(kept) and not ask.fault  # what is wrong with a line follows from it alone
        return bool(kept)

    @property
    def _what_differs(self) -> str:
        """What keeps a line from having the result that its number has, and what to do."""
        if self._same_options:
            return (
                "it was changed since. Lines that are answered must stay as they were, and new ones come "
                "after all others; or name another file with -o"
            )
        return (
            "--resume needs the lines, the model and the options of that run. Options that say only how the "
            "model runs, such as --ram, -c and --threads, may differ; others, such as -n, --temp, --seed and "
            "--system, may not. Or name another file with -o"
        )

    def check_all_met(self) -> None:
        """At the end of the requests: nothing was answered that is not asked any more."""
        if self._met < self.count + len(self._waiting):
            left = self.count + len(self._waiting) - self._met
            raise UserError(
                f"{self._where} has {counted(left, 'result')} of requests that are no longer in the file"
            )
