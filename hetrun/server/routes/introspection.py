"""GET /plan, /props and /slots: the state of the server, for its operators.

They contain no text of clients, and only the file's name of the model's path.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun import __version__
from hetrun.client.queries import EngineState, PlanNow, Slot, State, TokenizerInfo
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
        info, template = await here.info(), await _template(here)  # loads a sleeping model
        state = await asked(here, State(), LOOK_S)
        own = DEFAULT_TEMPERATURE if info.temperature is None else info.temperature
        defaults = {"temperature": own, **service.sampling}
        usual = asdict(SamplingParams.from_mapping(defaults))
        params = {name: value for name, value in usual.items() if name not in OF_REQUESTS} | usual["more"]
        params["n_predict"] = -1 if params["max_tokens"] is None else params["max_tokens"]  # llama.cpp's name
        said: Json = {
            "default_generation_settings": {"n_ctx": info.context, "params": params},
            "total_slots": state.places,
            "model_alias": info.id,
            "model_path": PurePath(info.path).name,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"hetrun-{__version__}",
            **template,
        }
        return JSONResponse(said)

    async def slots(request: Request) -> Response:
        here = await meant(request.query_params, service)
        if not engines(here.client):
            return JSONResponse([])
        state = await asked(here, State(), LOOK_S)
        return JSONResponse([_described(slot, state) for slot in state.slots])

    return [
        Route("/plan", plan, middleware=few()),
        Route("/props", props, middleware=few()),
        Route("/slots", slots, middleware=few()),
    ]


async def _template(service: Service) -> Json:
    """The template and the texts of its tokens; nothing for a model that takes token ids only."""
    try:
        facts = await asked(service, TokenizerInfo())
    except OptionError:
        return {"chat_template": None, "bos_token": None, "eos_token": None}
    return {
        "chat_template": facts.template,
        "chat_template_origin": facts.template_origin,
        "bos_token": facts.bos_text,
        "eos_token": facts.eos_text,
    }


def _described(slot: Slot, state: EngineState) -> Json:
    """A request in the engine, in llama.cpp's format."""
    return {
        "id": slot.id,
        "n_ctx": state.context,
        "is_processing": slot.state in ("prompt", "answer"),
        "state": slot.state,
        "seconds": round(slot.seconds, 3),
        "n_prompt_tokens": slot.prompt_tokens,
        "n_prompt_tokens_processed": slot.prompt_computed,
        "n_prompt_tokens_cache": slot.cached_tokens,
        "n_decoded": slot.answer_tokens,
        "n_remain": max(slot.answer_limit - slot.answer_tokens, 0),
    }
