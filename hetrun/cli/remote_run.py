"""`hetrun run --url`: one prompt, answered by a running server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import closing
from dataclasses import asdict, replace

from hetrun.cli import options
from hetrun.cli.output import in_json
from hetrun.cli.run import deviations, make_params, make_request, read_prompt, scored, shown
from hetrun.cli.sampling_options import ROWS
from hetrun.client.completion import completion
from hetrun.client.events import Event, GenerateRequest, ModelInfo
from hetrun.client.http_client import RemoteClient
from hetrun.client.sampling_params import SamplingParams
from hetrun.config import OPTIONS, Settings
from hetrun.errors import EngineStopped, OptionError

# What the server was told when it was started, or does by itself.
OWN_ENGINE = (*options.RUNNING, "chat_template", "prompt_cache", "offline")


def answer(
    settings: Settings,
    prompt: str | None,
    sampling: Mapping[str, object],
    *,
    raw: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Answer a prompt; with `as_json` all at once, else as it comes."""
    refuse_own_engine(settings)
    if "prompt_logprobs" in sampling:
        raise OptionError(f"{ROWS['prompt_logprobs'].flag} does not go with --url: run the model here for it")
    if "logprobs" in sampling and not as_json:
        raise OptionError(f"{ROWS['logprobs'].flag} is shown with --json only: add it")
    params = make_params(settings, sampling)
    request = make_request(settings, read_prompt(prompt), params, raw)
    assert settings.url is not None
    client = RemoteClient(settings.url, api_key=settings.api_key, model=settings.model)
    with asyncio.Runner() as runner:
        info = runner.run(client.info())
        if verbose:
            print(described(settings.url, info, params), file=sys.stderr)
        with closing(each(runner, client.stream(to_the_end(request, info)))) as coming:
            events = list(shown(coming, not as_json))
    if as_json:
        print(in_json(as_object(settings.url, info, events, params)))
    elif verbose or sys.stderr.isatty():
        print(summary(events[-1], params), file=sys.stderr)


def refuse_own_engine(settings: Settings) -> None:
    """OptionError for options that were given here, and are the server's own."""
    for name in OWN_ENGINE:
        if settings.origin(name) == "explicit":
            flag = OPTIONS[name].flags[-1]
            raise OptionError(f"{flag} does not go with --url: it is for a model that is loaded here")


def to_the_end(request: GenerateRequest, info: ModelInfo) -> GenerateRequest:
    """As long as a model that is loaded here would go on: servers end the continuation of a text early."""
    if request.messages is None and request.params.max_tokens is None and info.context:
        return replace(request, params=replace(request.params, max_tokens=info.context))
    return request


def each(runner: asyncio.Runner, events: AsyncGenerator[Event, None]) -> Generator[Event, None, None]:
    """The events of a request as they come; an error is raised."""

    async def following() -> Event | None:
        return await anext(events, None)

    try:
        while (event := runner.run(following())) is not None:
            if event.kind == "error":
                raise event.error or EngineStopped("the server does not say why it failed")
            yield event
    finally:
        runner.run(_ended(events))  # hangs up, so that the server stops as well


async def _ended(events: AsyncGenerator[Event, None]) -> None:
    await events.aclose()


def as_object(url: str, info: ModelInfo, events: list[Event], params: SamplingParams) -> dict[str, object]:
    """What `run --json` prints, as far as a server says it: no numbers of tokens, no plan, no memory."""
    done = completion(events)
    found: dict[str, object] = {
        "text": done.text,
        "finish_reason": done.finish_reason,
        "usage": asdict(done.usage),
        "timings": asdict(done.timings),
        "model": info.path,
        "url": url,
    }
    if params.logprobs is not None:
        found["logprobs"] = [without_numbers(scored(entry)) for entry in done.logprobs]
    return found


def without_numbers(said: dict[str, object]) -> dict[str, object]:
    """OpenAI's interface tells tokens by their texts."""
    tops = said["top_logprobs"]
    assert isinstance(tops, list)
    return said | {"id": None, "top_logprobs": [top | {"id": None} for top in tops]}


def described(url: str, info: ModelInfo, params: SamplingParams) -> str:
    """Who answers, and how tokens are drawn."""
    return f"model: {info.path} at {url}\nsampling: {', '.join(deviations(params, info.temperature))}"


def summary(last: Event, params: SamplingParams) -> str:
    """One line on how it went."""
    u, t = last.usage, last.timings
    drawn = "greedy" if params.temperature == 0 else f"seed {params.seed}"
    return (
        f"[{u.prompt_tokens} prompt tokens at {t.prompt_tok_s:.0f}/s, "
        f"{u.completion_tokens} tokens at {t.decode_tok_s:.0f}/s, {drawn}]"
    )
