"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hetrun.events import Event, GenerateRequest, ModelInfo, TokenLogprob
from hetrun.server import orders, scores
from hetrun.server.answers import Answer, Choice, Events, Json, Template, Whole, finish_reason, respond
from hetrun.server.asker import asker
from hetrun.server.body import json_object
from hetrun.server.counts import Counts
from hetrun.server.crowd import Crowd
from hetrun.server.messages import messages, template_options
from hetrun.server.models import meant
from hetrun.server.orders import Order
from hetrun.server.sampling import sampling_params
from hetrun.server.service import Service
from hetrun.server.sse import json_text

KNOWN = (*orders.COMMON, *scores.CHAT_NAMES, "messages", "chat_template_kwargs")


def routes(service: Service) -> list[Route]:
    async def complete(request: Request) -> Response:
        body = await json_object(request)
        here = await meant(body, service)
        order = chat_order(body, await here.info(), here, asker(request, body))
        return await respond(request, here, order, whole, chunks)

    crowd = Middleware(Crowd, most_requests=service.most_requests)
    paths = ("/v1/chat/completions", "/chat/completions")
    return [Route(path, complete, methods=["POST"], middleware=[crowd]) for path in paths]


def chat_order(body: Mapping[str, object], info: ModelInfo, service: Service, client: str = "") -> Order:
    """Read a request of this client; ApiError names the field that is wrong."""
    orders.check(body, info, service, KNOWN)
    wanted = scores.of_chat(body)
    params = sampling_params(body, info, service.sampling, wanted)
    prompt = GenerateRequest(params, messages=messages(body), template_options=template_options(body))
    return orders.bounded(orders.order(body, info, client, [prompt], wanted, "messages"))


def whole(order: Order, found: Whole) -> Json:
    """The answer in one piece."""
    choices = (_choice(i, choice, order) for i, choice in enumerate(found.choices))
    more = found.totals()
    if order.wanted.prompt is not None:
        # Nothing comes before the first token.
        more["prompt_logprobs"] = [None, *map(scores.ranked, found.choices[0].prompt.scores)]
    return Answer(order.info, "chat.completion", "chatcmpl").body(choices, **more)


def _choice(index: int, choice: Choice, order: Order) -> Json:
    message = {"role": "assistant", "content": choice.text, "refusal": None}
    logprobs = None if order.wanted.answer is None else _content(choice.scores)
    return {
        "index": index,
        "message": message,
        "finish_reason": choice.finish_reason,
        "logprobs": logprobs,
    }


def _content(found: list[TokenLogprob]) -> Json:
    return {"content": list(map(scores.entry, found)), "refusal": None}


async def chunks(order: Order, events: Events) -> AsyncGenerator[str, None]:
    """The answer in pieces, of each choice: the role, texts, the reason for the end; then what it took.

    Pieces are JSON already: there is one for each token.
    """
    answer, counts = Answer(order.info, "chat.completion.chunk", "chatcmpl"), Counts(order.tried)
    templates: dict[int, Template] = {}
    usage: Json = {"usage": None} if order.include_usage else {}

    def chunk(index: int, delta: Json, logprobs: Json | None = None) -> Json:
        choice: Json = {"index": index, "delta": delta, "finish_reason": None, "logprobs": logprobs}
        return answer.body([choice], **usage)

    def end(index: int, event: Event) -> Json:
        choice: Json = {"index": index, "delta": {}, "finish_reason": finish_reason(event), "logprobs": None}
        last = counts.ended(index, event) == order.choices and not order.include_usage
        return answer.body([choice], **usage, **({"timings": counts.timings()} if last else {}))

    async with aclosing(events):
        async for index, event in events:
            if event.kind == "error":
                raise order.failure(event.error)
            if index not in templates:
                templates[index] = Template(chunk(index, {"content": ""}), "content")
                yield json_text(chunk(index, {"role": "assistant", "content": ""}))
            if event.kind == "token" and event.logprob is not None:
                yield json_text(chunk(index, {"content": event.text}, _content([event.logprob])))
            elif event.text:
                yield templates[index].with_text(event.text)
            if event.kind == "done":
                yield json_text(end(index, event))
    if order.include_usage:
        yield json_text(answer.body([], usage=counts.usage(), timings=counts.timings()))
