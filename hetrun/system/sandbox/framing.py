"""What goes through the pipe: JSON behind its length. Never pickle: a stranger may have written it."""

from __future__ import annotations

import json
import struct

HEAD = struct.Struct(">I")


def framed(message: object) -> bytes:
    """A message as it goes through the pipe."""
    data = json.dumps(message, ensure_ascii=False).encode()
    return HEAD.pack(len(data)) + data


def length(head: bytes) -> int:
    """How many bytes follow a head."""
    (found,) = HEAD.unpack(head)
    return int(found)
