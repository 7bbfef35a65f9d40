"""What was promised of speculation, held against what happens here.

    python -m tests.tools.speculation_table                                         the default model
    python -m tests.tools.speculation_table -m 1b-q4_0.gguf --scripted              one of random weights
    python -m tests.tools.speculation_table -m 8b-q4_0.gguf --scripted --ram 2.7G   the same from disk

Each text is written by two processes in turn, one with speculation and one without, on a machine that does
nothing else. A model of random weights says nothing that anybody would: with `--scripted` it computes all
that it always does, and the tokens that are taken are those of a real text, by both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter, strftime
from typing import Any
from unittest.mock import patch

from hetrun import LLM, SamplingParams
from hetrun.api.model_path import model_path
from hetrun.backend import Floats
from hetrun.config import Settings
from hetrun.engine import output_processor
from hetrun.engine.output_processor import Choices
from hetrun.engine.request import ActiveRequest, Drafts
from hetrun.executor.steps import Step
from hetrun.sampling.interface import SampledToken
from hetrun.system.terminal_text import align_columns

ROOT = Path(__file__).parents[2]
CONTEXT = 4096
TOPICS = (
    "a sailor and a whale", "the first railway", "bread", "a quarrel between two painters", "snow in April",
    "why bridges hum", "a lost letter", "the history of glass", "an honest thief", "growing potatoes",
)  # fmt: skip
CHARS = 2400  # of a text that is to be repeated
PAYS_STREAMED, PAYS, COSTS = 2.0, 1.3, 0.98
CLIENTS = 16


@dataclass(frozen=True, slots=True)
class Text:
    """What is asked for, and what comes if that is known beforehand."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Work:
    """Texts to write at once."""

    prompts: tuple[tuple[int, ...], ...]
    scripts: tuple[tuple[int, ...], ...]  # none: the model's own words
    tokens: int
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """What came, how fast (tokens a second behind the prompts), and what became of guesses."""

    tokens: tuple[tuple[int, ...], ...]
    rate: float
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Row:
    """A promise, and what came of it."""

    what: str
    bar: str
    result: str
    met: bool


# --- texts


def repeating() -> list[Text]:
    """Programs with a name changed, and texts to be said again: most of the answer is in the prompt."""
    sources = sorted((ROOT / "hetrun").glob("*.py"), key=lambda p: (-p.stat().st_size, p.name))
    found = []
    for i, path in enumerate(sources[:10]):
        text = path.read_text(encoding="utf-8")[:CHARS]
        if i % 2:
            asked = f"Repeat this text word by word:\n{text}"
            found.append(Text(_chat(asked) + text[:80], text[80:]))
        else:
            asked = f"Write this program again; `self` is to be called `this`.\n```python\n{text}\n```"
            found.append(Text(_chat(asked) + "```python\n", text.replace("self", "this")))
    return found


def free() -> list[Text]:
    """Prose about something, and prose that is not in the prompt."""
    prose = [p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs" / "adr").glob("*.md"))]
    long = sorted(prose, key=len, reverse=True)
    return [
        Text(_chat(f"Write a long text about {topic}."), text[:CHARS])
        for topic, text in zip(TOPICS, long, strict=False)
    ]


def _chat(asked: str) -> str:
    return f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"


# --- the two processes


def serve(asks: Connection, options: Mapping[str, Any]) -> None:
    """Write what is asked for; runs in a process of its own. Scripts are what the model is taken to say."""
    scripts: dict[tuple[int, ...], tuple[int, ...]] = {}

    def together(
        running: Sequence[ActiveRequest], step: Step, drafts: Drafts, logits: Floats
    ) -> Iterator[Choices]:
        if not scripts:
            yield from output_processor.together(running, step, drafts, logits)
            return
        for r in running:
            script, at = scripts[tuple(r.tokens[: r.n_prompt])], len(r.tokens) - r.n_prompt
            rows = 1 + len(drafts.get(r.id, ()))
            yield [SampledToken(script[(at + i) % len(script)]) for i in range(rows)]

    with patch("hetrun.engine.loop.together", together), LLM(**options) as llm:
        asks.send("ready")
        while (work := asks.recv()) is not None:
            scripts.clear()
            scripts.update(zip(work.prompts, work.scripts, strict=False))
            asks.send(_write(llm, work))


def _write(llm: LLM, work: Work) -> Done:
    params = SamplingParams(max_tokens=work.tokens, temperature=work.temperature, seed=7, ignore_eos=True)
    prompts = [list(p) for p in work.prompts]
    if len(prompts) > 1:
        llm.generate(prompts, replace(params, max_tokens=1))  # the prompts are kept: they are not measured
    start = perf_counter()
    found = llm.generate(prompts, params)
    seconds = perf_counter() - start
    return Done(
        tuple(tuple(c.tokens) for c in found),
        found[0].timings.decode_tok_s if len(found) == 1 else len(found) * work.tokens / seconds,
        sum(c.timings.drafted for c in found),
        sum(c.timings.accepted for c in found),
    )


Serve = Callable[[Connection, Mapping[str, Any]], None]


class Apart:
    """A writer in a process of its own."""

    def __init__(self, options: Mapping[str, object], serve: Serve = serve) -> None:
        context = multiprocessing.get_context("spawn")
        self._asks, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, options), daemon=True)
        self._process.start()
        other.close()
        self._asks.recv()

    def ask(self, work: object) -> object:
        """Ask, and wait."""
        self._asks.send(work)
        return self._asks.recv()

    def write(self, work: Work) -> Done:
        """What came of some work."""
        found = self.ask(work)
        assert isinstance(found, Done)
        return found

    def close(self) -> None:
        """It ends."""
        self._asks.send(None)
        self._process.join()


