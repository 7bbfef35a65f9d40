"""LangChain's OpenAI package."""

from __future__ import annotations

from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.checks import (
    HURRIED,
    HURRY,
    KEY,
    MODEL,
    SCHEMA,
    TOOL,
    URL,
    check,
    expect,
    package,
    raises,
    refuses_hurry,
)


def model(**more: object) -> ChatOpenAI:
    return ChatOpenAI(
        **{"base_url": URL, "api_key": KEY, "model": MODEL, "max_tokens": 60, "max_retries": 0, **more}
    )


def chat() -> None:
    answer = model().invoke("Say hello.")
    expect(bool(answer.content) and answer.usage_metadata["output_tokens"] > 0, answer)


def stream() -> None:
    expect(bool("".join(chunk.content for chunk in model().stream("Say hello."))), "nothing")


def structured() -> None:
    form = {"title": "city", "description": "A city.", **SCHEMA}
    found = model(temperature=0).with_structured_output(form, method="json_schema").invoke("Say hello.")
    expect(found["city"] in ("Paris", "Rome"), found)


def tools() -> None:
    answer = model(temperature=0).bind_tools([TOOL], tool_choice="required").invoke("Say hello.")
    call, *_ = answer.tool_calls
    expect(call["name"] == "look_up" and call["args"]["city"] in ("Paris", "Rome"), answer)


def embeddings() -> None:
    # It would send the tokens of OpenAI's own models otherwise, and fetch those from afar.
    maker: Any = OpenAIEmbeddings
    made = maker(base_url=URL, api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
    expect([len(v) > 100 for v in made.embed_documents(["one", "two"])] == [True, True], "embeddings")


def too_long() -> None:
    """Its own class, which is a kind of OpenAI's."""
    try:
        model().invoke("hello " * 5000)
    except openai.BadRequestError as error:
        expect(error.code == "context_length_exceeded", error)
        expect(type(error).__name__ == "OpenAIContextOverflowError", type(error))
        return
    raise AssertionError("no error")


if __name__ == "__main__":
    package("langchain-openai")
    for does in (chat, stream, structured, tools, embeddings):
        check(does.__name__, does)
    check("400", lambda: raises(openai.BadRequestError, lambda: model(temperature=-1).invoke("hello")))
    check("401", lambda: raises(openai.AuthenticationError, lambda: model(api_key="no").invoke("hello")))
    check("404", lambda: raises(openai.NotFoundError, lambda: model(model="another").invoke("hello")))
    hurry: Any = model(extra_body=HURRY)
    check("429", lambda: refuses_hurry(openai.RateLimitError, lambda: hurry.invoke(HURRIED)))
    check("too long", too_long)
