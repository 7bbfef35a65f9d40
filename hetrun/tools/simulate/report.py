"""Predictions as people and programs read them. What is shown says first that nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hetrun.planner.plan import BUCKETS
from hetrun.system.units import format_bytes
from hetrun.tools.simulate.costs import ORDER, SimulatedModel, StepCase, decode
from hetrun.tools.simulate.evaluator import StepCosts
from hetrun.tools.simulate.machine import SimulatedMachine
from hetrun.tools.simulate.policies import compare
from hetrun.tools.simulate.policies.hetrun import for_case
from hetrun.tools.simulate.policies.layer_split import on_processor
from hetrun.tools.simulate.types import ComputeShares, Prediction, Shares, SimulatedSetting, SimulatedStep

WARNING = "A prediction from figures in a file: this machine was not measured."
LARGEST = 512  # tokens that stand for the last bucket, which has no end


@dataclass(frozen=True, slots=True)
class BucketRow:
    """One bucket of tokens: what it stands for, who computes what, what it takes."""

    bucket: str
    case: StepCase
    way: ComputeShares
    step: SimulatedStep


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """All policies for one question, and hetrun's own plan by bucket; nothing where nothing fits."""

    setting: SimulatedSetting
    name: str  # of the model
    policies: tuple[Prediction, ...]
    problem: str  # why nothing fits
    rows: tuple[BucketRow, ...]

    @property
    def ours(self) -> Prediction | None:
        """hetrun's own."""
        return self.policies[-1] if self.policies else None


def make_report(
    machine: SimulatedMachine, model: SimulatedModel, name: str, batch: int, prompt: int, generate: int
) -> SimulationReport:
    """Everything about one question."""
    setting = SimulatedSetting(machine, model, batch, prompt, generate)
    clock = StepCosts(setting)
    found = compare(clock)
    if not found:
        return SimulationReport(setting, name, (), problem(clock), ())
    ours = found[-1]
    rows = [BucketRow("prefill", setting.prefill, ours.placing.prefill, ours.prefill)]
    for bucket in BUCKETS:
        case = case_of(bucket, setting)
        rows.append(BucketRow(bucket, case, *for_case(clock, ours.placing, case)))
    return SimulationReport(setting, name, tuple(found), "", tuple(rows))


def problem(clock: StepCosts) -> str:
    """Why the simplest of all placements does not fit."""
    return clock.bill(on_processor(clock)).problem


