"""The machine in lines for the pane at the right: plain facts in, text out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from textual.content import Content

from hetrun.client.interface import ChatClient
from hetrun.client.queries import EngineState, LayerPlace, Layers, StateQuery
from hetrun.errors import HetrunError
from hetrun.system.terminal_text import visible
from hetrun.system.units import counted, format_bytes

# One colour for a backend wherever it is named; a terminal's theme says what they look like.
COLOURS = ("$success", "$primary", "$warning", "$accent", "$secondary", "$error")
BACKENDS = ("llamacpp", "amx", "cuda", "reference", "libllama")  # their colours do not depend on the plan
STREAMED = "$warning-darken-1"
BLOCKS = " ▁▂▃▄▅▆▇█"
SAMPLES = 60  # of a plot: half a minute of answers
MOST_REASONS = 20
LEAST_TOLD = 1 << 19  # bytes; less would be shown as none
NO_PARTS = ("limit", "left", "KV of one full sequence")  # of a bill: said elsewhere, or part of another row


@dataclass
class Facts:
    """What is known of the machine by now; written by the screen, read by `draw`."""

    model: str = ""
    context: int = 0
    used: int = 0  # tokens of the conversation
    state: EngineState | None = None
    links: Mapping[str, float] = field(default_factory=dict)  # recently: bytes a second over each
    waiting: float = 0.0  # recently: the share of steps that was spent waiting for devices
    layers: Sequence[LayerPlace] = ()
    decode: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))  # tokens/s
    prefill: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    first_token_s: float = 0.0
    cached: int = 0  # tokens of the last prompt that were not computed again
    prompt: int = 0  # and all of them
    reasons: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=MOST_REASONS))  # time, why
    told: str = ""  # the newest of them that the engine gave
    why_not: str = ""  # nothing is known, and why

    def note(self, reason: str) -> None:
        """Why the plan is another one from now on."""
        self.reasons.append((datetime.now().astimezone().strftime("%H:%M:%S"), reason))


async def look(facts: Facts, client: ChatClient) -> None:
    """Ask the engine how it is; the map is asked for again when the plan has changed."""
    try:
        state = await client.ask(StateQuery())
        before = facts.state
        if before is None or state.reason != before.reason or state.streaming:
            facts.layers = await client.ask(Layers())
        if state.reason and state.reason != facts.told:
            facts.note(state.reason)
            facts.told = state.reason
        elif before is not None and state.reason == before.reason:
            _note_threads(facts, before, state)
        if before is not None:
            _note_rates(facts, before, state)
        facts.state, facts.why_not = state, ""
    except HetrunError as error:
        facts.why_not = str(error)


def _note_threads(facts: Facts, before: EngineState, now: EngineState) -> None:
    """The engine gives no reason where passes of one kind follow those of another, or go back."""
    for what, n in now.threads.items():
        if n != (was := before.threads.get(what, n)):
            facts.note(f"{what}: {counted(n, 'thread')} instead of {was}")


def _note_rates(facts: Facts, before: EngineState, now: EngineState) -> None:
    """What happened between two looks; nothing, if another process answers by now."""
    seconds, steps_s = now.at - before.at, now.counts.step_s - before.counts.step_s
    if seconds <= 0 or steps_s < 0:
        facts.links, facts.waiting = {}, 0.0
        return
    facts.links = {name: (n - before.crossed.get(name, 0)) / seconds for name, n in now.crossed.items()}
    facts.waiting = (now.waited_s - before.waited_s) / steps_s if steps_s else 0.0


def draw(facts: Facts, width: int) -> Content:
    """Everything, in lines of `width` cells."""
    lines: list[Content] = []
    if facts.why_not:
        lines += [Content.styled(visible(facts.why_not), "dim"), Content("")]
    known = (_rates, _context) if facts.why_not else PARTS
    for part in known:
        if found := part(facts, width):
            lines += [*found, Content("")]
    return Content("\n").join(lines[:-1]) if lines else Content.styled("waiting for the engine", "dim")


# --- parts


def _layers(facts: Facts, width: int) -> list[Content]:
    """A cell for each layer; the lower row for one token, the upper for many."""
    if not facts.layers:
        return []
    names = sorted({name for layer in facts.layers for name in (*layer.decode, *layer.prefill)}, key=_rank)
    within = sum(layer.scope.startswith("blk.") for layer in facts.layers)
    lines = [_head("layers", f"{within}" + " + embedding + output" * (within < len(facts.layers)))]
    for what, of in (("prefill", "prefill"), ("decode", "decode")):
        threads = facts.state.threads.get(what, 0) if facts.state else 0
        row = Content.assemble(*[_cell(getattr(layer, of), layer, names) for layer in facts.layers])
        note = f" {threads} thread{'s' * (threads > 1)}" if threads else ""
        lines.append(Content.assemble(f"{what:<8}", (note, "dim")))
        lines += [row[at : at + width] for at in range(0, len(row), width)]
    key = [Content.assemble(("█", colour_of(name)), f" {visible(name)}") for name in names]
    if any(layer.streamed for layer in facts.layers):
        key.append(Content.assemble(("▒", STREAMED), " from disk"))
    if any(layer.crossing for layer in facts.layers):
        key.append(Content("▒ over the link"))
    return lines + _packed(key, width)


def _cell(runs: Mapping[str, int], layer: LayerPlace, names: Sequence[str]) -> tuple[str, str]:
    if layer.streamed:
        return (_shade(layer.streamed, layer), STREAMED)
    if not runs:
        return ("·", "dim")
    colour = colour_of(max(runs, key=lambda name: runs[name]))
    if layer.crossing:
        return (_shade(layer.crossing, layer), colour)
    return ("█" if len(runs) == 1 else "▌", colour)


def _shade(nbytes: int, layer: LayerPlace) -> str:
    """The lighter, the more of a layer has to come for every pass."""
    share = nbytes / max(layer.nbytes, 1)
    return "▓" if share < 0.34 else "▒" if share < 0.67 else "░"


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
        known = f"{facts.cached:,} of {facts.prompt:,} ({share:.0f} %)"
        lines.append(_row("cache hits", known, width))
    return lines


def _memory(facts: Facts, width: int) -> list[Content]:
    state = facts.state
    if state is None or not (state.used or state.memory):
        return []
    limit = state.budget or state.memory.get("limit", 0)
    return _bill("memory", state.in_use or state.memory, state.used, limit, width)


def _devices(facts: Facts, width: int) -> list[Content]:
    """Memory that devices have to themselves."""
    lines: list[Content] = []
    for name, bill in (facts.state.devices if facts.state else {}).items():
        used = sum(n for what, n in bill.items() if what not in NO_PARTS)
        lines += _bill(f"memory of {name}", bill, used, bill.get("limit", 0), width)
    return lines


def _bill(name: str, bill: Mapping[str, int], used: int, limit: int, width: int) -> list[Content]:
    lines = [_head(name, f"{format_bytes(used)} of {format_bytes(limit)}" if limit else format_bytes(used))]
    if limit:
        lines.append(_bar(used / limit, width))
    told = [(what, n) for what, n in bill.items() if n >= LEAST_TOLD and what not in NO_PARTS]
    return lines + [_row(what, format_bytes(n), width) for what, n in told]


def _links(facts: Facts, width: int) -> list[Content]:
    """What weights cross to devices for every pass."""
    if not facts.links:
        return []
    return [
        _head("links", ""),
        *[_row(f"to {name}", f"{rate / 1e9:.2f} GB/s", width) for name, rate in facts.links.items()],
        _row("waiting for them", f"{100 * facts.waiting:.0f} % of the time", width),
    ]


def _disk(facts: Facts, width: int) -> list[Content]:
    streaming = facts.state.streaming if facts.state else None
    if streaming is None:
        return []
    if streaming.experts:
        return [
            _head("from disk", f"{streaming.disk_bytes_s / 1e9:.2f} GB/s"),
            _row("each token", format_bytes(int(streaming.bytes_per_token)), width),
            _row("slots for experts", f"{streaming.slots:,} of {streaming.experts:,}", width),
            _row("chosen and there", f"{100 * streaming.found:.0f} %", width),
            _row("waiting for it", f"{100 * streaming.waiting:.0f} % of the time", width),
        ]
    return [
        _head("from disk", f"{streaming.disk_bytes_s / 1e9:.2f} GB/s"),
        _row("each pass", format_bytes(streaming.streamed_bytes), width),
        _row("stays in memory", format_bytes(streaming.locked_bytes), width),
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


PARTS = (_layers, _rates, _context, _memory, _devices, _links, _disk, _queue, _reasons)  # as they stand

# --- pieces


def _packed(some: Sequence[Content], width: int) -> list[Content]:
    """One after the other, as many to a line as have room in it."""
    lines: list[Content] = []
    for one in some:
        if lines and len(lines[-1]) + 2 + len(one) <= width:
            lines[-1] = Content.assemble(lines[-1], "  ", one)
        else:
            lines.append(one)
    return lines


def _head(name: str, figure: str) -> Content:
    return Content.assemble((visible(name), "bold"), f"  {figure}" if figure else "")


def _row(name: str, figure: str, width: int) -> Content:
    room = max(width - len(figure) - 1, 4)
    name = visible(name)
    name = name if len(name) <= room else name[: room - 1] + "…"
    return Content.assemble((f"{name:<{room}} ", "dim"), figure)


def _bar(share: float, width: int) -> Content:
    full = min(max(round(share * width), 0), width)
    colour = "$error" if share > 0.95 else "$warning" if share > 0.8 else "$success"
    return Content.assemble(("━" * full, colour), ("─" * (width - full), "dim"))
