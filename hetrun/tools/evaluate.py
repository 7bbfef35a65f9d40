"""`hetrun eval`: how well a model predicts a text as it runs here, and how close that is to the yardstick.

The yardstick is the same file computed in float32 by the reference backend, or llama.cpp. Logits come in
pieces and are compared piece by piece in float64: a whole matrix of them takes gigabytes.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetrun.api.local_model import LocalModel
from hetrun.api.model_path import model_path
from hetrun.backend import Floats
from hetrun.config import Settings
from hetrun.engine.loaded_model import LoadedModel
from hetrun.errors import OptionError, UserError
from hetrun.executor.stats import Stats
from hetrun.executor.steps import Chunk, Step
from hetrun.loader.architectures import build_graph, is_known
from hetrun.loader.open_model import open_model
from hetrun.system.files import read_text
from hetrun.system.terminal_text import align_columns
from hetrun.tools.bench.hetrun_side import open_llm
from hetrun.tools.bench.peer import Peer, check_peer

Doubles = NDArray[np.float64]

REFERENCE = "reference"
AGAINST = (REFERENCE, "llama.cpp")
IN_WORDS = {REFERENCE: "the same file, computed in float32"}
TOKENS = 2048
MOST_TEXT = 64 << 20  # bytes of a text
SHORT = 256  # tokens
FEW_ROWS = 32  # compared at once: some tens of megabytes in float64
MANY_ROWS = 512  # computed at once, where the model's own step is not larger


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """What `hetrun eval` was asked for."""

    file: Path
    against: str = REFERENCE
    tokens: int = TOKENS
    json: bool = False
    vs: str | None = None


@dataclass(frozen=True, slots=True)
class Closeness:
    """How far the predictions of one run are from another's, over all tokens."""

    mean_kl: float
    p99_kl: float
    top1: float  # where both think the same token the likeliest


@dataclass(frozen=True, slots=True)
class PeerReport:
    """The same of another program, held against the same yardstick."""

    name: str
    ppl: float
    mean_kl: float
    p99_kl: float
    top1: float


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The result for a text."""

    tokens: int
    ppl: float
    against: str
    mean_kl: float
    p99_kl: float
    top1: float
    ubatch: int  # tokens of a pass, on both sides
    plan: str  # who ran the passes
    vs: PeerReport | None = None

    @property
    def ratio(self) -> float | None:
        """Our mean KL in the other program's: below 1 is closer to the yardstick."""
        return self.mean_kl / self.vs.mean_kl if self.vs and self.vs.mean_kl else None

    def to_json(self) -> dict[str, Any]:
        """For `eval --json`."""
        return asdict(self) | {"ratio": self.ratio}

    def to_text(self) -> str:
        """For people."""
        rows = [
            ("tokens", str(self.tokens)),
            ("passes", f"{_tokens(self.ubatch)}, by {self.plan}"),
            ("against", IN_WORDS.get(self.against, self.against)),
            ("perplexity", f"{self.ppl:.4f}", f"{self.vs.ppl:.4f}" if self.vs else ""),
            ("mean KL", f"{self.mean_kl:.6f}", f"{self.vs.mean_kl:.6f}" if self.vs else ""),
            ("99 % of KL below", f"{self.p99_kl:.6f}", f"{self.vs.p99_kl:.6f}" if self.vs else ""),
            ("same best token", f"{self.top1:.2%}", f"{self.vs.top1:.2%}" if self.vs else ""),
        ]
        if self.vs:
            rows.insert(3, ("", "hetrun", self.vs.name))
        if self.ratio is not None:
            rows.append(("ratio of mean KL", f"{self.ratio:.3f}", ""))
        return "\n".join(align_columns(rows, least=(16, 10)))


def _tokens(ubatch: int) -> str:
    return "1 token each" if ubatch == 1 else f"{ubatch} tokens each"


def main(settings: Settings, options: EvalOptions) -> None:
    """Evaluate a text and print what came out."""
    if options.against not in AGAINST:
        raise OptionError(f"--against must be one of {', '.join(AGAINST)}, not {options.against!r}")
    if options.tokens < 2:
        raise OptionError(f"--tokens must be 2 or more, not {options.tokens}")
    if options.vs is not None and options.against != REFERENCE:
        raise OptionError("--vs compares both with the float32 model: leave out --against")
    try:
        text = read_text(options.file, MOST_TEXT)
    except ValueError as error:
        raise UserError(f"{options.file}: {error}; give a text file with -f") from None
    report = evaluate_settings(settings, text, options.against, options.tokens, options.vs)
    print(json.dumps(report.to_json(), indent=2) if options.json else report.to_text())


