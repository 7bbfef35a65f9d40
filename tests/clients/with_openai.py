"""OpenAI's Python library: over TCP with a key, and over a Unix socket to a strict server."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx
import openai

from tests.clients.checks import (
    HURRIED,
    HURRY,
    KEY,
    MESSAGES,
    MODEL,
    SCHEMA,
    SEEING_URL,
    SEEN,
    TOO_LONG,
    TOOL,
    UDS,
    URL,
    check,
    expect,
    good_city,
    package,
    raises,
    refuses_hurry,
    sees,
)

SAID: Any = MESSAGES
LONG: Any = TOO_LONG
TOOLS: Any = [TOOL]


def tcp(key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=URL, api_key=key, max_retries=0)


def uds() -> openai.OpenAI:
    # Its newer releases are typed for httpx2 and take both.
    http: Any = httpx.Client(transport=httpx.HTTPTransport(uds=UDS))
    return openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)


def chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=SAID, max_tokens=8, logprobs=True)
    expect(bool(answer.choices[0].message.content), answer)
    expect(answer.usage is not None and answer.usage.completion_tokens > 0, answer)


def stream(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=SAID, max_tokens=8, stream=True, stream_options=options
        )
    )
    expect(bool("".join(c.choices[0].delta.content or "" for c in chunks if c.choices)), chunks)
    expect(chunks[-1].usage is not None, chunks[-1])


def completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["One,", "Two,"], max_tokens=4, n=2, logprobs=2)
    expect(len(answer.choices) == 4 and answer.choices[3].index == 3, answer)


def structured(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model=MODEL, messages=SAID, response_format=form, max_tokens=60, temperature=0
    )
    good_city(answer.choices[0].message.content)


def tools(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=SAID, tools=TOOLS, tool_choice="required", max_tokens=80, temperature=0
    )
    calls = answer.choices[0].message.tool_calls
    expect(bool(calls) and calls[0].function.name == "look_up", answer)
    good_city(calls[0].function.arguments)
    back: Any = [
        *MESSAGES,
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": calls[0].id, "content": "It is a city."},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=back, tools=TOOLS, max_tokens=8)
    expect(answer.choices[0].finish_reason in ("stop", "length", "tool_calls"), answer)


def streamed_tools(client: openai.OpenAI) -> None:
    name = arguments = ""
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=SAID,
        tools=TOOLS,
        tool_choice="required",
        max_tokens=80,
        temperature=0,
        stream=True,
    ):
        for call in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            if call.index:
                continue  # it may call several times
            name += (call.function and call.function.name) or ""
            arguments += (call.function and call.function.arguments) or ""
    expect(name == "look_up", name)
    good_city(arguments)


def embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=["one", "two"])
    expect(len(answer.data) == 2 and len(answer.data[0].embedding) > 100, answer)


def responses(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16)
    expect(bool(whole.output_text) and whole.usage is not None, whole)
    counted = client.responses.input_tokens.count(model=MODEL, input="Say hello.")
    expect(whole.usage is not None and counted.input_tokens == whole.usage.input_tokens, counted)
    with client.responses.stream(model=MODEL, input="Say hello.", max_output_tokens=16) as events:
        last = [event.type for event in events][-1]
    expect(last in ("response.completed", "response.incomplete"), last)


def models(client: openai.OpenAI) -> None:
    expect([model.id for model in client.models.list()] == [MODEL], "models")


def errors(where: str, client: openai.OpenAI) -> None:
    """Each status as the class that the library has for it."""

    def asks(**more: object) -> object:
        said: dict[str, Any] = {"model": MODEL, "messages": SAID, "max_tokens": 4, **more}
        return client.chat.completions.create(**said)

    check(f"{where} 400", lambda: raises(openai.BadRequestError, lambda: asks(temperature=-1)))
    check(
        f"{where} too long",
        lambda: raises(openai.BadRequestError, lambda: asks(messages=LONG), "context_length_exceeded"),
    )
    hurry: Any = {"messages": HURRIED, "extra_body": HURRY}
    if where == "tcp":
        check("tcp 429", lambda: refuses_hurry(openai.RateLimitError, lambda: asks(**hurry)))
    check(f"{where} 404", lambda: raises(openai.NotFoundError, lambda: client.models.retrieve("nowhere")))


def pictures() -> None:
    client = openai.OpenAI(base_url=SEEING_URL, api_key=KEY, max_retries=0)
    url = f"data:image/png;base64,{SEEN['picture']}"
    parts: Any = [
        {"type": "text", "text": SEEN["question"]},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
    ]
    said: Any = [{"role": "user", "content": parts}]
    answer = client.chat.completions.create(model=SEEN["model"], messages=said, max_tokens=8, temperature=0)
    sees(answer.choices[0].message.content, answer.usage.prompt_tokens if answer.usage else None)
    items: Any = [
        {"type": "input_text", "text": SEEN["question"]},
        {"type": "input_image", "image_url": url, "detail": "auto"},
    ]
    asked: Any = [{"role": "user", "content": items}]
    response = client.responses.create(model=SEEN["model"], input=asked, max_output_tokens=8, temperature=0)
    sees(response.output_text, response.usage.input_tokens if response.usage else None)
    bad: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url[:-60]}}]}]
    create = client.chat.completions.create
    raises(openai.BadRequestError, lambda: create(model=SEEN["model"], messages=bad))


def everything(where: str, client: openai.OpenAI) -> None:
    for does in (chat, stream, completion, structured, tools, streamed_tools, embeddings, responses, models):
        check(f"{where} {does.__name__}", partial(does, client))
    errors(where, client)


if __name__ == "__main__":
    package("openai")
    everything("tcp", tcp())
    check("tcp 401", lambda: raises(openai.AuthenticationError, lambda: tcp("wrong").models.list()))
    everything("uds", uds())
    check("pictures", pictures)
    check(
        "uds 404 for a model",
        lambda: raises(
            openai.NotFoundError, lambda: uds().chat.completions.create(model="another", messages=SAID)
        ),
    )
