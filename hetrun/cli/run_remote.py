"""`hetrun run` without an engine of its own: the server of --url, or one of this user that has the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from hetrun.cli.options import RUNNING, TEMPLATE
from hetrun.client import local_servers
from hetrun.client.events import Event, GenerateRequest
from hetrun.client.http_client import RemoteClient, ServerUnreachable
from hetrun.client.local_servers import PrivateClient, RunningServer, ServedModel
from hetrun.client.model_catalog import identity
from hetrun.client.pictures import check_reads
from hetrun.config import OPTIONS, Settings, default_model
from hetrun.errors import BackendError, ContextFull, EngineStopped, OptionError, Overloaded, UserError

OWN = (*RUNNING, *TEMPLATE, "prompt_cache")  # options for an engine of one's own
# What a server cannot do now, or with its context, an engine here may.
PASSING = (ContextFull, Overloaded, EngineStopped, BackendError, ServerUnreachable)


@dataclass(frozen=True)
class RemoteRunner:
    """A server that answers instead of an engine in this process."""

    where: str
    model: str
    events: Callable[[GenerateRequest], Iterator[Event]]
    knows_tokens: bool = True

    def as_object(self) -> dict[str, object]:
        """What `run --json` says of it; OpenAI's interface has no numbers of tokens."""
        unknown: dict[str, object] = {} if self.knows_tokens else {"tokens": None}
        return unknown | {"server": self.where, "model": self.model}


@contextmanager
def of_url(
    settings: Settings, say: Callable[[str], None], pictures: tuple[bytes, ...] = ()
) -> Iterator[RemoteRunner]:
    """The server of --url; `say` reports that it loads the model. `pictures` belong to what it is asked."""
    assert settings.url is not None
    for name in OWN:
        if settings.origin(name) == "explicit":
            flag = OPTIONS[name].flags[-1]
            raise OptionError(f"{flag} is for a model that is loaded here: leave out {flag} or --url")
    client = RemoteClient(
        settings.url, api_key=settings.api_key, model=settings.model, tell=say, api=settings.api
    )
    with asyncio.Runner() as runner:
        check_reads(runner.run(client.info()), pictures)
        if client.is_guess:
            names = ", ".join(info.id for info in runner.run(client.models()))
            raise OptionError(
                f"{settings.url} has several models and none is loaded; choose one with -m: {names}"
            )

        def events(request: GenerateRequest) -> Iterator[Event]:
            return _events(runner, client.stream(request))

        yield RemoteRunner(settings.url, client.model, events, knows_tokens=False)


def check_for_url(request: GenerateRequest) -> GenerateRequest:
    """The request as another server can be asked: probabilities of a prompt come with its echo only."""
    params = request.params
    if params.prompt_logprobs is None:
        return request
    if request.text is None or params.max_tokens != 0:
        raise OptionError(
            "--prompt-logprobs with --url needs --raw and -n 0: the text is scored, not answered"
        )
    return replace(request, echo=True)


def find(settings: Settings) -> tuple[RunningServer, ServedModel] | None:
    """A server of this user that has the model and would give the answer that this process would."""
    own = any(settings.origin(name) == "explicit" for name in OWN)
    if settings.no_server or own or settings.prompt_cache:
        return None
    try:
        model = Path(settings.model).expanduser() if settings.model else default_model()
        return local_servers.with_model(identity(model), settings)
    except (OSError, UserError):
        return None  # nothing that is wrong there keeps anybody from loading the model here


@contextmanager
def of_own(found: tuple[RunningServer, ServedModel]) -> Iterator[RemoteRunner]:
    """A server of this user."""
    server, model = found
    assert server.facts is not None
    client = PrivateClient(server.socket)
    with asyncio.Runner() as runner:
        yield RemoteRunner(
            server.facts.address,
            model.name,
            lambda request: _events(runner, client.generate(model.name, request)),
        )


def begun(events: Iterator[Event]) -> Iterator[Event]:
    """The same events; an error that comes before all others is raised now."""
    return chain([next(events)], events)


def _events(runner: asyncio.Runner, stream: AsyncGenerator[Event, None]) -> Iterator[Event]:
    """The events as they come; an error is raised. Leaving the loop stops the answer."""
    try:
        while True:
            event = runner.run(_next(stream))
            if event.kind == "error":
                raise event.error or EngineStopped("the server gave no reason")
            # The server has loaded the model at some other time.
            yield replace(event, timings=replace(event.timings, load_s=0.0)) if event.last else event
            if event.last:
                return
    finally:
        runner.run(_close(stream))


async def _next(stream: AsyncGenerator[Event, None]) -> Event:
    return await anext(stream)


async def _close(stream: AsyncGenerator[Event, None]) -> None:
    await stream.aclose()