def case_of(bucket: str, setting: SimulatedSetting) -> StepCase:
    """The largest step of a bucket: sequences that decode, up to the batch; above, a piece of a prompt."""
    end = bucket.split("-")[-1]
    tokens = LARGEST if end.endswith("+") else int(end)
    if tokens <= setting.batch:
        return decode(tokens, setting.decode.past + 1)
    return StepCase(1, tokens, setting.prompt // 2)


# --- for people


def to_text(report: SimulationReport) -> str:
    """A table of buckets, a table of policies."""
    return "\n".join(_lines(report))


def _lines(report: SimulationReport) -> Iterator[str]:
    s = report.setting
    yield WARNING
    yield ""
    yield f"machine  {s.machine.name}: {s.machine.about}"
    yield f"model    {report.name}, {format_bytes(s.model.weight_bytes)} of weights"
    yield f"case     {s.batch} x {s.prompt} tokens of prompt, {s.generate} generated"
    ours = report.ours
    if ours is None:
        yield f"nothing fits: {report.problem}"
        return
    yield f"weights  {ours.placing.notes[0]}"
    yield f"memory   {_memory(ours)}"
    yield ""
    yield f"{'tokens':<9} {'seconds':>9} {'tokens/s':>9}  computed by"
    for row in report.rows:
        first, *others = [_shown(way) for way in _used(ours, row.way)]
        rate = row.case.rows / row.step.seconds
        yield f"{row.bucket:<9} {row.step.seconds:>9.4f} {rate:>9.1f}  {first}"
        yield from (f"{'':<30} {other}" for other in others)
    yield ""
    yield f"{'policy':<14} {'prefill s':>10} {'decode ms':>10} {'tokens/s':>9} {'all tok/s':>9}  how"
    for p in report.policies:
        yield (
            f"{p.placing.policy:<14} {p.prefill.seconds:>10.2f} {1000 * p.decode.seconds:>10.1f}"
            f" {p.tokens_per_second:>9.2f} {p.throughput:>9.2f}  {'; '.join(p.placing.notes)}"
        )


def _memory(p: Prediction) -> str:
    sides = [(name, side) for name, side in (("GPU", p.bill.gpu), ("CPU", p.bill.cpu)) if any(side.values())]
    texts = [
        f"{name} {format_bytes(sum(side.values()))} (weights {format_bytes(side['weights'])},"
        f" KV {format_bytes(side['kv'])}, work {format_bytes(side['work'])})"
        for name, side in sides
    ]
    return ", ".join(texts + ([f"disk {format_bytes(p.bill.disk)}"] if p.bill.disk else []))


def _used(p: Prediction, way: ComputeShares) -> list[tuple[str, Shares]]:
    """The bands that have layers, with their numbers."""
    found: list[tuple[str, Shares]] = []
    at = 0
    for band, shares in zip(p.placing.bands, way.bands, strict=True):
        if band.layers:
            names = {part.name for part in p.setting.model.layers[at]}
            found.append((f"layers {at}-{at + band.layers - 1}", {k: shares.get(k, 0.0) for k in names}))
        at += band.layers
    return found if len(found) > 1 else [("", found[0][1])]


def _shown(band: tuple[str, Shares]) -> str:
    where, shares = band
    who: dict[str, list[str]] = {}
    for part in ORDER:
        if part in shares:
            who.setdefault(_device(shares[part]), []).append(part)
    texts = [f"{device}: {' '.join(parts)}" for device, parts in who.items()]
    return f"{where + '  ' if where else ''}{'; '.join(texts)}"


def _device(share: float) -> str:
    return "cpu" if share == 0 else "gpu" if share == 1 else f"gpu {share:.0%}"


# --- for programs


def to_json(report: SimulationReport) -> dict[str, Any]:
    """The same, with every number."""
    s = report.setting
    return {
        "prediction": WARNING,
        "machine": {"name": s.machine.name, "about": s.machine.about},
        "model": {"name": report.name, "weight_bytes": s.model.weight_bytes, "layers": len(s.model.layers)},
        "case": {"batch": s.batch, "prompt": s.prompt, "generate": s.generate},
        "problem": report.problem,
        "buckets": [_row(report.ours, row) for row in report.rows if report.ours],
        "policies": [_policy(p) for p in report.policies],
    }


def _row(ours: Prediction, row: BucketRow) -> dict[str, Any]:
    return {
        "bucket": row.bucket,
        "sequences": row.case.sequences,
        "tokens": row.case.rows,
        "seconds": row.step.seconds,
        "tokens_per_second": row.case.rows / row.step.seconds,
        "copied_bytes": int(row.step.copied),
        "gpu_share": _shares(ours, row.way),
    }


def _policy(p: Prediction) -> dict[str, Any]:
    return {
        "policy": p.placing.policy,
        "notes": list(p.placing.notes),
        "prefill_seconds": p.prefill.seconds,
        "decode_seconds": p.decode.seconds,
        "decode_tokens_per_second": p.tokens_per_second,
        "tokens_per_second": p.throughput,
        "copied_bytes": {"prefill": int(p.prefill.copied), "decode": int(p.decode.copied)},
        "memory": {"gpu": dict(p.bill.gpu), "cpu": dict(p.bill.cpu), "disk": p.bill.disk},
        "gpu_share": {"prefill": _shares(p, p.placing.prefill), "decode": _shares(p, p.placing.decode)},
    }


def _shares(p: Prediction, way: ComputeShares) -> list[dict[str, Any]]:
    """For each band its layers and the GPU's share of each part."""
    found, at = [], 0
    for band, shares in zip(p.placing.bands, way.bands, strict=True):
        if band.layers:
            names = [part.name for part in p.setting.model.layers[at]]
            entry: dict[str, Any] = {"first": at, "layers": band.layers}
            found.append(entry | {"parts": {name: shares.get(name, 0.0) for name in names}})
        at += band.layers
    return found


def policies_table(found: Sequence[Prediction]) -> Iterator[str]:
    """Rows of a Markdown table."""
    for p in found:
        decode_ms = 1000 * p.decode.seconds
        yield (
            f"| {p.placing.policy} | {p.prefill.seconds:.2f} | {decode_ms:.0f} | {p.tokens_per_second:.2f}"
            f" | {p.throughput:.2f} | {p.decode.copied / 1e9:.1f} | {'; '.join(p.placing.notes)} |"
        )
