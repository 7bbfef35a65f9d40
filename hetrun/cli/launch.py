"""`hetrun launch`: start an agent with a model of this machine, or list the agents."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from difflib import get_close_matches

from hetrun.cli.exit_codes import heed_sigterm
from hetrun.cli.output import in_json, say
from hetrun.cli.progress import OPENING, loading
from hetrun.config import Settings
from hetrun.errors import OptionError, UserError
from hetrun.system.terminal_text import visible
from hetrun.tools.launch import server
from hetrun.tools.launch.agents import AGENTS, Agent, Start, Target
from hetrun.tools.launch.server import ServerModel
from hetrun.tools.launch.start import SECRET, as_shell, folder_of, program, run

ANY = "MODEL"  # in the list, where no model was chosen


def launch(settings: Settings, name: str, arguments: Sequence[str], keep: bool) -> int:
    """Start an agent, and a server before if none runs; the exit code of the agent."""
    agent = agent_of(name)
    if program(agent) is None:
        raise UserError(f"{agent.title} is not installed: {agent.install}")
    with ExitStack() as ends:
        choice = server.named(settings)
        own = choice is None
        if choice is None:
            heed_sigterm()  # until the agent runs, which then hears it
            model = server.planned(settings).model or ""
            say(f"starting a server with {model}; it ends with {agent.title}, or stays with --keep")
            with loading(OPENING) as tell:
                choice = ends.enter_context(server.started(settings, model, keep, tell))
        choice = server.seen(choice, settings.api_key, say)
        start = start_of(agent, choice, settings, arguments)
        warn(agent, choice)
        for path in start.files:
            say(f"{path} is written for {agent.title}")
        say(f"{agent.title} uses {choice.model} on {choice.url}")
        code = run(agent, start)
    if own and keep:
        say(f"the server on {choice.url} stays; hetrun stop {choice.pid} stops it")
    return code


def warn(agent: Agent, choice: ServerModel) -> None:
    """Say it if the context is too short for the agent's own prompts."""
    if 0 < choice.context < agent.context:
        say(
            f"{choice.model} has a context of {choice.context:,} tokens, and {agent.title} needs about "
            f"{agent.context:,}: requests may be refused. A model with a longer context, or more --ram, helps"
        )


def show(settings: Settings, name: str, arguments: Sequence[str], as_json: bool) -> None:
    """Print what would be started and written; nothing is."""
    agent = agent_of(name)
    choice = server.named(settings)
    runs = choice is not None
    if choice is None:
        choice = server.planned(settings)
    elif choice.is_loaded:
        choice = server.seen(choice, settings.api_key, say)
    start = start_of(agent, choice, settings, arguments)
    serve = None if runs else ["hetrun", *server.serve_arguments(settings, choice.model or "")]
    if as_json:
        print(in_json(as_object(agent, start, serve), indent=1))
        return
    if serve is not None:
        print(as_shell(Start(tuple(serve))))
    secret = settings.api_key or ""
    for path, content in start.files.items():
        text = content.replace(secret, SECRET) if secret else content
        print(f"# {path}:\n" + "\n".join(f"# {line}" for line in text.splitlines()))
    print(as_shell(start, secret))
    if program(agent) is None:
        say(f"{agent.title} is not installed: {agent.install}")


def print_agents(settings: Settings, as_json: bool) -> None:
    """The agents: which are installed, and how each would be started."""
    try:
        choice = server.named(settings) or server.planned(settings)
    except UserError:
        choice = ServerModel(settings.url or server.PLANNED, settings.model)
    choice = replace(choice, model=choice.model or ANY)
    starts = [(agent, start_of(agent, choice, settings, ())) for agent in AGENTS.values()]
    if as_json:
        print(in_json([as_object(agent, start) for agent, start in starts], indent=1))
        return
    for agent, start in starts:
        where = program(agent) or f"not installed: {agent.install}"
        print(f"{agent.name:<9} {agent.title:<12} {visible(where)}")
        print(f"{'':<9} {visible(in_short(start))}")
    if sys.stderr.isatty():
        say("hetrun launch NAME starts one, with a server if none runs; --print shows all that it would get")


def in_short(start: Start) -> str:
    """How it is started, in one line."""
    names = [name for name in start.env if not name.endswith(("_KEY", "_TOKEN"))]
    more = f", ... ({len(names) - 2} more)" if len(names) > 2 else ""
    by = [f"{', '.join(names[:2])}{more}"] if names else []
    by += [str(path) for path in start.files]
    by += ["options"] if len(start.command) > 2 else []
    return f"by {' and '.join(by)}"


def as_object(agent: Agent, start: Start, serve: Sequence[str] | None = None) -> dict[str, object]:
    """What --json prints of an agent."""
    return {
        "name": agent.name,
        "title": agent.title,
        "program": program(agent),
        "install": agent.install,
        "context": agent.context,
        "server": serve,
        "command": start.command,
        "env": start.env,
        "files": {str(path): content for path, content in start.files.items()},
    }


def agent_of(name: str) -> Agent:
    """The agent of this name."""
    if name in AGENTS:
        return AGENTS[name]
    close = get_close_matches(name, AGENTS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(AGENTS)}"
    raise OptionError(f"there is no agent {name[:80]}; {hint}")


def start_of(agent: Agent, choice: ServerModel, settings: Settings, arguments: Sequence[str]) -> Start:
    """How this agent is started with this model."""
    url = choice.url.rstrip("/").removesuffix("/v1")
    if url.startswith("unix:"):
        raise OptionError(f"{agent.title} cannot use a Unix socket: start hetrun serve with a port")
    url = url if "://" in url else f"http://{url}"
    target = Target(url, choice.model or "", settings.api_key or "", choice.context, folder_of(agent))
    return agent.start(target, arguments)
