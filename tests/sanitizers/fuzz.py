"""One process of the fuzzer: inputs of its cases in turn, in a copy of the checkout whose libraries are
sanitized.

    python -m tests.sanitizers.fuzz PLAIN --seconds 60 [--inputs N] [--seed 1] [--case product] [--only 17]

PLAIN is the checkout whose ordinary libraries judge. It says what it tries, so that what ends it is known.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import traceback
from collections import Counter
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from random import Random
from time import monotonic

from tests.sanitizers.builds import LEVELS
from tests.sanitizers.inputs import Case, Input
from tests.sanitizers.memory import memory

# Where each case is, by the library that it is about. What one does not need is not imported: that takes a
# sanitized process seconds.
CASES = {
    "products": {
        "product": "products:product",
        "partial_product": "products:partial_product",
        "expert_products": "products:expert_products",
        "lookup": "products:lookup",
    },
    "attention": {"attention": "layers:attention"},
    "recurrent": {"states": "layers:states"},
    "ring_reader": {"ring": "supplies:ring"},
    "expert_slots": {"experts": "supplies:experts"},
    "pages": {"pages": "supplies:pages"},
    "top_logits": {"top_logits": "others:top_logits"},
    "experts": {"pairs": "others:pairs"},
    "sigbus": {"cut_files": "others:cut_files"},
    "affinity_calls": {"seats": "others:seats"},
    "read_loops": {"reads": "others:reads"},
}
BY_NAME = {name: where for cases in CASES.values() for name, where in cases.items()}
OFTEN = {
    "seats": 20,
    "reads": 20,
    "cut_files": 10,
    "top_logits": 4,
    "pairs": 4,
}  # one turn in this number: they are small
SAY_EVERY_S = 1.0
LIMIT_S = 300  # of one input: threads that wait for each other for ever end the process, with their stacks


@cache
def case_of(name: str) -> Case:
    """The function that makes an input and judges what becomes of it."""
    module, _, function = BY_NAME[name].partition(":")
    found: Case = getattr(import_module(f"tests.sanitizers.{module}"), function)
    return found


def attempt(name: str, seed: int, number: int, plain: Path, levels: tuple[str, ...]) -> None:
    """One input: its numbers follow from the seed, the case and its own number."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    rng = Random(f"{seed} {name} {number}")
    with memory(rng) as made:
        case_of(name)(Input(rng, made, plain, levels))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("plain", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument(
        "--inputs", type=int, default=0, help="of each case, at most; 0: as many as there is time for"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--case", action="append", choices=BY_NAME)
    parser.add_argument("--only", type=int, help="this input alone")
    parser.add_argument("--levels", nargs="*", default=list(LEVELS))
    given = parser.parse_args()
    names, done, end = given.case or list(BY_NAME), Counter[str](), monotonic() + given.seconds
    said = monotonic()
    for number in count(given.first) if given.only is None else [given.only]:
        if monotonic() > end or (given.inputs and number - given.first >= given.inputs):
            break
        for name in names:
            if given.only is None and number % OFTEN.get(name, 1):
                continue
            print(json.dumps({"begin": name, "number": number}), flush=True)
            try:
                attempt(name, given.seed, number, given.plain, tuple(given.levels))
            except Exception:  # a wrong result is a finding, and the next input is tried
                print(
                    json.dumps({"wrong": name, "number": number, "why": traceback.format_exc()}), flush=True
                )
            done[name] += 1
        if monotonic() - said > SAY_EVERY_S:
            said = monotonic()
            print(json.dumps({"done": done}), flush=True)
    print(json.dumps({"done": done, "end": True}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
