"""One clock for every policy: what a placement takes, and the memory it fills.

A layer is a chain of parts. Each part runs on the processor, on the GPU, or on both, split by rows (attention
by heads). What the GPU needs and does not hold comes over the link, and may come early: the link works beside
the devices, so a layer takes the longer of its chain and of its copies. Small intermediates that change sides
are waited for. The chain itself is serial: in one step no part begins before the one it reads has ended.

Not in it: that a copy draws on the bandwidth of the memory that the processor reads; that several steps could
be in flight; kernels that are better on one side for some shape. Predictions for real use need measurements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetrun.system.units import format_bytes
from hetrun.tools.simulate.costs import HALF, LayerPart, PartWork, StepCase, work
from hetrun.tools.simulate.layer_paths import CPU, GPU, PartCost, Path, cost, moves, paths
from hetrun.tools.simulate.types import (
    Bill,
    ComputeShares,
    PolicyPlacement,
    Prediction,
    Shares,
    SimulatedSetting,
    SimulatedStep,
)

CHUNK = 2048  # tokens whose activations a device holds at once, where nothing says otherwise
KV_WINDOW = 1 << 28  # bytes of keys and values on their way to the GPU


class StepCosts:
    """Costs of a model on a machine, each worked out once."""

    def __init__(self, setting: SimulatedSetting) -> None:
        self.setting = setting
        self.machine, self.model = setting.machine, setting.model
        self._works: dict[tuple[int, StepCase], PartWork] = {}
        self._forms: dict[tuple[int, int], list[tuple[tuple[LayerPart, ...], int]]] = {}
        layers = setting.model.layers
        self._widest = max(p.takes + p.gives for layer in layers for p in layer)

    def work(self, part: LayerPart, case: StepCase) -> PartWork:
        """What a part does."""
        key = (id(part), case)
        if key not in self._works:
            self._works[key] = work(part, case)
        return self._works[key]

    def costs(
        self, layer: Sequence[LayerPart], case: StepCase, there: Shares, batches: int = 1
    ) -> list[PartCost]:
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

    def step(self, placing: PolicyPlacement, case: StepCase, way: ComputeShares) -> SimulatedStep:
        """Seconds of one step."""
        total, copied, side, at = 0.0, 0.0, CPU, 0
        speed = self.machine.link.bandwidth if self.machine.link else 0.0
        between = HALF * case.rows * self.model.width
        for band, shares in zip(placing.bands, way.bands, strict=True):
            for layer, count in self.forms(at, at + band.layers):
                costs = self.costs(layer, case, band.there, placing.batches)
                choices = [[shares.get(part.name, 0.0)] for part in layer]
                if any(share < c.there for (share,), c in zip(choices, costs, strict=True)):
                    raise ValueError(f"{placing.policy} has the processor compute what only the GPU holds")
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
        return SimulatedStep(total + disk if placing.rereads else max(total, disk), copied)

    def shortest(self, found: Sequence[Path], placing: PolicyPlacement, case: StepCase) -> tuple[Path, float]:
        """The path that takes least, its copies beside it or behind it."""
        again = -(-case.rows // placing.pass_tokens) if placing.pass_tokens else 1

        def seconds(p: Path) -> float:
            return p.chain + again * p.copies if placing.serial else max(p.chain, p.copies)

        path = min(found, key=seconds)
        return path, seconds(path)

    def forms(self, first: int, last: int) -> list[tuple[tuple[LayerPart, ...], int]]:
        """The different layers of a range, and how often each one comes."""
        if (first, last) not in self._forms:
            found = self.model.layers[first:last]
            layers = {id(layer): layer for layer in found}
            counts = Counter(map(id, found))
            self._forms[first, last] = [(layers[key], n) for key, n in counts.items()]
        return self._forms[first, last]

    def _outside(self, placing: PolicyPlacement, case: StepCase, way: ComputeShares, side: int) -> float:
        """The table of words is read where it lies, with the processor; the output where the way says."""
        before, after = self.work(self.model.before, case), self.work(self.model.after, case)
        words = before.seconds(self.machine.cpu) + before.ops * self.machine.cpu.launch
        head = cost(after, self.machine, float(placing.after), 0.0, 0.0, 1)
        ends = moves(head, way.after, side, self.machine.link)
        return words + min(max(chain, copies) for _, chain, copies in ends)

    # --- memory

    def bill(self, placing: PolicyPlacement) -> Bill:
        """What lies where, at the end of the answers."""
        s = self.setting
        words, output = self.model.before.weight_bytes, self.model.after.weight_bytes
        gpu: dict[str, float] = {"weights": output * placing.after, "kv": 0.0, "work": 0.0}
        cpu = {"weights": float(words + (0 if placing.after else output - self.model.shared)), "kv": 0.0}
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

    def _gpu_works(self, placing: PolicyPlacement) -> bool:
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
            problem = f"it takes {format_bytes(sum(gpu.values()))} on the GPU"
        elif over > cpu["weights"]:
            problem = f"keys and values take {format_bytes(cpu['kv'])} of memory"
        elif over > (m.disk.size if m.disk else 0):
            problem = f"the weights take {format_bytes(cpu['weights'])} of memory"
        return Bill(_whole(gpu), _whole(cpu), over, problem)

    def _from_disk(self, placing: PolicyPlacement) -> float:
        """Seconds that a step reads weights which no memory holds; without care, of all that it uses."""
        bill = self.bill(placing)
        if not bill.disk or self.machine.disk is None:
            return 0.0
        return (bill.cpu["weights"] if placing.rereads else bill.disk) / self.machine.disk.read


def _whole(parts: Mapping[str, float]) -> dict[str, int]:
    return {name: int(n) for name, n in parts.items()}


def predict(clock: StepCosts, placing: PolicyPlacement) -> Prediction:
    """What a placement would take."""
    s = clock.setting
    return Prediction(
        placing,
        clock.bill(placing),
        clock.step(placing, s.prefill, placing.prefill),
        clock.step(placing, s.decode, placing.decode),
        s,
    )


def fits(clock: StepCosts, placing: PolicyPlacement) -> bool:
    """Whether the memory is there."""
    return not clock.bill(placing).problem