def evaluate(
    path: str | Path | None,
    text: str,
    against: str = REFERENCE,
    tokens: int = TOKENS,
    vs: str | None = None,
    **options: Any,  # noqa: ANN401 - those of `LocalModel`: ubatch, backends, kv_type, ...
) -> EvaluationReport:
    """Run the first tokens of a text through a model, and through another program (`vs`)."""
    settings = Settings.resolve(model=None if path is None else str(path), **options)
    return evaluate_settings(settings, text, against, tokens, vs)


def evaluate_settings(
    settings: Settings, text: str, against: str, tokens: int, vs: str | None = None
) -> EvaluationReport:
    """The same with settings that were resolved before."""
    for name in {against, vs} - {REFERENCE, None}:
        check_peer(str(name), model_path(settings))
    # What pays in the long run takes longer to bring in than a short text to read.
    with open_llm(settings, eager=tokens > SHORT) as llm:
        ids = llm.tokenize(text)[: min(tokens, llm.info.context)]
        if len(ids) < 2:
            raise UserError("the text has fewer than 2 tokens: there is nothing to predict")
        context, ubatch = llm.info.context, min(llm.plan.ubatch, len(ids))
        sources = [logits(llm, ids), oracle_logits(settings, against, ids, context)]
        if vs is not None:
            sources.append(peer_logits(settings, ids, context, ubatch))
        judged = [Judgement(ids) for _ in sources[1:]]
        llm.call(lambda loaded: loaded.model.stats.reset())
        # Closed here: where one fails, the other still holds a sequence of a model that is about to close.
        with ExitStack() as stack:
            for source in sources:
                stack.enter_context(closing(source))
            for ours, oracle, *others in rows_of_all(*sources):
                for one, rows in zip(judged, (ours, *others), strict=True):
                    one.add(oracle, rows)
        plan = ran(llm.stats)
    ppl, close = judged[0].result()
    other = None
    if vs is not None:
        their_ppl, theirs = judged[1].result()
        other = PeerReport(vs, their_ppl, theirs.mean_kl, theirs.p99_kl, theirs.top1)
    numbers = close.mean_kl, close.p99_kl, close.top1
    return EvaluationReport(len(ids), ppl, against, *numbers, ubatch=ubatch, plan=plan, vs=other)


def ran(stats: Stats) -> str:
    """Which backends ran passes, those first that ran longest."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for key, record in stats:
        seconds[key.backend] += record.seconds
    return " + ".join(name for name in sorted(seconds, key=lambda name: -seconds[name]))


def peer_logits(
    settings: Settings, tokens: Sequence[int], context: int, ubatch: int | None = None
) -> Generator[Floats]:
    """llama.cpp's logits, piece by piece, of passes of `ubatch` tokens; None: as many as it likes."""
    path = model_path(settings)
    with Peer(path) as peer:
        room = least_context(path, len(tokens), context)
        yield from peer.logits(tokens, room) if ubatch is None else peer.logits(tokens, room, ubatch)


def oracle_logits(settings: Settings, against: str, tokens: Sequence[int], context: int) -> Generator[Floats]:
    """The logits to compare with, piece by piece, of the model that one with so long a context is."""
    if against != REFERENCE:
        yield from peer_logits(settings, tokens, context)
        return
    path = model_path(settings)
    context = least_context(path, len(tokens), context)
    # With one backend there is nothing to choose, and measuring it would take longer than the text.
    with LocalModel(path, backends=[REFERENCE], kv_type="f32", ctx=context, planner="static") as llm:
        yield from logits(llm, tokens)


def least_context(path: Path, tokens: int, context: int) -> int:
    """The shortest context that holds the tokens and makes the same model as a longer one: LongRoPE turns all
    tokens otherwise where sequences may become longer than in training."""
    source = open_model(path)
    if not is_known(source):
        return tokens
    graph = build_graph(source, context)
    shorter = range(tokens, context)
    return tokens + bisect_left(shorter, True, key=lambda ctx: build_graph(source, ctx) == graph)


