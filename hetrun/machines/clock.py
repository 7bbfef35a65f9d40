"""One clock for every policy: what a placement takes, and the memory it fills.

A layer is a chain of parts. Each part runs on the processor, on the GPU, or on both, split by rows (attention
by heads). What the GPU needs and does not hold comes over the link, and may come early: the link works beside
the devices, so a layer takes the longer of its chain and of its copies. Small intermediates that change sides
are waited for. The chain itself is serial: in one step no part begins before the one it reads has ended.

Not in it: that a copy draws on the bandwidth of the memory that the processor reads; that several steps could
be in flight; kernels that are better on one side for some shape. Predictions for real use need measurements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hetrun.machines.costs import HALF, Case, Model, Part, Work, decode, prefill, work
from hetrun.machines.machine import Device, Link, Machine

Shares = Mapping[str, float]  # part -> how much of it: 0 is none, 1 all

CHUNK = 2048  # tokens whose activations a device holds at once, where nothing says otherwise
KV_WINDOW = 1 << 28  # bytes of keys and values on their way to the GPU
CPU, GPU = 0, 1


@dataclass(frozen=True, slots=True)
class Setting:
    """A question: a model on a machine, a batch of prompts and of answers."""

    machine: Machine
    model: Model
    batch: int
    prompt: int
    generate: int

    @property
    def prefill(self) -> Case:
        """All prompts in one pass."""
        return prefill(self.batch, self.prompt)

    @property
    def decode(self) -> Case:
        """A step in the middle of the answers."""
        return decode(self.batch, self.prompt + max(1, self.generate // 2))

    @property
    def length(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt + self.generate


@dataclass(frozen=True, slots=True)
class Band:
    """Neighbouring layers with the same homes: which share of each part's weights (or KV) the GPU holds."""

    layers: int
    there: Shares


