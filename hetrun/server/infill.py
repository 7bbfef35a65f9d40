"""Texts with a gap: the prompt with which a model fills it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetrun.client.events import ModelInfo
from hetrun.client.queries import FillPrompt, Literally, Snippet
from hetrun.errors import OptionError
from hetrun.server.errors import FINAL, ApiError
from hetrun.server.query import asked
from hetrun.server.request import Order
from hetrun.server.service import Service


def check_fills(info: ModelInfo, status: int = 501, param: str | None = None) -> None:
    """Refuse a model without the tokens that filling takes."""
    if not info.fills:
        message = (
            f"{info.id} cannot fill in the middle of a text: its vocabulary lacks the special tokens for the "
            "text before the gap, the text behind it and what comes between; serve a model that was trained "
            "for this, such as Qwen2.5-Coder"
        )
        headers = FINAL if status >= 500 else None
        raise ApiError(message, param, "not_supported", status=status, headers=headers)


async def fill_tokens(
    service: Service,
    prefix: Literally,
    suffix: Literally,
    *,
    extra: Sequence[Snippet] = (),
    prompt: str = "",
    repository: bool = False,
    max_tokens: int | None = None,
    field: str = "suffix",
) -> tuple[int, ...]:
    """The tokens of the prompt, see `FillPrompt`; `field` is the one that errors name."""
    check_fills(await service.info())
    question = FillPrompt(prefix, suffix, tuple(extra), prompt, repository, max_tokens)
    try:
        return tuple(await asked(service, question))
    except OptionError as error:  # a text that takes too long to tokenise
        raise ApiError(str(error), field, "invalid_value") from error


async def fill_gaps(order: Order, suffix: str, service: Service) -> Order:
    """The same order for what stands between each prompt and the suffix."""
    prompts = [
        replace(
            prompt,
            text=None,
            tokens=await fill_tokens(
                service, prompt.text or prompt.tokens or "", suffix, max_tokens=prompt.params.max_tokens
            ),
        )
        for prompt in order.prompts
    ]
    return replace(order, prompts=tuple(prompts))
