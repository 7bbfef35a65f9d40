"""What every endpoint is given."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hetrun.client import ChatClient


@dataclass(frozen=True)
class Service:
    """The engine behind the endpoints, and how strictly requests are read."""

    client: ChatClient
    strict: bool = False  # refuse unknown fields and models, and OpenAI's own limits hold
    created: int = field(default_factory=lambda: int(time.time()))