# --- what is held against what


@dataclass(slots=True)
class Table:
    """Both writers, and all that they did."""

    off: Apart
    on: Apart
    ids: Mapping[str, tuple[int, ...]]
    scripted: bool
    samples: dict[str, list[dict[str, Any]]]

    def compare(self, name: str, texts: Sequence[Text], tokens: int, temperature: float, turn: int) -> bool:
        """The same by both, `turn` saying who begins; whether the tokens are the same."""
        prompts = tuple(self.ids[t.prompt] for t in texts)
        scripts = tuple(self.ids[t.answer] for t in texts) if self.scripted else ()
        work = Work(prompts, scripts, tokens, temperature)
        found: dict[str, Done] = {}
        for which in ("off", "on") if turn % 2 else ("on", "off"):
            found[which] = (self.on if which == "on" else self.off).write(work)
        off, on = found["off"], found["on"]
        same = on.tokens == off.tokens
        sample = {"off": off.rate, "on": on.rate, "drafted": on.drafted, "accepted": on.accepted}
        self.samples.setdefault(name, []).append({**sample, "same": same})
        _say(f"{name}: {off.rate:.2f} -> {on.rate:.2f} tokens/s ({on.rate / off.rate:.3f}), "
             f"{on.accepted} of {on.drafted}{'' if same else ', OTHER TOKENS'}")  # fmt: skip
        return same

    def row(self, name: str, bar: float) -> Row:
        """The middle of the ratios."""
        found = self.samples[name]
        ratios = sorted(s["on"] / s["off"] for s in found)
        middle = median(ratios)
        said = f"{middle:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} pairs)"
        return Row(name, f"{bar:g} times", said, middle >= bar)


def table(asked: argparse.Namespace) -> tuple[list[Row], Mapping[str, object]]:
    """Every promise."""
    options = {"model": str(asked.model), "ctx": CONTEXT} | ({"ram": asked.ram} if asked.ram else {})
    texts = {"repeating": repeating(), "not repeating": free()}
    with writers(options, asked.spec) as (off, on):
        ids = tokens_of([t for found in texts.values() for t in found])
        here, rows = Table(off, on, ids, asked.scripted, {}), []
        here.compare("warming up", texts["repeating"][:1], 32, 0.0, 0)
        same = 0
        for turn in range(asked.texts):
            for name, found in texts.items():
                same += here.compare(name, found[turn : turn + 1], asked.tokens, 0.0, turn)
            if not asked.scripted:
                here.compare("not repeating, drawn", texts["not repeating"][turn : turn + 1],
                             asked.tokens, 1.0, turn)  # fmt: skip
        for turn in range(asked.batches):
            mixed = [t for pair in zip(*texts.values(), strict=True) for t in pair][:CLIENTS]
            here.compare(f"{CLIENTS} clients, mixed", mixed, asked.tokens // 4, 0.0, turn)
            alone = (texts["not repeating"] + texts["repeating"])[:CLIENTS]
            here.compare(f"{CLIENTS} clients, most not repeating", alone, asked.tokens // 4, 0.7, turn)
    if not asked.scripted:  # or the tokens are the same whatever is computed
        n, what = 2 * asked.texts, f"greedy tokens, {asked.tokens} of each prompt"
        rows.append(Row(what, "identical", f"{same} of {n}", same == n))
    bars = {"repeating": PAYS_STREAMED if asked.ram else PAYS}
    rows += [here.row(name, bars.get(name, COSTS)) for name in here.samples if name != "warming up"]
    return rows, here.samples


@contextmanager
def writers(options: Mapping[str, object], spec: str) -> Iterator[tuple[Apart, Apart]]:
    """With and without, both there for the whole time."""
    off, on = Apart({**options, "spec": "off"}), Apart({**options, "spec": spec})
    try:
        yield off, on
    finally:
        off.close()
        on.close()


def tokens_of(texts: Sequence[Text]) -> dict[str, tuple[int, ...]]:
    """By the default model's vocabulary: those of random weights have as many tokens, or more."""
    with LLM(ctx=64, spec="off") as llm:
        return {s: tuple(llm.tokenize(s)) for t in texts for s in (t.prompt, t.answer)}


def _say(what: str) -> None:
    print(f"{strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)


def main() -> int:
    """The table; 0 if every promise was kept."""
    parser = argparse.ArgumentParser(description="speculation: what was promised, and what is")
    parser.add_argument("-m", "--model", type=Path, default=None)
    parser.add_argument("--scripted", action="store_true", help="real texts from a model of random weights")
    parser.add_argument("--ram", help="stream what does not fit into so much memory")
    parser.add_argument("--spec", default="auto")
    parser.add_argument("--tokens", type=int, default=512, help="of each text")
    parser.add_argument("--texts", type=int, default=10, help="that repeat their prompt, and that do not")
    parser.add_argument("--batches", type=int, default=3, help=f"rounds of {CLIENTS} clients")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    asked = parser.parse_args()
    asked.model = asked.model or model_path(Settings.resolve(environ={}))
    print(f"load average {os.getloadavg()[0]:.2f}", file=sys.stderr)
    rows, samples = table(asked)
    words = {True: "yes", False: "NO"}
    lines = [["what", "bar", "result", "met"], *([r.what, r.bar, r.result, words[r.met]] for r in rows)]
    print("\n".join(align_columns(lines, left={0, 1, 2, 3})))
    print(f"load average {os.getloadavg()[0]:.2f}")
    if asked.json:
        asked.json.write_text(json.dumps({"rows": [asdict(r) for r in rows], "samples": samples}, indent=1))
    return 0 if all(r.met for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
