"""The machine in lines for the pane at the right: plain facts in, text out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from textual.content import Content

from hetrun.client import ChatClient
from hetrun.errors import HetrunError
from hetrun.layermap import LayerPlace
from hetrun.questions import EngineState, Layers, PlanNow, State
from hetrun.visible import visible

# One colour for a backend wherever it is named; a terminal's theme says what they look like.
COLOURS = ("$success", "$primary", "$warning", "$accent", "$secondary", "$error")
BACKENDS = ("llamacpp", "amx", "cuda", "reference", "libllama")  # their colours do not depend on the plan
STREAMED = "$warning-darken-1"
BLOCKS = " ▁▂▃▄▅▆▇█"
SAMPLES = 60  # of a plot: half a minute of answers
MOST_REASONS = 20


@dataclass
class Facts:
    """What is known of the machine by now; written by the screen, read by `draw`."""

    model: str = ""
    context: int = 0
    used: int = 0  # tokens of the conversation
    state: EngineState | None = None
    layers: Sequence[LayerPlace] = ()
    threads: Mapping[str, int] = field(default_factory=dict)  # for one token, and for many
    decode: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # tokens/s
    prefill: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    first_token_s: float = 0.0
    cached: int = 0  # tokens of the last prompt that were not computed again
    prompt: int = 0  # and all of them
    reasons: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=MOST_REASONS))  # time, why
    why_not: str = ""  # nothing is known, and why


async def look(facts: Facts, client: ChatClient) -> None:
    """Ask the engine how it is; the map is asked for again when the plan has changed."""
    try:
        state = await client.ask(State())
        before = facts.state
        if before is None or state.reason != before.reason or state.streaming:
            facts.layers = await client.ask(Layers())
            facts.threads = _threads(await client.ask(PlanNow()))
        if state.reason and (not facts.reasons or facts.reasons[-1][1] != state.reason):
            now = datetime.now().astimezone().strftime("%H:%M:%S")
            facts.reasons.append((now, state.reason))
        facts.state, facts.why_not = state, ""
    except HetrunError as error:
        facts.why_not = str(error)


def _threads(plan: Mapping[str, object]) -> dict[str, int]:
    """Of the plans for one token and for many."""
    plans = plan.get("plans")
    if not isinstance(plans, Sequence) or not plans:
        return {}
    found = {}
    for what, one in (("decode", plans[0]), ("prefill", plans[-1])):
        if isinstance(one, Mapping) and isinstance(threads := one.get("threads"), int):
            found[what] = threads
    return found


def draw(facts: Facts, width: int) -> Content:
    """Everything, in lines of so many cells."""
    if facts.why_not:
        return Content(visible(facts.why_not))
    lines: list[Content] = []
    for part in (_layers, _rates, _context, _memory, _disk, _queue, _reasons):
        if found := part(facts, width):
            lines += [*found, Content("")]
    return Content("\n").join(lines[:-1]) if lines else Content.styled("waiting for the engine", "dim")


# --- parts


def _layers(facts: Facts, width: int) -> list[Content]:
    """A cell for each layer; the lower row for one token, the upper for many."""
    if not facts.layers:
        return []
    names = sorted({name for layer in facts.layers for name in (*layer.decode, *layer.prefill)}, key=_rank)
    lines = [_head("layers", f"{len(facts.layers)}")]
    for what, of in (("prefill", "prefill"), ("decode", "decode")):
        threads = facts.threads.get(what, 0)
        row = Content.assemble(*[_cell(getattr(layer, of), layer, names) for layer in facts.layers])
        note = f" {threads} thread{'s' * (threads > 1)}" if threads else ""
        lines.append(Content.assemble(f"{what:<8}", (note, "dim")))
        lines += [row[at : at + width] for at in range(0, len(row), width)]
    key = [Content.assemble(("█", colour_of(name)), f" {name}  ") for name in names]
    if any(layer.streamed for layer in facts.layers):
        key.append(Content.assemble(("▒", STREAMED), " from disk"))
    lines.append(Content("").join(key))
    return lines


def _cell(runs: Mapping[str, int], layer: LayerPlace, names: Sequence[str]) -> tuple[str, str]:
    if layer.streamed:
        share = layer.streamed / max(layer.nbytes, 1)
        return ("▓" if share < 0.34 else "▒" if share < 0.67 else "░", STREAMED)
    if not runs:
        return ("·", "dim")
    most = max(runs, key=lambda name: runs[name])
    return ("█" if len(runs) == 1 else "▌", colour_of(most))


def colour_of(backend: str) -> str:
    """A backend's colour."""
    return COLOURS[_rank(backend)[0] % len(COLOURS)]


