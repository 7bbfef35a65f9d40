"""What an earlier run has answered already."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator

from hetrun.errors import UserError
from hetrun.system.units import counted
from hetrun.tools.batch.output_file import LineOutput
from hetrun.tools.batch.request_lines import Ask
from hetrun.tools.batch.result_lines import is_beginning, request_of

# A result is written at most this many requests before one that came earlier: a number that is further away
# is no request's, and no reason to take memory for all those before it.
FAR = 1 << 20
_TORN = re.compile(rb"[\0-\x09\x0b-\x1f]")  # what no line of ours holds
ANSWERED = 1 << 63  # beside the digest, which may be 0


def _is_torn(line: bytes) -> bool:
    """Whether a power cut has made this of lines: pages that were not on the disk hold zeros, or anything."""
    if is_beginning(line):
        return True
    try:
        line.decode()
    except UnicodeDecodeError:
        return True
    return _TORN.search(line) is not None


class FinishedRequests:
    """The requests whose results are in a file, by number: eight bytes for each."""

    def __init__(self, output: LineOutput | None = None) -> None:
        """Reads a file of results, whose unfinished last line it takes away."""
        self.count = self._met = 0
        self._same_options = False  # as those of the run before: a line and its result have shown it
        self._digests = array("Q")
        self._waiting: dict[int, int] = {}  # answered and not written
        self._where = output.name if output else ""
        self._output = output
        self._torn_at: int | None = None  # bytes of the file before what a power cut has left of lines
        self._after: list[bytes] = []  # results after that
        if output:
            self._read(output)

    def _read(self, output: LineOutput) -> None:
        size, torn, zeros = 0, 0, True
        for number, line in enumerate(output.lines(), 1):
            if found := request_of(line):
                self._after.append(line) if torn else self._add(*found)
            elif torn or _is_torn(line):
                torn, zeros = torn or number, zeros and not line.strip(b"\0\n")
            else:
                raise self._foreign(number)
            size += 0 if torn else len(line)
        # Nothing is taken away from a file that shows no sign of being ours.
        if not (self.count or self._after) and not (zeros and is_beginning(output.rest)):
            raise self._foreign(torn or 1)
        if torn:
            self._torn_at = size
        elif output.rest:
            output.cut(size)
            output.sync()  # or a power cut could leave that half line before what is written now

    def _foreign(self, number: int) -> UserError:
        return UserError(
            f"line {number} of {self._where} is not a result of a batch: choose another file with -o"
        )

    def take_after_damage(self) -> Iterator[tuple[int, bytes]]:
        """Results that lie after what a power cut has left of others, with the numbers of their requests:
        they have to be written again, in their turn. At the end the file has what is before the damage."""
        for line in self._after:
            if (found := request_of(line)) and self.wait(*found):
                yield found[0], line
        if self._output and self._torn_at is not None:
            self._output.cut(self._torn_at)
            self._output.sync()
        self._after, self._torn_at = [], None

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
