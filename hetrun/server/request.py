"""Reading a request: shared by the endpoints that answer with text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetrun.client import sampler_plugins
from hetrun.client.events import GenerateRequest, ModelInfo
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import OptionError
from hetrun.server import fields, sampling
from hetrun.server.errors import ApiError, Names, api_error
from hetrun.server.fields import Body, LogprobCount
from hetrun.server.service import Service
from hetrun.text.answers.reading import PLAIN, AnswerFormat

MOST_CHOICES = 128  # for one prompt, as at OpenAI
MOST_TOGETHER = 512  # for all prompts
MOST_SCORES = 1 << 18  # log-probabilities in one answer with several choices
IN_PARTS = re.compile(r"^parts at anyOf\[\d+\](\.?)")  # the answer's schema among those of calls
COMMON = (*fields.READ, *sampling.NAMES, *fields.HINTS, *fields.UNBUILT, *fields.NEVER)


@dataclass(frozen=True)
class Order:
    """The requested answers: `n` for each prompt, the best of `tried`."""

    info: ModelInfo
    prompts: tuple[GenerateRequest, ...]
    prompt_field: str
    wanted: LogprobCount
    include_usage: bool = False
    n: int = 1
    tried: int = 1
    form: str | None = None  # the field with the answer's format
    reading: AnswerFormat = PLAIN  # further contents of answers besides text
    names: Names = ()  # of fields, in errors of an API that has other ones than the chat

    @property
    def stream(self) -> bool:
        """Whether the answer is sent piece by piece."""
        return not self.prompts[0].whole

    @property
    def choices(self) -> int:
        """How many answers are tried in all."""
        return len(self.prompts) * self.tried

    @property
    def params(self) -> SamplingParams:
        """Those of every prompt."""
        return self.prompts[0].params

    def failure(self, error: Exception | None) -> ApiError:
        """The API error for a request that ended with this error."""
        found = self._failure(error)
        return found.renamed(self.names) if self.names else found

    def _failure(self, error: Exception | None) -> ApiError:
        structure = self.prompts[0].structure
        if isinstance(error, OptionError) and (fault := self.reading.fault(str(error))):
            return api_error(fault)
        if self.form and structure and isinstance(error, OptionError):
            # The engine checks schemas and grammars under another name than the client's.
            message = IN_PARTS.sub(lambda found: "parts at " if found[1] else "parts", str(error))
            if message.startswith(structure.kind):
                said = f"{self.form}{message.removeprefix(structure.kind)}"
                return ApiError(said, self.form, "invalid_value")
        return api_error(error, self.info.context, self.prompt_field)


def check(
    body: Body, info: ModelInfo, service: Service, known: Sequence[str], built: Sequence[str] = ()
) -> None:
    """Refuse unsupported fields, another model and, if the server is strict, unknown fields."""
    for name, neutral in fields.UNBUILT.items():
        value = body.get(name)
        if value is not None and value not in neutral and name not in built:
            raise ApiError(f"{name} is not supported by this server yet", name, "unsupported_parameter")
    for name, why in fields.NEVER.items():
        if body.get(name):
            raise ApiError(f"{name}: {why}", name, "unsupported_parameter")
    if service.strict:
        _refuse_unknown(body, (*known, *sampler_plugins.parameters()))
        sampling.check_strictly(body)


def order(
    body: Body,
    info: ModelInfo,
    client: str,
    prompts: Sequence[GenerateRequest],
    *,
    wanted: LogprobCount,
    field: str,
    reading: AnswerFormat = PLAIN,
    names: Names = (),
) -> Order:
    """An order for these prompts, with a request's fields for all of its answers."""
    stream, n = fields.flag(body, "stream"), fields.count(body, "n", 1, MOST_CHOICES) or 1
    asked = [_with_shared(prompt, body, client, stream=stream) for prompt in prompts]
    return Order(
        info,
        tuple(asked),
        field,
        wanted,
        include_usage=fields.include_usage(body, stream),
        n=n,
        tried=n,
        form=sampling.form_field(body),
        reading=reading,
        names=names,
    )


def _with_shared(prompt: GenerateRequest, body: Body, client: str, *, stream: bool) -> GenerateRequest:
    """The request with the fields that all endpoints share."""
    return replace(
        prompt,
        client=client,
        priority=fields.priority(body),
        deadline_s=fields.deadline_s(body),
        whole=not stream,
        progress=fields.flag(body, "return_progress") and stream,
        slot=fields.slot(body),
        shift=fields.context_shift(body),
        line_limit_s=fields.line_limit_s(body),
        fresh=body.get("cache_prompt") is not None and not fields.flag(body, "cache_prompt"),
    )


def bounded(order: Order, *, field: str = "n") -> Order:
    """The order, checked against the limits."""
    if order.params.max_tokens == 0 and order.tried > 1:
        message = f"{field} must be 1 where max_tokens is 0: the answers could not differ"
        raise ApiError(message, field, "invalid_value")
    if order.choices > MOST_TOGETHER:
        raise ApiError(
            f"a request may have {MOST_TOGETHER} answers, but {len(order.prompts)} prompts with "
            f"{order.tried} each are {order.choices}: ask in several requests",
            field,
            "invalid_value",
        )
    scores = sum(_scores(prompt, order) for prompt in order.prompts)
    if order.choices > 1 and scores > MOST_SCORES:
        raise ApiError(
            f"an answer with several choices may have {MOST_SCORES} log-probabilities, and up to {scores} "
            "are asked for: give max_tokens, or ask in several requests",
            "logprobs",
            "invalid_value",
        )
    return order


def _scores(prompt: GenerateRequest, order: Order) -> int:
    """The largest number of log-probabilities in the answers to a prompt."""
    context, limit = order.info.context, order.params.max_tokens
    size = context
    if prompt.tokens is not None:
        size = len(prompt.tokens)
    elif prompt.text is not None:
        size = min(len(prompt.text.encode()) + 1, context)  # no token is shorter than a byte
    answer = context if limit is None else min(limit, context)
    found = 0
    if order.wanted.answer is not None:
        found += answer * (1 + order.wanted.answer)
    if order.wanted.prompt is not None:
        found += size * (1 + order.wanted.prompt)
    return order.tried * found


def _refuse_unknown(body: Body, known: Sequence[str]) -> None:
    for name in body:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {close[0]}?" if close else ""
            raise ApiError(f"Unrecognized request argument: {name}{hint}", name, "unknown_parameter")
