"""Pictures at work: the encoder, loaded while pictures come, and the rows that it made of them.

All of it belongs to the engine's thread, but for `cancel`. What it takes is an account of the model's books:
the model gives room back before the encoder is loaded, and cached prompts go first, as everywhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from time import perf_counter
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from hetrun.backend import Floats
from hetrun.backend.picture_encoder import (
    PictureEncoder,
    Pictures as Encoding,
    PictureSetup,
    Piece,
    PromptRows,
)
from hetrun.engine.pictures.marks import LaidPicture, Span, part_name
from hetrun.engine.size_curve import SizeCurve
from hetrun.errors import BudgetError, OptionError
from hetrun.loader.vision import Vision
from hetrun.memory import breakdown
from hetrun.memory.kv.prefix_cache import Prefixes
from hetrun.pictures.picture import Picture
from hetrun.planner.plan import PlanSet
from hetrun.system.units import counted, format_bytes

IDLE_S = 60.0  # without a picture, after which the encoder is given back
MOST_ROWS = 256 << 20  # bytes of rows that are kept, where the budget has so much
MOST_KEYS = 64 << 20  # bytes of pixels of pictures that are laid out and wait to be encoded
MOST_KNOWN = 128  # pictures whose sizes in a prompt are remembered
FIRST_ROW_S = 0.02  # that a row takes, before one was made: a guess on the slow side


@runtime_checkable
class BudgetLender(Protocol):
    """A model that leaves a part of its budget to what encodes pictures."""

    def lend(self, held: int, most: int) -> None:
        """Leave at most `most` bytes to pictures, which hold `held` now. BudgetError if they are in
        use; nothing has changed then."""
        ...

    def streaming(self) -> object: ...

    def rest(self) -> None:
        """Give the system back what sequences that are gone had."""
        ...

    @property
    def plans(self) -> PlanSet:
        """The plans in force."""
        ...


class PicturePartKey(NamedTuple):
    """A part of a picture that was laid out, and is not encoded yet."""

    rows: PromptRows
    picture: Picture


class PictureCounts(NamedTuple):
    """What became of pictures so far."""

    encoded: int = 0
    cached: int = 0  # that need not be encoded
    seconds: float = 0.0  # of encoding


class PictureStore:
    """Lays pictures out and encodes them, each once as far as there is room for what came of it."""

    def __init__(
        self,
        vision: Vision,
        setup: PictureSetup,
        encoding: Encoding,
        decode: Callable[[bytes], Picture],
        model: BudgetLender,
        prefixes: Prefixes | None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`decode` makes pixels of a file, on any thread."""
        self.vision = vision
        self.decode = decode
        self._setup, self._encoding = setup, encoding
        self._model, self._prefixes = model, prefixes
        self._clock = clock
        self._encoder: PictureEncoder | None = None
        self._used = 0.0  # when the encoder was needed last
        self._whose = _identity(setup)
        self._known: OrderedDict[bytes, LaidPicture] = OrderedDict()  # by the digest of a file
        self._keys: dict[bytes, PicturePartKey] = {}  # by name: laid out and not yet encoded
        self._rows: OrderedDict[bytes, Floats] = OrderedDict()  # by name, the last used last
        self._held = 0  # bytes of the encoder, while it is loaded
        self._transient = 0  # bytes that the picture takes that is laid out or encoded now
        self._lent = 0, 0
        self._seconds = SizeCurve()  # of encoding, by rows
        self.counted = PictureCounts()

    # --- what stands for a picture

    def known(self, file: bytes) -> LaidPicture | None:
        """A picture that was laid out before, by its file; from any thread."""
        return self._known.get(sha256(file).digest())

    def reserve(self) -> None:
        """Have room for the encoder, also for the process that tries it."""
        if self._encoder is None:
            self._held = self.vision.nbytes
            if not self._make_room():
                raise self._no_room_for(None)

    def try_out(self) -> None:
        """Try the encoder in a process of its own, where that was not done; from any thread."""
        self._encoding.try_out(self._setup)

    def open(self) -> None:
        """Load the encoder, so that what is wrong with it is told before a picture is decoded."""
        self._ready(None)

    def lay_out(self, file: bytes, picture: Picture) -> LaidPicture:
        """What stands for a picture in a prompt."""
        name = sha256(self._whose + picture.digest).digest()
        pieces = self._laid_out(name, picture)
        seen = LaidPicture(
            name, tuple(replace(p, key=None) if isinstance(p, PromptRows) else p for p in pieces)
        )
        while len(self._known) >= MOST_KNOWN:
            self._known.popitem(last=False)
        self._known[sha256(file).digest()] = seen
        return seen

    def _laid_out(self, name: bytes, picture: Picture) -> tuple[Piece, ...]:
        encoder = self._ready(picture)
        pieces = encoder.lay_out(picture)
        self._check(pieces)
        held = {id(key.picture): len(key.picture.rgb) for key in self._keys.values()}
        if not held or len(picture.rgb) + sum(held.values()) <= MOST_KEYS:
            for part, piece in enumerate(pieces):
                if isinstance(piece, PromptRows):
                    self._keys[name + part.to_bytes(4, "little")] = PicturePartKey(piece, picture)
        return pieces

    def _check(self, pieces: tuple[Piece, ...]) -> None:
        """Rows that see each other must be in one pass."""
        whole = max((p.count for p in pieces if isinstance(p, PromptRows) and p.whole), default=0)
        if whole > (most := self._model.plans.ubatch):
            raise OptionError(
                f"a picture of this size takes {counted(whole, 'token')}, all of which this model needs in "
                f"one pass, and a pass takes {most}: use --ubatch {whole} or more"
            )

    # --- rows

    def has(self, span: Span) -> bool:
        """Whether the rows of a picture are there."""
        return span.name in self._rows

    def rows(self, span: Span) -> Floats:
        """The rows of a picture, which must be there."""
        self._rows.move_to_end(span.name)
        return self._rows[span.name]

    def rows_to_encode(self, pictures: Sequence[LaidPicture]) -> list[int]:
        """How many rows each part of these has that is not encoded yet."""
        parts = [(part_name(seen, i), piece) for seen in pictures for i, piece in enumerate(seen.pieces)]
        return [
            piece.count for name, piece in parts if isinstance(piece, PromptRows) and name not in self._rows
        ]

    def expected_s(self, rows: int) -> float:
        """About how long encoding this number of rows takes."""
        return self._seconds.at(rows) or FIRST_ROW_S * rows

    def encode(self, span: Span, file: bytes) -> None:
        """Make the rows of a picture, or of a part of it; Cancelled after `cancel`."""
        key = self._keys.get(span.name) or self._read_again(span, file)
        encoder = self._ready(key.picture)
        start = self._clock()
        made = np.ascontiguousarray(encoder.encode(key.rows), np.float32)
        seconds = self._clock() - start
        self._used = self._clock()
        self._seconds.observe(span.rows.count, seconds)
        encoded, cached, before = self.counted
        self.counted = PictureCounts(encoded + 1, cached, before + seconds)
        self._keys.pop(span.name, None)
        self._held, self._transient = encoder.nbytes, 0
        self._keep(span.name, made)

    def _read_again(self, span: Span, file: bytes) -> PicturePartKey:
        """A part as it was laid out, of a picture whose pixels are not kept until it is encoded."""
        picture = self.decode(file)
        rows = self._ready(picture).lay_out(picture)[span.part]
        assert isinstance(rows, PromptRows)
        return PicturePartKey(rows, picture)

    def _keep(self, name: bytes, made: Floats) -> None:
        """Keep rows; of others those that were not used for longest go where there is no room for all."""
        while self._rows and self._rows_bytes + made.nbytes > MOST_ROWS:
            self._rows.popitem(last=False)
        self._rows[name] = made
        while not self._lend():
            if len(self._rows) == 1:  # it is about to be used, and then it goes
                return
            self._rows.popitem(last=False)

    @property
    def _rows_bytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows.values())

    def reused(self, n: int) -> None:
        """`n` pictures, or parts of some, need not be encoded for a request."""
        encoded, cached, seconds = self.counted
        self.counted = PictureCounts(encoded, cached + n, seconds)

    # --- the encoder

    def _ready(self, picture: Picture | None) -> PictureEncoder:
        """The encoder, with room for a picture."""
        encoder, before = self._encoder, self._transient
        self._transient = 0 if picture is None else self._working(picture)
        self._held = self.vision.nbytes if encoder is None else encoder.nbytes
        if not self._make_room():
            raise self._no_room_for(picture, before)
        if encoder is None:
            try:
                encoder = self._encoder = self._encoding.open(self._setup)
            finally:
                self._held = 0 if encoder is None else encoder.nbytes
                self._lend()
        self._used = self._clock()
        return encoder

    def _working(self, picture: Picture) -> int:
        """What a picture takes while it is encoded, with its pixels where they are not kept."""
        width, height = picture.width, picture.height
        held = any(key.picture is picture for key in self._keys.values())
        pixels = 0 if held else len(picture.rgb)
        if self._encoder is None:
            return self._encoding.bytes_for(self._setup, width, height) + pixels
        return self._encoder.bytes_for(width, height) + pixels

    def _no_room_for(self, picture: Picture | None, before: int = 0) -> BudgetError:
        """The error; what was to be lent is not."""
        needed, self._transient = self._needed, before
        if self._encoder is None:
            self._held = 0
        self._lend()
        if picture is None:
            what, mend = "what encodes pictures", "allow more with --ram"
        else:
            what = f"a picture of {picture.width} x {picture.height} and what encodes it"
            mend = "send a smaller picture, or allow more with --ram"
        size = format_bytes(needed)
        return BudgetError(f"there is no room for {what}: {size} are needed beside the model; {mend}")

    @property
    def _needed(self) -> int:
        """All that pictures take, or may take while one is encoded."""
        pixels = {id(key.picture): len(key.picture.rgb) for key in self._keys.values()}
        return self._held + self._transient + sum(pixels.values()) + self._rows_bytes

    def _make_room(self) -> bool:
        """Have the model leave as much as is needed: kept rows go first, then cached prompts."""
        limit = self._model.plans.memory.get(breakdown.LIMIT)
        if limit is not None and self._needed - self._rows_bytes > limit:
            return False  # whatever went would go in vain
        while not self._lend():
            if self._rows:
                self._rows.popitem(last=False)
            elif self._prefixes is None or not self._prefixes.drop_one():
                return False
            else:
                self._model.rest()
        return True

    def _lend(self) -> bool:
        """Whether the model leaves as much as is needed."""
        most = self._needed
        loaded = self._held if self._encoder else 0
        lent = most - self._transient - (self._held - loaded), most
        if lent != self._lent:
            try:
                self._model.lend(*lent)
            except BudgetError:
                return False
            self._lent = lent
        return True

    def rest(self) -> float | None:
        """Give the encoder back where no picture came for a while; else in how many seconds that is."""
        if self._encoder is None:
            if self._held:  # for one that could not be loaded
                self._held = 0
                self._lend()
            return None
        left = self._used + IDLE_S - self._clock()
        if left > 0:
            return left
        self._give_back()
        self._lend()
        return None

    def _give_back(self) -> None:
        """What was laid out is of no use to another encoder."""
        self._keys.clear()
        encoder, self._encoder = self._encoder, None
        self._held = self._transient = 0
        if encoder:
            encoder.close()

    def cancel(self) -> None:
        """End the picture that is being encoded; from any thread."""
        if encoder := self._encoder:
            encoder.cancel()

    def rearm(self) -> None:
        """Let the next picture be encoded."""
        if encoder := self._encoder:
            encoder.rearm()

    def close(self) -> None:
        """Give everything back."""
        self._give_back()
        self._rows.clear()


def _identity(setup: PictureSetup) -> bytes:
    """What encodes, and to how many rows at most: those of another tower or size are others."""
    vision = setup.vision
    return repr((vision.family, vision.width, vision.nbytes, vision.stamp, setup.most_tokens)).encode()