def logits(llm: LocalModel, tokens: Sequence[int]) -> Generator[Floats]:
    """The logits behind each token of a text, piece by piece, cut where the model itself cuts its steps."""
    ubatch = llm.plan.ubatch
    size = max(ubatch, MANY_ROWS // ubatch * ubatch)
    seq = llm.call(lambda loaded: loaded.model.alloc())
    try:
        for a in range(0, len(tokens), size):
            ids = np.asarray(tokens[a : a + size], np.int64)
            yield llm.call(partial(_step, seq=seq, ids=ids))
    finally:
        llm.call(lambda loaded: loaded.model.free(seq))


def _step(loaded: LoadedModel, seq: int, ids: NDArray[np.int64]) -> Floats:
    return loaded.model.step(Step((Chunk(seq, ids, np.arange(len(ids))),))).copy()


def rows_of_all(*matrices: Iterable[Floats]) -> Iterator[tuple[Floats, ...]]:
    """The same few rows of matrices that come in pieces of whatever size."""
    sources = [iter(m) for m in matrices]
    left: list[Floats | None] = [None] * len(sources)
    while True:
        left = [
            rows if rows is not None and len(rows) else next(source, None)
            for rows, source in zip(left, sources, strict=True)
        ]
        there = [rows for rows in left if rows is not None]
        if not there:
            return
        if len(there) < len(left):
            raise ValueError("one of them has more rows than the other")
        n = min(FEW_ROWS, *map(len, there))
        yield tuple(rows[:n] for rows in there)
        left = [rows[n:] for rows in there]


def log_softmax(rows: Floats) -> Doubles:
    """Log-probabilities in float64."""
    wide = rows.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


class Perplexity:
    """How surprised a model is by the tokens of a text; rows are added in order."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = np.asarray(tokens, np.int64)
        self._seen = 0
        self._surprise = 0.0

    def add(self, rows: Floats) -> None:
        """The logits behind the next tokens. The last token of all predicts nothing that is known."""
        following = self._tokens[self._seen + 1 : self._seen + 1 + len(rows)]
        self._seen += len(rows)
        logp = log_softmax(rows[: len(following)])
        self._surprise -= float(logp[np.arange(len(following)), following].sum())

    def result(self) -> float:
        """e to the mean surprise."""
        if self._seen != len(self._tokens):
            raise ValueError(f"{self._seen} rows of logits for {len(self._tokens)} tokens")
        return float(np.exp(self._surprise / (len(self._tokens) - 1)))


class LogitComparison:
    """Collects KL(oracle || other) and agreement row by row."""

    def __init__(self) -> None:
        self._kl: list[Doubles] = []
        self._agree = 0

    def add(self, oracle: Floats, other: Floats) -> None:
        """The same rows of both."""
        p, q = log_softmax(oracle), log_softmax(other)
        self._agree += int(np.count_nonzero(oracle.argmax(axis=-1) == other.argmax(axis=-1)))
        q -= p
        self._kl.append(-np.einsum("ij,ij->i", np.exp(p, out=p), q))

    def result(self) -> Closeness:
        """Over all rows. Rounding can leave a KL a little below 0; the smallest that there is, is 0."""
        kl = np.maximum(np.concatenate(self._kl), 0.0)
        return Closeness(float(kl.mean()), float(np.quantile(kl, 0.99)), self._agree / len(kl))


class Judgement:
    """All that is said of one program's predictions."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._perplexity, self._closeness = Perplexity(tokens), LogitComparison()

    def add(self, oracle: Floats, rows: Floats) -> None:
        """The next rows, and the yardstick's."""
        self._perplexity.add(rows)
        self._closeness.add(oracle, rows)

    def result(self) -> tuple[float, Closeness]:
        """Perplexity, and how close it is to the yardstick."""
        return self._perplexity.result(), self._closeness.result()


def compare(oracle: Iterable[Floats], other: Iterable[Floats]) -> Closeness:
    """How close the second is to the first."""
    comparison = LogitComparison()
    for a, b in rows_of_all(oracle, other):
        comparison.add(a, b)
    return comparison.result()


def perplexity(logits: Iterable[Floats], tokens: Sequence[int]) -> float:
    """Of a text, from the logits behind each of its tokens, in pieces."""
    found = Perplexity(tokens)
    for piece in logits:
        for a in range(0, len(piece), FEW_ROWS):
            found.add(piece[a : a + FEW_ROWS])
    return found.result()
