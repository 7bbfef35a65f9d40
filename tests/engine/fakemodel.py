"""A model with scripted logits and a tokenizer of bytes, for tests of the engine.

Each sequence answers with the script that its prompt names: the prompt "abc" plays `scripts["a"]`, byte by
byte, and ends. What the model was given is recorded; `block` keeps a step in the model until it is cancelled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetrun.backend import Floats
from hetrun.client.events import Message, Streaming
from hetrun.client.queries import LayerPlace
from hetrun.engine.input_processor import Renderer
from hetrun.engine.loaded_model import LoadedModel
from hetrun.errors import BudgetError, Cancelled
from hetrun.executor.loading.memory_estimates import MAX_SEQUENCES
from hetrun.executor.stats import Stats
from hetrun.executor.steps import Between, Step
from hetrun.planner.plan import PlanSet
from hetrun.text.tokenizer import Tokenizer

END = 256
N_VOCAB = 257


class Bytes:
    """A token for each byte, and one that ends a text."""

    n_tokens = N_VOCAB
    bos: int | None = None
    eos: int | None = END
    add_bos = False
    cuts_at_spaces = False

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return b"" if token == END else bytes([token])

    def pieces(self) -> list[bytes]:
        return [self.piece(token) for token in range(self.n_tokens)]

    def is_control(self, token: int) -> bool:
        return token >= 256

    def is_end(self, token: int) -> bool:
        return token == END

    def close(self) -> None:
        """Nothing to give back."""


@dataclass
class FakeModel:
    """The `Model` of the engine: sequences are lists of tokens."""

    scripts: Mapping[str, bytes] = field(default_factory=dict)
    ubatch: int = 64
    context: int = 64
    before: Callable[[FakeModel, Step], object] = lambda model, step: None
    n_vocab: int = N_VOCAB
    width: int = 4
    max_sequences: int = MAX_SEQUENCES
    segment: str = "the script"
    stands_aside: bool = False
    checkpoint_every: int = 0
    alike: int = 32
    ram: int | None = None  # a token takes a byte; None: there is room for all

    @property
    def hidden(self) -> Floats:
        return np.empty((0, self.width), np.float32)

    @property
    def places(self) -> tuple[LayerPlace, ...]:
        return ()

    @property
    def crossed(self) -> Mapping[str, int]:
        return {}

    @property
    def reason(self) -> str:
        return self.plans.reason

    @property
    def in_use(self) -> Mapping[str, int]:
        return {}

    def __post_init__(self) -> None:
        self.plans = PlanSet({}, self.ubatch, "a test")
        self.stats = Stats()
        self.native_seconds = 0.0
        self.texts: dict[int, list[int]] = {}
        self.prompts: dict[int, int] = {}
        self.steps: list[list[tuple[int, int]]] = []  # of each step: sequence and number of tokens
        self.freed: list[int] = []
        self.threads: set[int] = set()
        self.closed = threading.Event()
        self.rests = 0
        self.touched = 0  # tokens that got memory, which was not given back since
        self.from_disk: Streaming | None = None
        self.refused: list[int] = []  # budgets
        self.inside = threading.Event()  # a step waits in `block`
        self.cancelled = threading.Event()

    # --- what the engine calls

    def step(self, step: Step, between: Between | None = None) -> np.ndarray:
        self.threads.add(threading.get_ident())
        self.steps.append([(c.seq, len(c.tokens)) for c in step.chunks])
        self.before(self, step)
        if self.cancelled.is_set():
            raise Cancelled("stopped")
        rows = []
        self.touched = max(self.touched, self.held + step.tokens)
        for c in step.chunks:
            before = len(self.texts[c.seq])
            self.texts[c.seq] += c.tokens.tolist()
            row = self._hidden if step.hidden else self._logits
            rows += [row(c.seq, before + int(i) + 1) for i in c.wanted]
        return np.array(rows, np.float32).reshape(-1, self.width if step.hidden else self.n_vocab)

    def alloc(self) -> int:
        seq = len(self.prompts)
        self.texts[seq] = []
        self.prompts[seq] = 0
        return seq

    def free(self, seq: int) -> None:
        del self.texts[seq]
        self.freed.append(seq)

    def fork(self, seq: int, n: int | None = None) -> int:
        new = self.alloc()
        self.texts[new] = self.texts[seq][:n]
        return new

    def fits(self, chunks: Sequence[tuple[int, int]]) -> bool:
        return self.ram is None or self.held + sum(n for _, n in chunks) <= self.ram

    def shareable(self, seq: int, n: int) -> int:
        return n

    def predict(self, chunks: Sequence[tuple[int, float]]) -> float | None:
        return None

    def truncate(self, seq: int, n: int) -> int:
        del self.texts[seq][n:]
        return n

    def thin(self, over: Collection[int] = ()) -> bool:
        return False

    def length(self, seq: int) -> int:
        return len(self.texts[seq])

    def cancel(self) -> None:
        self.cancelled.set()

    def expect(self, tokens: int, between: Between | None = None) -> None:
        """Nothing to prepare."""

    def tend(self, idle: bool = False, between: Between | None = None) -> None:
        """Nothing to look after."""

    def rest(self) -> None:
        self.rests += 1
        self.touched = self.held

    def rearm(self) -> None:
        self.cancelled.clear()

    def set_ram(self, nbytes: int) -> None:
        self.threads.add(threading.get_ident())
        least = max(self.touched, self.context)
        if nbytes < least:
            self.refused.append(nbytes)
            raise BudgetError(f"{nbytes} bytes are too little: {least} would do")
        self.ram = nbytes

    def bill(self) -> Mapping[str, int]:
        return {"limit": self.ram or 0}

    def streaming(self) -> Streaming | None:
        return self.from_disk

    def close(self) -> None:
        self.closed.set()

    # --- what tests use

    def block(self, step: Step) -> None:
        """Wait inside the step until it is cancelled."""
        self.inside.set()
        assert self.cancelled.wait(30), "no one cancelled the step"
        raise Cancelled("stopped")

    @property
    def held(self) -> int:
        """Tokens of all sequences."""
        return sum(map(len, self.texts.values()))

    def _hidden(self, seq: int, length: int) -> np.ndarray:
        """The last token, the one before it, and how many there are."""
        text = self.texts[seq][:length]
        return np.array([text[-1], text[-2] if length > 1 else 0, length, 1], np.float32)

    def _logits(self, seq: int, length: int) -> np.ndarray:
        """The script's next byte has the highest logit; how far it is counts from the prompt's end."""
        text, logits = self.texts[seq][:length], np.zeros(self.n_vocab, np.float32)
        if not self.prompts[seq] and length < len(
            self.texts[seq]
        ):  # inside the prompt: what came before again
            logits[text[-1]] = 10
            return logits
        if not self.prompts[seq]:
            self.prompts[seq] = len(text)
        script = self.scripts.get(chr(text[0]), b"")
        at = len(text) - self.prompts[seq]
        logits[script[at] if at < len(script) else END] = 10
        return logits


def joined(messages: tuple[Message, ...], options: Mapping[str, object]) -> str:
    """A template that writes the contents, one behind the other."""
    return "".join(str(m["content"]) for m in messages)


def loaded(
    model: FakeModel,
    tokenizer: bool = True,
    temperature: float | None = 0.0,
    render: Renderer = joined,
    most_waiting: int | None = None,
) -> LoadedModel:
    """What an engine with this model runs."""
    bytes_ = Tokenizer(Bytes()) if tokenizer else None
    return LoadedModel(model, bytes_, render, temperature, most_waiting=most_waiting)
