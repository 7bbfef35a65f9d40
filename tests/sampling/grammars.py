"""A small vocabulary with everything that is awkward, and what tests of grammars do with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

import numpy as np

from hetrun.client.sampling_params import Structure
from hetrun.sampling.grammar.token_mask import Grammars
from hetrun.sampling.interface import Constraint

# Tokens that span several parts of a text, parts of characters (also together with others), one that is there
# twice, and one that is nothing.
SPANNING = r"""{" ": ": ", "} "}} ] }] [[ ]] }, },{ : {" , true fals null 00 12 -1 0. e+ \u \" \n a ab abc id
name é 你好 🙂 "a":1 -12""".split()
SPACED = [": ", ", ", '"a": 1, "b": ', ": {", "a b"]
BROKEN = [b"\xc3", b"\xe4\xbd", b"\xa0\xe5", b"\xf0\x9f", b'"\xe4', b"\xa9}"]
PIECES = [
    *(bytes([b]) for b in range(256)),
    *(t.encode() for t in (*SPANNING, *SPACED)),
    *BROKEN,
    b"a",
    b"",
    b"<s>",
    b"</s>",
    b"<eot>",
]
EMPTY, CONTROL, END, OTHER_END = range(len(PIECES) - 4, len(PIECES))
TWICE = [token for token, piece in enumerate(PIECES) if piece == b"a"]


def grammars() -> Grammars:
    return Grammars(PIECES, {CONTROL, END, OTHER_END}, {END, OTHER_END})


def of_schema(schema: object) -> Structure:
    return Structure("json_schema", json.dumps(schema))


def steps(constraint: Constraint, seed: int, most: int = 300) -> Iterator[int]:
    """Any allowed token, again and again; the last one may be an end."""
    random = Random(seed)
    for _ in range(most):
        if constraint.finished:
            return
        allowed = np.flatnonzero(constraint.allowed())
        assert len(allowed), "nothing may follow, and it is not at its end"
        token = int(random.choice(allowed))
        constraint.accept(token)
        yield token


def at_end(constraint: Constraint) -> bool:
    """Asked anew each time: a type checker takes an attribute to stay what it was."""
    return constraint.finished


def text_of(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens if token not in (END, OTHER_END)).decode()


def write(constraint: Constraint, text: str) -> None:
    for byte in text.encode():
        assert constraint.allowed()[byte], f"{chr(byte)!r} of {text!r} may not come"
        constraint.accept(byte)
