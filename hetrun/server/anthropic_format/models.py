"""Models as Anthropic's clients list them: OpenAI's fields with Anthropic's beside them, since both APIs have
the same path. Only Anthropic's clients send the header `anthropic-version`."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request

Json = dict[str, object]

VERSION = "anthropic-version"


def is_asked(request: Request) -> bool:
    """Whether the client is one of Anthropic's API."""
    return VERSION in request.headers


def listed(models: Json) -> Json:
    """The list; it has one page."""
    data = models["data"]
    assert isinstance(data, list)
    names = [model["id"] for model in data] or [None]
    return models | {
        "data": [described(model) for model in data],
        "has_more": False,
        "first_id": names[0],
        "last_id": names[-1],
    }


def described(model: Json) -> Json:
    """One model."""
    meta, created = model["meta"], model["created"]
    assert isinstance(created, int)
    context = meta["n_ctx"] if isinstance(meta, dict) else None
    return model | {
        "type": "model",
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }
