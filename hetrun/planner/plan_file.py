"""Plans in files: what `hetrun plan --json` writes, and `--plan` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetrun.errors import OptionError
from hetrun.graph import Graph, in_scope
from hetrun.graph.sharding import KINDS, Share
from hetrun.planner.plan import BUCKETS, FORMAT, Buckets, Placement, share_out
from hetrun.system.files import read_text

MOST_BYTES = 16 << 20  # of a file with a plan
BEFORE, LATER = "257+", BUCKETS[-2:]
MOST_THREADS, MOST_TOKENS = 1 << 12, 1 << 20  # in it, as for --threads and --ubatch


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """What a file with a plan decides; the segments follow from it."""

    ubatch: int
    buckets: Buckets
    host_ubatch: int = 0


def load_plan(path: Path, graph: Graph) -> SavedPlan:
    """A plan as `hetrun plan --json` writes it, for this graph."""
    try:
        data = json.loads(read_text(path, MOST_BYTES))
        if data["format"] != FORMAT:
            raise OptionError(
                f"{path}: plan format {data['format']} is not known; this version reads {FORMAT}"
            )
        buckets = {
            str(p["bucket"]): (_count(p, "threads", MOST_THREADS), _placements(p)) for p in data["plans"]
        }
        for bucket in LATER if BEFORE in buckets else ():  # written when this was the last bucket
            buckets.setdefault(bucket, buckets[BEFORE])
        buckets.pop(BEFORE, None)
        at_once = _count(data, "host_ubatch", MOST_TOKENS) if data.get("host_ubatch") else 0
        saved = SavedPlan(
            ubatch=_count(data, "ubatch", MOST_TOKENS),
            buckets={b: buckets[b] for b in BUCKETS if b in buckets},
            host_ubatch=at_once,
        )
    except KeyError as e:
        raise OptionError(f"{path} is not a plan as `hetrun plan --json` writes it: it lacks {e}") from e
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise OptionError(f"{path} is not a plan as `hetrun plan --json` writes it: {e}") from e
    if missing := [b for b in BUCKETS if b not in buckets]:
        tokens = "token" if missing == ["1"] else "tokens"
        raise OptionError(f"{path} has no plan for steps of {', '.join(missing)} {tokens}")
    if unknown := [b for b in buckets if b not in BUCKETS]:
        raise OptionError(
            f"{path}: steps of {unknown[0]} tokens are not a bucket; the buckets are {', '.join(BUCKETS)}"
        )
    for placement in dict.fromkeys(p for _, placements in buckets.values() for p in placements):
        if not any(in_scope(op.scope, placement.scope) for op in graph.ops):
            raise OptionError(f"{path} places {placement.scope}, which the model does not have")
    for _, placements in buckets.values():
        share_out(graph, placements)  # which refuses shares that the model cannot be cut into
    return saved


def _count(data: Mapping[str, object], key: str, most: int) -> int:
    value = data[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{key} must be a number from 1 to {most}, not {value!r}")
    return value


def _placements(plan: Mapping[str, Any]) -> tuple[Placement, ...]:
    found = tuple(_placement(dict(facts)) for facts in plan["placements"])
    for value in (text for p in found for text in (p.scope, p.backend, p.why)):
        if not isinstance(value, str):
            raise ValueError(f"a placement is made of texts, not of {value!r}")
    return found


def _placement(facts: dict[str, Any]) -> Placement:
    share = facts.pop("share", None)
    if share is None:
        return Placement(**facts)
    if share.get("kind") not in KINDS:
        raise ValueError(f"a share is of {', '.join(KINDS)}, not of {share.get('kind')!r}")
    for name in ("a", "b", "of"):
        if type(share.get(name)) is not int:
            raise ValueError(f"a share has numbers a, b and of, not {share.get(name)!r}")
    order, whole, moving = share.pop("order", []), share.pop("whole", False), share.pop("moving", False)
    if not isinstance(order, list) or any(type(n) is not int for n in order) or type(whole) is not bool:
        raise ValueError(f"a share has an order of numbers, and is whole or not; not {order!r} and {whole!r}")
    if type(moving) is not bool:
        raise ValueError(f"the experts of a share are moving or not; not {moving!r}")
    return Placement(**facts, share=Share(**share, order=tuple(order), whole=whole, moving=moving))