@dataclass(frozen=True, slots=True)
class Way:
    """Who computes in one kind of step: the GPU's share of each part, for each band, and of the output."""

    bands: tuple[Shares, ...]
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Placing:
    """What a policy decided: where everything lies, and who computes what in prefill and in decode."""

    policy: str
    bands: tuple[Band, ...]
    after: bool  # the output's weights lie on the GPU
    prefill: Way
    decode: Way
    batches: int = 1  # the batch goes through a layer in so many turns, its weights come once
    serial: bool = False  # copies are waited for
    pass_tokens: int = 0  # weights come again for every so many tokens; 0: once
    rereads: bool = False  # with too little memory every weight comes from disk again
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one step takes, and the bytes that cross the link in it."""

    seconds: float
    copied: float


@dataclass(frozen=True, slots=True)
class Bill:
    """Bytes on each side; `disk` are weights that no memory holds."""

    gpu: Mapping[str, int]
    cpu: Mapping[str, int]
    disk: int
    problem: str = ""  # why it cannot be, "" if it can


@dataclass(frozen=True, slots=True)
class Cost:
    """A part in one case: seconds on either side, bytes that must come, go in and go out."""

    cpu: float
    gpu: float
    launches: tuple[float, float]
    stream: float  # bytes of weights and past KV
    takes: float
    gives: float
    fresh: float  # bytes of keys and values that it makes
    fresh_home: float  # the share of these that belongs on the GPU
    there: float  # the share of `stream` that lies on the GPU


class Path(NamedTuple):
    """One way through some parts: a tuple, because a search makes very many."""

    chain: float
    copies: float
    shares: tuple[float, ...] = ()


def cost(w: Work, machine: Machine, there: float, fresh: float, fresh_home: float, batches: int) -> Cost:
    """A part of which the GPU holds a share; `fresh` are the bytes of KV that it makes."""
    cpu, gpu = machine.cpu, machine.gpu
    return Cost(
        cpu=batches * w.seconds(cpu),
        gpu=batches * w.seconds(gpu) if gpu else 0.0,
        launches=(batches * w.ops * cpu.launch, batches * w.ops * gpu.launch if gpu else 0.0),
        stream=w.weights + batches * w.past,
        takes=batches * w.takes,
        gives=batches * w.gives,
        fresh=batches * fresh,
        fresh_home=fresh_home,
        there=there,
    )


def paths(
    costs: Sequence[Cost], choices: Sequence[Sequence[float]], link: Link | None, most: float = math.inf
) -> list[Path]:
    """The ways through a layer that nothing beats in both chain and copies; it ends on the side it began on.

    Exact over the given choices: prefixes that are worse in both cannot become better, and those that must
    take longer than `most` seconds in either are of no use.
    """
    moves = [
        {side: [(x, *move) for x in shares for move in _moves(c, x, side, link)] for side in (CPU, GPU)}
        for c, shares in zip(costs, choices, strict=True)
    ]
    ends = _least_ahead(moves)
    found: list[Path] = []
    for start in (CPU, GPU):
        sides: dict[int, list[Path]] = {start: [Path(0.0, 0.0)]}
        for options, (chain_ahead, copies_ahead) in zip(moves, ends, strict=True):
            reached: dict[int, list[Path]] = {CPU: [], GPU: []}
            for side, before in sides.items():
                for share, end, chain, copies in options[side]:
                    room, width = most - chain - chain_ahead, most - copies - copies_ahead
                    reached[end] += [
                        Path(a + chain, b + copies, (*done, share))
                        for a, b, done in before
                        if a <= room and b <= width
                    ]
            sides = {side: best(reaching) for side, reaching in reached.items()}
        found += sides.get(start, [])
    return best(found)


Moves = Mapping[int, Sequence[tuple[float, int, float, float]]]  # by side: share, end, chain, copies


def _least_ahead(moves: Sequence[Moves]) -> list[tuple[float, float]]:
    """For each part the least chain, and the least copies, of all parts behind it."""
    ahead = [(0.0, 0.0)]
    for options in reversed(moves[1:]):
        every = [move for side in options.values() for move in side]
        chain, copies = ahead[-1]
        ahead.append((chain + min(m[2] for m in every), copies + min(m[3] for m in every)))
    return ahead[::-1]


def _moves(c: Cost, share: float, side: int, link: Link | None) -> list[tuple[int, float, float]]:
    """Where the result may lie, and seconds of the chain and of copies; the input lies on `side`."""
    if link is None:
        return [(CPU, c.cpu + c.launches[CPU], 0.0)]
    comes = max(0.0, share - c.there) * c.stream + abs(share - c.fresh_home) * c.fresh
    copies = comes / link.bandwidth
    on_cpu = (1 - share) * c.cpu + c.launches[CPU] if share < 1 else 0.0
    on_gpu = share * c.gpu + c.launches[GPU] if share > 0 else 0.0
    busy = max(on_cpu, on_gpu)
    if share in (0.0, 1.0):
        end = GPU if share else CPU
        return [(end, busy + (link.seconds(c.takes) if end != side else 0.0), copies)]
    both = busy + link.seconds(c.takes)
    return [
        (CPU, both + link.seconds(share * c.gives), copies),
        (GPU, both + link.seconds((1 - share) * c.gives), copies),
    ]


def best(found: Sequence[Path]) -> list[Path]:
    """Those that no other beats in both."""
    kept: list[Path] = []
    least = math.inf
    for path in sorted(found):
        if path.copies < least:
            kept.append(path)
            least = path.copies
    return kept


class Clock:
    """Costs of a model on a machine, each worked out once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.machine, self.model = setting.machine, setting.model
        self._works: dict[tuple[int, Case], Work] = {}
        self._forms: dict[tuple[int, int], list[tuple[tuple[Part, ...], int]]] = {}
        layers = setting.model.layers
        self._widest = max(p.takes + p.gives for layer in layers for p in layer)

    def work(self, part: Part, case: Case) -> Work:
        """What a part does."""
        key = (id(part), case)
        if key not in self._works:
            self._works[key] = work(part, case)
        return self._works[key]

    def costs(self, layer: Sequence[Part], case: Case, there: Shares, batches: int = 1) -> list[Cost]:
        """The parts of a layer; keys and values are made by the part in front of the one that keeps them."""
        each = replace(case, sequences=-(-case.sequences // batches))
        works = [self.work(part, each) for part in layer]
        found = []
        for i, (part, w) in enumerate(zip(layer, works, strict=True)):
            keeper = layer[i + 1] if i + 1 < len(layer) and layer[i + 1].kept else None
            fresh = works[i + 1].fresh if keeper else 0.0
            home = there.get(keeper.name, 0.0) if keeper else 0.0
            found.append(cost(w, self.machine, there.get(part.name, 0.0), fresh, home, batches))
        return found

    def step(self, placing: Placing, case: Case, way: Way) -> Step:
        """Seconds of one step."""
        total, copied, side, at = 0.0, 0.0, CPU, 0
        speed = self.machine.link.bandwidth if self.machine.link else 0.0
        between = HALF * case.rows * self.model.width
        for band, shares in zip(placing.bands, way.bands, strict=True):
            for layer, count in self.forms(at, at + band.layers):
                costs = self.costs(layer, case, band.there, placing.batches)
                choices = [[shares.get(part.name, 0.0)] for part in layer]
                path, seconds = self.shortest(paths(costs, choices, self.machine.link), placing, case)
                total += count * seconds
                copied += count * path.copies * speed
            if band.layers and self.machine.link:
                now = GPU if shares.get(self.model.layers[at][-1].name, 0.0) > 0.5 else CPU
                total += self.machine.link.seconds(between) if now != side else 0.0
                side = now
            at += band.layers
        total += self._outside(placing, case, way, side)
        disk = self._from_disk(placing)
        return Step(total + disk if placing.rereads else max(total, disk), copied)

    def shortest(self, found: Sequence[Path], placing: Placing, case: Case) -> tuple[Path, float]:
        """The path that takes least, its copies beside it or behind it."""
        again = -(-case.rows // placing.pass_tokens) if placing.pass_tokens else 1

        def seconds(p: Path) -> float:
            return p.chain + again * p.copies if placing.serial else max(p.chain, p.copies)

        path = min(found, key=seconds)
        return path, seconds(path)

    def forms(self, first: int, last: int) -> list[tuple[tuple[Part, ...], int]]:
        """The different layers of a range, and how often each one comes."""
        if (first, last) not in self._forms:
            found = self.model.layers[first:last]
            layers = {id(layer): layer for layer in found}
            counts = Counter(map(id, found))
            self._forms[first, last] = [(layers[key], n) for key, n in counts.items()]
        return self._forms[first, last]

    def _outside(self, placing: Placing, case: Case, way: Way, side: int) -> float:
        """The table of words is read where it lies, with the processor; the output where the way says."""
        before, after = self.work(self.model.before, case), self.work(self.model.after, case)
        words = before.seconds(self.machine.cpu) + before.ops * self.machine.cpu.launch
        head = cost(after, self.machine, float(placing.after), 0.0, 0.0, 1)
        moves = _moves(head, way.after, side, self.machine.link)
        return words + min(max(chain, copies) for _, chain, copies in moves)

    # --- memory

    def bill(self, placing: Placing) -> Bill:
        """What lies where, at the end of the answers."""
        s = self.setting
        outside = self.model.before.weight_bytes, self.model.after.weight_bytes
        gpu: dict[str, float] = {"weights": outside[1] * placing.after, "kv": 0.0, "work": 0.0}
        cpu = {"weights": float(sum(outside)) - gpu["weights"], "kv": 0.0}
        cpu["work"] = float(self._activations(CHUNK))
        window, at = 0.0, 0
        for band, *ways in zip(placing.bands, placing.prefill.bands, placing.decode.bands, strict=True):
            for layer, count in self.forms(at, at + band.layers):
                comes = 0.0
                for part in layer:
                    there = band.there.get(part.name, 0.0)
                    kv = part.kv_bytes(s.batch, s.length)
                    for side, share in ((gpu, there), (cpu, 1 - there)):
                        side["weights"] += count * share * part.weight_bytes
                        side["kv"] += count * share * kv
                    moved = max(0.0, *(way.get(part.name, 0.0) - there for way in ways))
                    comes += moved * (part.weight_bytes + min(kv, KV_WINDOW))
                window = max(window, comes)
            at += band.layers
        if self._gpu_works(placing):
            rows = -(-s.batch // placing.batches) * s.prompt
            gpu["work"] = 2 * window + self._activations(min(rows, CHUNK) if placing.batches == 1 else rows)
        return self._billed(gpu, cpu)

    def _gpu_works(self, placing: Placing) -> bool:
        shares = [v for way in (placing.prefill, placing.decode) for b in way.bands for v in b.values()]
        return any(shares) or bool(placing.prefill.after or placing.decode.after)

    def _activations(self, rows: int) -> int:
        """The stream between layers of all tokens, and the widest part's values of some."""
        total = self.setting.batch * self.setting.prompt
        return HALF * (2 * total * self.model.width + min(rows, total) * self._widest)

    def _billed(self, gpu: Mapping[str, float], cpu: Mapping[str, float]) -> Bill:
        """With what does not fit on disk, or the reason why that does not help."""
        m = self.machine
        over = max(0, int(sum(cpu.values()) - m.cpu.usable))
        problem = ""
        if sum(gpu.values()) > (m.gpu.usable if m.gpu else 0):
            problem = f"it takes {gigabytes(sum(gpu.values()))} on the GPU"
        elif over > cpu["weights"]:
            problem = f"keys and values take {gigabytes(cpu['kv'])} of memory"
        elif over > (m.disk.size if m.disk else 0):
            problem = f"the weights take {gigabytes(cpu['weights'])} of memory"
        return Bill(_whole(gpu), _whole(cpu), over, problem)

    def _from_disk(self, placing: Placing) -> float:
        """Seconds that a step reads weights which no memory holds; without care, of all that it uses."""
        bill = self.bill(placing)
        if not bill.disk or self.machine.disk is None:
            return 0.0
        return (bill.cpu["weights"] if placing.rereads else bill.disk) / self.machine.disk.read


def _whole(parts: Mapping[str, float]) -> dict[str, int]:
    return {name: int(n) for name, n in parts.items()}


def gigabytes(n: float) -> str:
    """For people."""
    return f"{n / 1e9:.1f} GB"


@dataclass(frozen=True, slots=True)
class Prediction:
    """A placement with what it would take; without a problem it can be."""

    placing: Placing
    bill: Bill
    prefill: Step
    decode: Step
    setting: Setting = field(repr=False)

    @property
    def seconds(self) -> float:
        """From the prompts to the last token; the first token comes with the prompts."""
        return self.prefill.seconds + (self.setting.generate - 1) * self.decode.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of decoding alone, all sequences together."""
        return self.setting.batch / self.decode.seconds

    @property
    def throughput(self) -> float:
        """Generated tokens per second, the time of the prompts included."""
        return self.setting.batch * self.setting.generate / self.seconds


def predict(clock: Clock, placing: Placing) -> Prediction:
    """What a placement would take."""
    s = clock.setting
    return Prediction(
        placing,
        clock.bill(placing),
        clock.step(placing, s.prefill, placing.prefill),
        clock.step(placing, s.decode, placing.decode),
        s,
    )


def fits(clock: Clock, placing: Placing) -> bool:
    """Whether the memory is there."""
    return not clock.bill(placing).problem


def sides(machine: Machine) -> tuple[Device, Device, Link]:
    """Processor, GPU and link of a machine that has them."""
    if machine.gpu is None or machine.link is None:
        raise ValueError(f"{machine.name} has no GPU")
    return machine.cpu, machine.gpu, machine.link
