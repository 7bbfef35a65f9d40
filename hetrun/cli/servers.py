"""`hetrun ps` and `hetrun stop`: this user's running servers."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from hetrun.cli.output import in_json, say
from hetrun.client import local_servers
from hetrun.client.local_servers import RunningServer, ServedModel
from hetrun.client.model_catalog import identity, name_of
from hetrun.errors import OptionError, UserError
from hetrun.system.terminal_text import align_columns, visible
from hetrun.system.units import format_bytes

HEAD = ("MODEL", "ADDRESS", "MEMORY", "SINCE", "REQUESTS", "PID")
SPANS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def print_servers(as_json: bool) -> None:
    """The servers of this user, a model in each line."""
    servers = local_servers.running_servers()
    if as_json:
        print(in_json([as_object(server) for server in servers], indent=1))
        return
    if not servers:
        say("no server of yours is running; hetrun serve starts one")
        return
    rows = [HEAD, *(row for server in servers for row in rows_of(server))]
    print("\n".join(align_columns(rows)))


def as_object(server: RunningServer) -> dict[str, object]:
    """What `ps --json` prints of a server."""
    if server.facts is None:
        return {"pid": server.pid, "socket": str(server.socket), "error": server.why_not}
    facts = asdict(server.facts)
    del facts["options"]
    for model in facts["models"]:
        del model["identity"]
    return facts | {"socket": str(server.socket)}


def rows_of(server: RunningServer) -> Iterator[tuple[str, ...]]:
    """A row for each model; those that are not loaded share one."""
    facts = server.facts
    if facts is None:
        yield ("?", "?", "", "", visible(server.why_not), str(server.pid or "?"))
        return
    where, since, pid = visible(facts.address), ago(time.time() - facts.since), str(facts.pid)
    shown = [model for model in facts.models if model.status != "unloaded"]
    for model in shown:
        yield (visible(model.name), where, memory_of(model), since, str(model.requests), pid)
    if asleep := [model.name for model in facts.models if model.status == "unloaded"]:
        name = asleep[0] if len(asleep) == 1 else f"{len(asleep)} models"
        yield (visible(name), where, "not loaded", since, "0", pid)


def memory_of(model: ServedModel) -> str:
    """What it takes, or how far it is."""
    if model.status == "loading":
        return f"loading {model.progress:.0%}"
    if model.status != "loaded":
        return visible(model.status)
    return format_bytes(model.memory) if model.memory else "?"


def ago(seconds: float) -> str:
    """A span of time: 5 s, 12 min, 3 h, 2 d."""
    size, unit = next((span for span in SPANS if seconds >= span[0]), (1, "s"))
    return f"{max(seconds, 0) // size:.0f} {unit}"


def stop_servers(name: str | None, all_of_them: bool) -> None:
    """Stop one server, or all."""
    if name is not None and all_of_them:
        raise OptionError(f"{name} and --all are both given: use only one of them")
    servers = local_servers.running_servers()
    if not servers:
        raise UserError("no server of yours is running")
    for server in servers if all_of_them else [meant(name, servers)]:
        if server.facts is None:
            mend = f"; to end it: kill {server.pid}" if server.pid else ""
            raise UserError(f"the server at {server.socket}: {server.why_not}{mend}")
        local_servers.stop(server)
        say(f"stopped {names(server)} on {server.facts.address}")


def meant(name: str | None, servers: Sequence[RunningServer]) -> RunningServer:
    """The server that a word on the command line means."""
    found = list(servers) if name is None else named(name, servers)
    if len(found) == 1:
        only = found[0]
        if name is None or called(name, only) or not only.facts or len(only.facts.models) == 1:
            return only
        mend = f"hetrun stop {only.pid} stops the server"
        raise UserError(f"{name} is one of {names(only)}, which stop together: {mend}")
    listed = "; ".join(f"{names(server)} on {address_of(server)}, pid {server.pid}" for server in servers)
    if not found:
        raise UserError(f"no server of yours is called {name}. Running: {listed}")
    raise UserError(f"{len(found)} servers match: give an address, a pid or --all. Running: {listed}")


def named(name: str, servers: Sequence[RunningServer]) -> list[RunningServer]:
    """The servers that may be meant: those that are called so; else those that have the model which is run by
    this name, and may have it under another one (`smollm2` is served under the name of its file)."""
    if found := [server for server in servers if called(name, server)]:
        return found
    path = path_of(name)
    if files := identity(path):
        if found := [server for server in servers if any(files == m.identity for m in models_of(server))]:
            return found
    # Files that were changed or removed since they were loaded, and models that are not loaded.
    known = {name, name_of(path)}
    return [server for server in servers if any(model.name in known for model in models_of(server))]


def path_of(name: str) -> Path:
    """The file or folder that `hetrun run` takes for a name; what was typed, if there is none."""
    from hetrun.loader.hub.resolve import find

    try:
        return Path(os.path.abspath(find(name, allowed=False)))
    except UserError:
        return Path(name)


def models_of(server: RunningServer) -> tuple[ServedModel, ...]:
    """The models of a server, as far as it says."""
    return server.facts.models if server.facts else ()


def called(name: str, server: RunningServer) -> bool:
    """Whether it is this server's pid, address or only model; of several models none stands for all."""
    if name == str(server.pid):
        return True
    facts = server.facts
    if facts is None:
        return False
    models = [model.name for model in facts.models]
    return place(name) == place(facts.address) or models == [name.removesuffix(".gguf")]


def place(address: str) -> str:
    """An address without what may be left out: a port alone is one on this machine."""
    if address.startswith("unix:"):
        return address
    try:
        found = urlsplit(address if "://" in address else f"http://{address}")
        host, port = found.hostname or "", found.port
    except ValueError:
        return address
    if address.isdecimal():
        host, port = "127.0.0.1", int(address)
    return f"{'127.0.0.1' if host == 'localhost' else host}:{port}"


def names(server: RunningServer) -> str:
    """The models of a server, in words."""
    models = server.facts.models if server.facts else ()
    return visible(models[0].name) if len(models) == 1 else f"{len(models)} models"


def address_of(server: RunningServer) -> str:
    """Where it listens."""
    return visible(server.facts.address) if server.facts else "an unknown address"
