"""What engines are told: the options of the command line, as hetrun reads them from the environment."""

from __future__ import annotations

import os
from pathlib import Path

from hetrun.errors import OptionError
from hetrun.tools.batch.worker import Wanted
from hetrun_ray.words import StartEngines

# Where a server listens and what it offers is ours to say, and requests bring their own.
NOT_THEIRS = (
    *("host", "port", "uds", "allowed_hosts", "cors_origins", "url"),
    *("models", "models_max", "sleep_idle"),
    *("max_tokens", "temperature", "seed", "system"),
)


def for_engines(where: str, wanted: Wanted) -> StartEngines:
    """The same for all nodes. What a node's own environment and configuration say does not count."""
    if wanted.settings.get("prompt_cache") is not None:
        raise OptionError("--prompt-cache is a file of one engine: it cannot be combined with --workers ray:")
    chosen = {name: value for name, value in wanted.settings.items() if name not in NOT_THEIRS}
    if wanted.model is not None:
        chosen["model"] = wanted.model
    options = {f"HETRUN_{name.upper()}": _text(name, value) for name, value in chosen.items()}
    return StartEngines(where, {**options, "HETRUN_CONFIG": os.devnull}, wanted.settings.get("vram") != 0)


def _text(name: str, value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case tuple():
            return ",".join(map(str, value))
        case Path():
            return _placed(str(value))
    if name == "model":
        return _placed(str(value))
    kind, colon, draft = str(value).partition(":")
    return f"{kind}:{_placed(draft)}" if name == "spec" and colon else str(value)


def _placed(path: str) -> str:
    """A path that nodes understand, who stand in other folders; a name of the hub as it is."""
    full = os.path.expanduser(path)
    return os.path.abspath(full) if os.path.exists(full) else path
