"""Endpoints of plugins, with the same middleware as the server's own: keys, hosts, turns."""

from __future__ import annotations

import logging

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hetrun.client import hook_dispatcher
from hetrun.errors import HetrunError
from hetrun.server.errors import FINAL, ApiError
from hetrun.server.service import Service
from hetrun.system.entry_points import FAILURES, PluginPoint, in_words

log = logging.getLogger(__name__)

# Errors of the client, as in our own endpoints: not a failure of the plugin.
USUAL = (ApiError, HTTPException, HetrunError, ClientDisconnect)


def routes(service: Service) -> list[BaseRoute]:
    found = []
    for point, route in hook_dispatcher.routes(service.client):
        if isinstance(route, Route | Mount):
            route.app = PluginEndpoint(route.app, point)
        found.append(route)
    return found


class PluginEndpoint:
    """A plugin's endpoint; an exception becomes an answer that names the plugin."""

    def __init__(self, app: ASGIApp, point: PluginPoint) -> None:
        self._app, self._point = app, point

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except USUAL:
            raise
        except FAILURES as e:
            message = f"the plugin {self._point.name} of {self._point.whose} failed: {in_words(e)}"
            log.error("%s", message, exc_info=e)
            raise ApiError(
                message, code="plugin_failed", status=500, kind="server_error", headers=FINAL
            ) from e
