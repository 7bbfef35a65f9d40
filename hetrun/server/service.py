"""What every endpoint is given."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetrun.client import ChatClient
from hetrun.server.crowd import MOST_REQUESTS


@dataclass(frozen=True)
class Service:
    """The engine behind the endpoints, and how strictly requests are read."""

    client: ChatClient
    strict: bool = False  # refuse unknown fields and models, and OpenAI's own limits hold
    sampling: Mapping[str, object] = field(default_factory=dict)  # for requests that do not say otherwise
    most_requests: int = MOST_REQUESTS  # held at a time
    created: int = field(default_factory=lambda: int(time.time()))
