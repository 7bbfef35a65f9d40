"""What to expect of a model whose experts are not all in memory, before it is opened."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetrun.prefetch.cached_experts import divided
from hetrun.prefetch.expert_records import Records
from hetrun.prefetch.lookahead import PassOutlook, predict
from hetrun.prefetch.pass_times import PassTimes
from hetrun.system.units import format_bytes

# Where a share s of the experts has slots, tokens find about s ** SKEW of those that they choose there: three
# in four where half have slots. Published traces of real mixtures lie between 67 and 81 % (LRU over half).
SKEW = 0.45
MORE = 4 << 30  # bytes: the plan says what so much more would give
FASTER = 2.0


@dataclass(frozen=True, slots=True)
class TokenForecast:
    """A token, in so much room for experts and with such a disk."""

    records: Records
    room: int
    rate: float  # bytes a second
    compute_s: float  # of a token, with everything in memory
    seen: PassTimes | None = None  # passes of this model, if it has run

    @property
    def slots(self) -> int:
        """How many experts have one."""
        return sum(divided(self.records, self.room))

    @property
    def share(self) -> float:
        """Of all experts."""
        return self.slots / len(self.records.where)

    @property
    def chosen_bytes(self) -> int:
        """Stored bytes of the experts that a token chooses."""
        pairs = zip(self.records.mixtures, self.records.expert_bytes, strict=True)
        return sum(mixture.used * size for mixture, size in pairs)

    @property
    def found(self) -> float:
        """The share of the chosen ones that is there."""
        seen = self.seen.found if self.seen and self.share < 1 else 0.0
        return seen or float(self.share**SKEW)

    @property
    def missing_bytes(self) -> int:
        """What a token reads."""
        return int((1 - self.found) * self.chosen_bytes)

    @property
    def token(self) -> PassOutlook:
        """How it should go."""
        return predict(self.compute_s, self.missing_bytes, self.rate)

    @property
    def tokens_per_s(self) -> float | None:
        """Of an answer."""
        if self.seen is None:
            return self.token.tokens_per_s
        seconds = self.seen.seconds(1, self.missing_bytes, self.rate)
        return 1 / seconds if seconds else None

    @property
    def notes(self) -> tuple[str, ...]:
        """In words, for a plan."""
        alike = predict(self.compute_s, int((1 - self.share) * self.chosen_bytes), self.rate)
        more = replace(self, room=self.room + MORE).token
        faster = replace(self, rate=FASTER * self.rate).token
        token = str(self.token).replace("at most", "about")
        return (
            f"one token at a time: {token}, if {self.found:.0%} of the chosen experts have a slot, as "
            f"in mixtures that were measured; if all are chosen alike: {alike.tokens_per_s:.3g}",
            f"with {format_bytes(MORE)} more: {more.tokens_per_s:.3g} tokens/s, bound by {more.bound}; with "
            f"a disk of {FASTER:.0f} times the speed: {faster.tokens_per_s:.3g}, bound by {faster.bound}",
        )
