"""The context of every endpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetrun.client.events import ModelInfo
from hetrun.client.interface import ChatClient
from hetrun.errors import EngineStopped, UserError
from hetrun.server.errors import api_error
from hetrun.server.library import ModelLibrary
from hetrun.server.middleware.concurrency import MOST_REQUESTS
from hetrun.server.middleware.request_counter import RequestTraffic
from hetrun.server.pictures.sources import Sources


@dataclass(frozen=True)
class Service:
    """The engine behind the endpoints, and how strictly requests are read."""

    client: ChatClient
    strict: bool = False  # refuse unknown fields and models, and apply OpenAI's own limits
    sampling: Mapping[str, object] = field(default_factory=dict)  # defaults of requests
    tool_parser: str = "auto"  # the format of tool calls: none, or a name in `tool_parsers.formats`
    reasoning_format: str = "auto"  # where reasoning goes: none leaves it in the text
    most_requests: int = MOST_REQUESTS  # held at a time
    needs_key: bool = False
    library: ModelLibrary | None = None  # models on this machine; None: only the server's own
    ollama: bool = False  # whether clients should take this server for Ollama's
    slot_save_path: Path | None = None  # the folder of saved slots
    keep_billing_header: bool = False  # of Claude Code, in prompts
    pictures: Sources = field(default_factory=Sources)  # what it may read that requests name by an address
    aliases: tuple[str, ...] = ()  # names of the model, of which answers have the first
    traffic: RequestTraffic = field(default_factory=RequestTraffic)
    created: int = field(default_factory=lambda: int(time.time()))

    async def info(self) -> ModelInfo:
        """The running model; if there is none, that is not the client's mistake."""
        try:
            info = await self.client.info()
        except UserError as error:
            raise api_error(EngineStopped(str(error))) from error
        return replace(info, aliases=self.aliases) if self.aliases else info
