"""`suffix` of /api/generate: a text with a gap that the model fills."""

from __future__ import annotations

from dataclasses import replace

from hetrun.server.errors import FINAL, ApiError
from hetrun.server.request import Order
from hetrun.server.service import Service


async def filled(order: Order, suffix: str, service: Service) -> Order:
    """The order for what stands between its prompt and the suffix."""
    prompt = order.prompts[0]
    tokens = await fill_tokens(service, prompt.text or "", suffix, max_tokens=order.params.max_tokens)
    return replace(order, prompts=(replace(prompt, text=None, tokens=tokens),))


async def fill_tokens(
    service: Service, prefix: str, suffix: str, *, max_tokens: int | None
) -> tuple[int, ...]:
    """The prompt in the model's own tokens for this."""
    info = await service.info()
    message = f"{info.id} cannot fill in the middle of a text: leave out suffix"
    raise ApiError(message, "suffix", "not_supported", status=501, headers=FINAL)
