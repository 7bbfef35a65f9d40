"""POST /v1/completions: OpenAI's older endpoint, which continues texts and scores them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import replace

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hetrun.client.events import Event, GenerateRequest, ModelInfo, TokenLogprob
from hetrun.server import request as orders
from hetrun.server.body import json_object
from hetrun.server.client_id import asker
from hetrun.server.errors import ApiError, wrong_type
from hetrun.server.fields import COMPLETION_LOGPROBS, LogprobCount, count, flag, wanted_of_completion
from hetrun.server.infill import check_fills, fill_gaps
from hetrun.server.inputs import Field, texts
from hetrun.server.json_stream import json_text
from hetrun.server.logprobs import Echo, Offsets, legacy
from hetrun.server.middleware.concurrency import Crowd
from hetrun.server.pictures.parts import marked
from hetrun.server.request import MOST_CHOICES, MOST_TOGETHER, Order
from hetrun.server.response_driver import (
    AnswerFrame,
    ChoiceStream,
    ChoicesWriter,
    Json,
    finish_reason,
    prompt_progress,
    respond,
    totals,
    usage_chunk,
)
from hetrun.server.routes.models import meant
from hetrun.server.sampling import limit_field, sampling_params
from hetrun.server.service import Service
from hetrun.server.sse import EventStream
from hetrun.server.usage import UsageSum

MOST_TOKENS = 16  # OpenAI's default length limit
STRICT_BEST_OF = 20
PROMPT = Field("prompt", "prompt", "continue", MOST_TOGETHER, blank=True)
KNOWN = (*orders.COMMON, *COMPLETION_LOGPROBS, PROMPT.name, "suffix", "echo", "best_of")


def routes(service: Service) -> list[Route]:
    async def complete(request: Request) -> Response:
        body = await json_object(request)
        here = await meant(body, service)
        order = completion_order(body, await here.info(), here, asker(request, body))
        if suffix := _suffix(body, order):
            order = await fill_gaps(order, suffix, here)
        return await respond(
            request, here, order, whole=lambda order: ChoicesWriter(order, whole), stream=CompletionStream
        )

    crowd = Middleware(Crowd, most_requests=service.most_requests)
    # Without /v1 it is llama.cpp's own endpoint, with other fields (`llamacpp/`).
    return [Route("/v1/completions", complete, methods=["POST"], middleware=[crowd])]


def completion_order(
    body: Mapping[str, object], info: ModelInfo, service: Service, client: str = ""
) -> Order:
    """Read a request of this client; raises an ApiError that names a wrong field."""
    orders.check(body, info, service, KNOWN)
    echo = flag(body, "echo")
    wanted = wanted_of_completion(body, echo)
    params = sampling_params(body, info, service.sampling, _computed(body, wanted, echo), MOST_TOKENS)
    prompt = body.get(PROMPT.name)
    if isinstance(prompt, dict) and isinstance(text := prompt.get("prompt_string"), str):
        # As llama.cpp has it: a text with a mark for each picture.
        pictures = marked(text, prompt.get("multimodal_data") or [], PROMPT.name, info)
        requests = [GenerateRequest(params, text=text, pictures=pictures, echo=echo)]
    else:
        requests = [
            GenerateRequest(params, text=prompt, echo=echo)
            if isinstance(prompt, str)
            else GenerateRequest(params, tokens=prompt, echo=echo)
            for prompt in texts(body, info, PROMPT)
        ]
    return _tried(
        body,
        orders.order(body, info, client, requests, wanted=wanted, field=PROMPT.name),
        strict=service.strict,
    )


def _suffix(body: Mapping[str, object], order: Order) -> str:
    """What stands behind the gap that the model is to fill; empty: there is none."""
    suffix = body.get("suffix") or ""
    if not isinstance(suffix, str):
        raise wrong_type("suffix", "a text", suffix)
    if suffix:
        check_fills(order.info, 400, "suffix")
    if suffix and order.prompts[0].pictures:
        raise ApiError("suffix and pictures exclude each other", "suffix", "invalid_value")
    if suffix and order.prompts[0].echo:
        message = "suffix and echo exclude each other: the model sees both texts with marks between them"
        raise ApiError(message, "echo", "invalid_value")
    return suffix


def _computed(body: Mapping[str, object], wanted: LogprobCount, echo: bool) -> LogprobCount:
    """The engine's request: without an answer it computes only the prompt's scores; `best_of` needs those of
    answers."""
    limit = limit_field(body)
    if echo and limit is not None and body[limit] == 0 and wanted.prompt is None:
        wanted = replace(wanted, prompt=0)
    if body.get("best_of") is not None and wanted.answer is None:
        wanted = replace(wanted, answer=0)
    return wanted


def _tried(body: Mapping[str, object], order: Order, strict: bool) -> Order:
    best_of = count(body, "best_of", 1, STRICT_BEST_OF if strict else MOST_CHOICES)
    if best_of is None:
        return orders.bounded(order)
    if best_of < order.n:
        message = f"best_of ({best_of}) must not be less than n ({order.n})"
        raise ApiError(message, "best_of", "invalid_value")
    if best_of > order.n and order.stream:
        message = "best_of above n needs stream: false: the best answer is known only when all are complete"
        raise ApiError(message, "best_of", "invalid_value")
    return orders.bounded(replace(order, tried=best_of), field="best_of")


def whole(order: Order, found: Sequence[ChoiceStream]) -> Json:
    """The whole answer: for each prompt, in order, its best attempts."""
    chosen = [
        (choice, prompt)
        for p, prompt in enumerate(order.prompts)
        for choice in best(found[p * order.tried : (p + 1) * order.tried], order.n)
    ]
    choices = [_choice(i, choice, prompt, order) for i, (choice, prompt) in enumerate(chosen)]
    return AnswerFrame(order.info, "text_completion", "cmpl").body(choices, **totals(order, found))


def best(tried: Sequence[ChoiceStream], n: int) -> Sequence[ChoiceStream]:
    """The n attempts with the highest mean log-probability per token, the best first; all: in their order."""
    if n == len(tried):
        return tried
    return sorted(tried, key=_mean, reverse=True)[:n]


def _mean(choice: ChoiceStream) -> float:
    found = _with_end(choice)
    return sum(scored.logprob for scored in found) / len(found) if found else 0.0


def _with_end(choice: ChoiceStream) -> list[TokenLogprob]:
    """An answer's scores, including the token that ended it, as in other servers."""
    end = choice.end.logprob
    return choice.scores if end is None else [*choice.scores, end]


