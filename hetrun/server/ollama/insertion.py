"""`suffix` of /api/generate: a text with a gap that the model fills."""

from __future__ import annotations

from dataclasses import replace

from hetrun.server.infill import fill_tokens
from hetrun.server.request import Order
from hetrun.server.service import Service


async def filled(order: Order, suffix: str, service: Service) -> Order:
    """The order for what stands between its prompt and the suffix."""
    prompt = order.prompts[0]
    tokens = await fill_tokens(service, prompt.text or "", suffix, max_tokens=order.params.max_tokens)
    return replace(order, prompts=(replace(prompt, text=None, tokens=tokens),))
