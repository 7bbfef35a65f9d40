"""GET /slots, and POST /slots/{id}: llama.cpp's view of what runs, and slots that are saved to files.

A slot is a place for one running sequence. Its file is written and read by the engine's process, within the
folder of --slot-save-path only: a name is no path, and a symbolic link is never followed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from time import perf_counter
from typing import Literal, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hetrun.client.model_pool import OnDemand
from hetrun.client.queries import EngineState, Slot, SlotAction, StateQuery
from hetrun.errors import FieldError, OptionError, UserError
from hetrun.server.body import json_object
from hetrun.server.errors import FINAL, ApiError, wrong_type
from hetrun.server.query import LOOK_S, asked, few
from hetrun.server.routes.models import engines, meant
from hetrun.server.service import Service

MOST_NAME = 200  # bytes of a file's name; the engine's process puts some beside it
NAME = re.compile(r"[^\x00-\x1f\x7f/\\]+")
ACTIONS = ("save", "restore", "erase")
OFF = "Slots are not saved here: start the server with --slot-save-path FOLDER"

Json = dict[str, object]
Action = Literal["save", "restore", "erase"]


def routes(service: Service) -> list[Route]:
    async def slots(request: Request) -> Response:
        here = await meant(request.query_params, service)
        if not engines(here.client):
            return JSONResponse(asleep(here))
        state = await asked(here, StateQuery(), LOOK_S)
        found = described(state)
        idle = any(slot["state"] == "idle" for slot in found)
        if request.query_params.get("fail_on_no_slot") not in (None, "0", "false") and not idle:
            raise ApiError("no slot is idle", code="no_slot", status=503, kind="server_error")
        return JSONResponse(found)

    async def act(request: Request) -> Response:
        if service.slot_save_path is None:
            raise ApiError(OFF, code="not_supported", status=501, headers=FINAL)
        action = _action(request.query_params)
        name = None if action == "erase" else file_name(await json_object(request))
        here = await meant(request.query_params, service)
        number = _number(request.path_params["id"])
        path = str(service.slot_save_path / name) if name else ""
        begin = perf_counter()
        try:
            done = await asked(here, SlotAction(action, number, path))
        except FieldError:
            raise
        except OptionError as error:
            raise ApiError(str(error), code="not_supported") from error
        except UserError as error:
            raise ApiError(str(error), "filename", "invalid_value") from error
        ms = round(1000 * (perf_counter() - begin), 3)
        if name is None:
            return JSONResponse({"id_slot": number, "n_erased": done.tokens})
        tokens, nbytes = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
        said: Json = {"id_slot": number, "filename": name, tokens: done.tokens, nbytes: done.nbytes}
        return JSONResponse(said | {"timings": {f"{action}_ms": ms}})

    return [
        Route("/slots", slots, middleware=few()),
        Route("/slots/{id}", act, methods=["POST"], middleware=few()),
    ]


def _action(query: Mapping[str, str]) -> Action:
    action = query.get("action")
    if action not in ACTIONS:
        raise ApiError(
            f"action must be {', '.join(ACTIONS[:-1])} or {ACTIONS[-1]}", "action", "invalid_value"
        )
    return cast("Action", action)


def file_name(body: Mapping[str, object]) -> str:
    """The name of a file in the folder, never a path to elsewhere."""
    name, field = body.get("filename"), "filename"
    if name is None:
        raise ApiError(f"{field} is missing", field, "missing_required_parameter")
    if not isinstance(name, str):
        raise wrong_type(field, "a text", name)
    fits = len(name.encode(errors="replace")) <= MOST_NAME and name.isprintable()
    if not fits or not NAME.fullmatch(name) or name.startswith("."):
        message = (
            f"{field} must be a name of at most {MOST_NAME} bytes without slashes and without a dot in front"
        )
        raise ApiError(message, field, "invalid_value")
    return name


def _number(given: str) -> int:
    """The number of a slot; the engine knows whether it exists."""
    if not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise ApiError("the id of a slot must be a number of /slots", "id_slot", "invalid_value")
    return int(given)


def asleep(service: Service) -> list[Json]:
    """The slots of a model that sleeps; none are known of one that was never loaded."""
    client = service.client
    if not isinstance(client, OnDemand) or client.known is None:
        return []
    return [_slot(number, None, client.known.context) for number in range(client.memory.places)]


def described(state: EngineState) -> list[Json]:
    """A slot for each place, whether or not a request is in it, and those that wait for one."""
    placed = {slot.place: slot for slot in state.slots if slot.place >= 0}
    numbers = range(max(state.places, max(placed, default=-1) + 1))
    found = [_slot(number, placed.get(number), state.context) for number in numbers]
    return found + [_slot(-1, slot, state.context) for slot in state.slots if slot.place < 0]


def _slot(number: int, slot: Slot | None, context: int) -> Json:
    """A place in llama.cpp's format."""
    busy = slot or Slot(-1, "waiting", 0.0)
    return {
        "id": number,
        "id_task": busy.id,
        "n_ctx": context,
        "is_processing": slot is not None and slot.state in ("prompt", "answer"),
        "state": slot.state if slot else "idle",
        "seconds": round(busy.seconds, 3),
        "n_prompt_tokens": busy.prompt_tokens,
        "n_prompt_tokens_processed": busy.prompt_computed,
        "n_prompt_tokens_cache": busy.cached_tokens,
        "n_decoded": busy.answer_tokens,
        "n_remain": max(busy.answer_limit - busy.answer_tokens, 0),
    }
