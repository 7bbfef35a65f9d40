"""Signatures of thinking blocks. Nothing is verified: a signature carries the reasoning where the answer
omits it (`thinking.display`), so that the next request can give it back."""

from __future__ import annotations

import binascii
import hashlib
from base64 import b64decode, b64encode

OMITTED = "hetrun-thought:"


def signature_of(thought: str, *, omitted: bool) -> str:
    """The signature of reasoning; of reasoning that is `omitted`, it holds the text."""
    if omitted:
        return OMITTED + b64encode(thought.encode()).decode()
    return hashlib.blake2b(thought.encode(), digest_size=24).hexdigest()


def thought_of(signature: object) -> str:
    """The reasoning that a signature holds; empty if it holds none."""
    if not isinstance(signature, str) or not signature.startswith(OMITTED):
        return ""
    try:
        return b64decode(signature.removeprefix(OMITTED), validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        return ""