def _choice(index: int, choice: ChoiceStream, prompt: GenerateRequest, order: Order) -> Json:
    leader = choice.leader
    echoed = prompt_text(prompt, leader)
    logprobs = None
    if order.wanted.answer is not None:
        echo = Echo(echoed, leader.prompt_pieces, leader.prompt_scores) if prompt.echo else None
        answer = [] if order.params.max_tokens == 0 else _with_end(choice)
        logprobs = legacy(echo, answer, Offsets(len(echoed)), order.wanted.answer)
    return _as_json(index, echoed + choice.text, logprobs, choice.finish_reason)


def _as_json(index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}


def prompt_text(request: GenerateRequest, leader: ChoiceStream) -> str:
    """An echoed prompt; empty if none is echoed."""
    if not request.echo:
        return ""
    if request.text is not None:
        return request.text
    return b"".join(leader.prompt_pieces).decode(errors="replace")


class CompletionStream:
    """The answer in chunks, for each choice: the prompt if it is echoed, texts, the reason for the end."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._frame = AnswerFrame(order.info, "text_completion", "cmpl")
        self._counts = UsageSum(order.tried)
        self._leaders = [ChoiceStream() for _ in order.prompts]
        self._offsets: dict[int, Offsets] = {}
        self._usage: Json = {"usage": None} if order.include_usage else {}

    def write(self, index: int, event: Event) -> Iterator[str | Json]:
        if event.kind == "prompt":
            self._leaders[index // self._order.tried].add_prompt(event)
            if event.progress:
                yield json_text(self._chunk(index, "") | {"prompt_progress": prompt_progress(event.progress)})
            return
        if not self._frame.has_begun(index):
            self._frame.begin(index, self._chunk(index, ""), "text")
            self._offsets[index] = Offsets()
            if self._order.prompts[0].echo:
                yield self._echo(index)
        top = self._order.wanted.answer
        if event.logprob is not None and top is not None:
            logprobs = legacy(None, (event.logprob,), self._offsets[index], top)
            yield json_text(self._chunk(index, event.text, logprobs))
        elif event.text:
            yield self._frame.with_text(index, event.text)
        if event.kind == "done":
            yield json_text(self._last(index, event))

    def end(self) -> Iterator[str]:
        return usage_chunk(self._order, self._frame, self._counts)

    def response(self, texts: AsyncGenerator[str, None]) -> EventStream:
        return EventStream(texts)

    def _chunk(self, index: int, text: str, logprobs: Json | None = None) -> Json:
        return self._frame.body([_as_json(index, text, logprobs, None)], **self._usage)

    def _echo(self, index: int) -> Json:
        number = index // self._order.tried
        request, leader = self._order.prompts[number], self._leaders[number]
        text, logprobs = prompt_text(request, leader), None
        self._offsets[index] = Offsets(len(text))
        if (top := self._order.wanted.answer) is not None:
            echoed = Echo(text, leader.prompt_pieces, leader.prompt_scores)
            logprobs = legacy(echoed, (), self._offsets[index], top)
        return self._chunk(index, text, logprobs)

    def _last(self, index: int, event: Event) -> Json:
        """The chunk with the reason for a choice's end; the last of all has the times."""
        choice = _as_json(index, "", None, finish_reason(event))
        complete = self._counts.record(index, event) == self._order.choices
        times = {"timings": self._counts.timings()} if complete and not self._order.include_usage else {}
        return self._frame.body([choice], **self._usage, **times)