def _rank(backend: str) -> tuple[int, str]:
    plain = backend.partition("-")[0]
    return (BACKENDS.index(plain) if plain in BACKENDS else len(BACKENDS), backend)


def _rates(facts: Facts, width: int) -> list[Content]:
    lines = [_head("tokens per second", "")]
    for name, samples in (("decode", facts.decode), ("prefill", facts.prefill)):
        if samples:
            figure = f" {samples[-1]:,.0f}"
            plot = _plot(samples, width - 8 - len(figure))
            lines.append(Content.assemble(f"{name:<8}", (plot, "$primary"), figure))
    if facts.first_token_s:
        lines.append(Content(f"first token after {facts.first_token_s:.2f} s"))
    return lines if len(lines) > 1 else []


def _plot(samples: Sequence[float], width: int) -> str:
    shown = list(samples)[-max(width, 1) :]
    top = max(shown) or 1.0
    return "".join(BLOCKS[1 + round((len(BLOCKS) - 2) * max(v, 0.0) / top)] for v in shown)


def _context(facts: Facts, width: int) -> list[Content]:
    if not facts.context:
        return []
    lines = [
        _head("context", f"{facts.used:,} of {facts.context:,}"),
        _bar(facts.used / facts.context, width),
    ]
    if facts.prompt:
        share = 100 * facts.cached / facts.prompt
        lines.append(Content(f"{facts.cached:,} of {facts.prompt:,} kept ({share:.0f} % hit)"))
    return lines


def _memory(facts: Facts, width: int) -> list[Content]:
    state = facts.state
    if state is None or not (state.used or state.memory):
        return []
    limit = state.budget or state.memory.get("limit", 0)
    lines = [_head("memory", f"{_size(state.used)} of {_size(limit)}" if limit else _size(state.used))]
    if limit:
        lines.append(_bar(state.used / limit, width))
    told = [
        (name, n)
        for name, n in state.memory.items()
        if name not in ("limit", "left", "KV of one full sequence")
    ]
    lines += [_row(name, _size(n), width) for name, n in told if n]
    return lines


def _disk(facts: Facts, width: int) -> list[Content]:
    streaming = facts.state.streaming if facts.state else None
    if streaming is None:
        return []
    return [
        _head("from disk", f"{streaming.disk_bytes_s / 1e9:.2f} GB/s"),
        _row("each pass", _size(streaming.streamed_bytes), width),
        _row("stays in memory", _size(streaming.locked_bytes), width),
        _row("waiting for it", f"{100 * streaming.waiting:.0f} % of the time", width),
    ]


def _queue(facts: Facts, width: int) -> list[Content]:
    slots = facts.state.slots if facts.state else ()
    if len(slots) < 2:
        return []
    waiting = [slot for slot in slots if slot.state == "waiting"]
    longest = max((slot.seconds for slot in waiting), default=0.0)
    return [
        _head("requests", f"{len(slots) - len(waiting)} run"),
        _row("waiting", f"{len(waiting)}, {longest:.1f} s", width),
    ]


def _reasons(facts: Facts, width: int) -> list[Content]:
    if not facts.reasons:
        return []
    newest = reversed(facts.reasons)
    return [
        _head("why the plan changed", ""),
        *[Content.assemble((f"{when} ", "dim"), visible(why)) for when, why in newest],
    ]


# --- pieces


def _head(name: str, figure: str) -> Content:
    return Content.assemble((name, "bold"), f"  {figure}" if figure else "")


def _row(name: str, figure: str, width: int) -> Content:
    room = max(width - len(figure) - 1, 4)
    name = name if len(name) <= room else name[: room - 1] + "…"
    return Content.assemble((f"{name:<{room}} ", "dim"), figure)


def _bar(share: float, width: int) -> Content:
    full = min(max(round(share * width), 0), width)
    colour = "$error" if share > 0.95 else "$warning" if share > 0.8 else "$success"
    return Content.assemble(("━" * full, colour), ("─" * (width - full), "dim"))


def _size(nbytes: float) -> str:
    return f"{nbytes / (1 << 30):,.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):,.0f} MiB"
