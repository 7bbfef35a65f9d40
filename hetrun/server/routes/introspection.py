"""GET /plan and /props: the state of the server, for its operators.

They contain no text of clients, and only the file's name of the model's path.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun import __version__
from hetrun.client.model_pool import OnDemand
from hetrun.client.queries import PlanNow, StateQuery, TokenizerFacts, TokenizerInfo
from hetrun.client.sampling_params import SamplingParams
from hetrun.errors import OptionError
from hetrun.server.query import LOOK_S, asked, few
from hetrun.server.routes.models import engines, meant
from hetrun.server.sampling import DEFAULT_TEMPERATURE
from hetrun.server.service import Service

# Fields of single requests or of an answer's format, which are no settings of a server.
OF_REQUESTS = ("logprobs", "prompt_logprobs", "logit_bias", "json_schema", "regex", "grammar", "more")

Json = dict[str, object]


def routes(service: Service) -> list[Route]:
    async def plan(request: Request) -> Response:
        here = await meant(request.query_params, service)
        return JSONResponse(await asked(here, PlanNow()))

    async def props(request: Request) -> Response:
        here = await meant(request.query_params, service)
        info = await here.info()
        asleep = not engines(here.client)
        template, places = await _remembered(here) or (await _template(here), 0)
        if not asleep:
            places = (await asked(here, StateQuery(), LOOK_S)).places
        own = DEFAULT_TEMPERATURE if info.temperature is None else info.temperature
        defaults = {"temperature": own, **service.sampling}
        usual = asdict(SamplingParams.from_mapping(defaults))
        params = {name: value for name, value in usual.items() if name not in OF_REQUESTS} | usual["more"]
        params["n_predict"] = -1 if params["max_tokens"] is None else params["max_tokens"]  # llama.cpp's name
        said: Json = {
            "default_generation_settings": {"n_ctx": info.context, "params": params},
            "total_slots": places,
            "model_alias": info.id,
            "model_path": PurePath(info.path).name,
            "modalities": {"vision": info.pictures, "audio": False},
            "build_info": f"hetrun-{__version__}",
            "is_sleeping": asleep,
            **template,
        }
        return JSONResponse(said)

    return [
        Route("/plan", plan, middleware=few()),
        Route("/props", props, middleware=few()),
    ]


async def _remembered(service: Service) -> tuple[Json, int] | None:
    """The template and the number of places of a model that may sleep; these questions neither wake it nor
    keep it awake."""
    if not isinstance(service.client, OnDemand):
        return None
    memory = await service.client.remember()
    return _template_of(memory.facts), memory.places


async def _template(service: Service) -> Json:
    """The template and the texts of its tokens; nothing for a model that takes token ids only."""
    try:
        facts = await asked(service, TokenizerInfo())
    except OptionError:
        facts = None
    return _template_of(facts)


def _template_of(facts: TokenizerFacts | None) -> Json:
    if facts is None:
        return {"chat_template": None, "bos_token": None, "eos_token": None}
    return {
        "chat_template": facts.template,
        "chat_template_origin": facts.template_origin,
        "bos_token": facts.bos_text,
        "eos_token": facts.eos_text,
    }
