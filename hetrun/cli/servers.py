"""`hetrun ps` and `hetrun stop`: the servers of this user."""

from __future__ import annotations

from datetime import UTC, datetime
from time import time

from hetrun.cli.output import in_json, say
from hetrun.client.local_servers import Running, meant, running, stop
from hetrun.errors import printable

MOST_NAMES = 3  # of models in a line
HEADINGS = ("MODEL", "ADDRESS", "PID", "SINCE")
SPANS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def print_servers(as_json: bool) -> None:
    """Those that run now."""
    servers = running()
    if as_json:
        print(in_json([described(server) for server in servers], indent=1))
        return
    if not servers:
        say("no server of yours is running; hetrun serve starts one")
        return
    now = time()
    rows = [HEADINGS, *(row(server, now) for server in servers)]
    wide = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    for cells in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, wide, strict=True)).rstrip())


def end(name: str | None, everyone: bool, as_json: bool) -> None:
    """Stop the server that is meant, or all."""
    servers = meant(running(), name, everyone)
    stop(servers)
    if as_json:
        print(in_json([described(server) for server in servers], indent=1))
        return
    for server in servers:
        say(f"stopped {called(server)} on {server.address} (pid {server.pid})")
    if not servers:
        say("no server of yours is running")


def described(server: Running) -> dict[str, object]:
    """For programs."""
    since = datetime.fromtimestamp(server.since, UTC).isoformat(timespec="seconds")
    return {
        "models": list(server.models),
        "address": server.address,
        "pid": server.pid,
        "since": since,
        "state": server.state,
        "version": server.version,
    }


def row(server: Running, now: float) -> tuple[str, str, str, str]:
    """A line of the table."""
    state = "" if server.state == "ready" else f", {printable(server.state)}"
    since = f"{datetime.fromtimestamp(server.since):%Y-%m-%d %H:%M} ({span(now - server.since)}{state})"
    return called(server), printable(server.address) or "-", str(server.pid), since


def called(server: Running) -> str:
    """Its models, the first of them where there are many."""
    names = [printable(name) for name in server.models]
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return ", ".join([*names[:MOST_NAMES], *more]) or "-"


def span(seconds: float) -> str:
    """About so long, in the largest unit."""
    size, unit = next((pair for pair in SPANS if seconds >= pair[0]), SPANS[-1])
    return f"{max(0, seconds) // size:.0f} {unit}"
