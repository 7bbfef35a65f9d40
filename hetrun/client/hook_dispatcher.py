"""Plugins with hooks: loaded at the first event, and disabled if they fail."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from hetrun.client.events import Event, GenerateRequest, ModelInfo
from hetrun.errors import PluginError
from hetrun.system import entry_points
from hetrun.system.entry_points import PluginPoint

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from hetrun.client.interface import ChatClient

log = logging.getLogger(__name__)

# Pending events: a plugin that hangs takes no more memory than that.
MOST_WAITING = 10_000
FAREWELL_S = 2.0  # that plugins have for the remaining events when the process ends

Call = Callable[..., list[Any]]
Info = Callable[[], ModelInfo | None]


class Plugins:
    """The installed plugins that work, and the thread that calls them."""

    def __init__(self, found: Iterable[PluginPoint]) -> None:
        import pluggy  # on use: few have plugins

        from hetrun.client.hooks import Hooks

        self._manager = pluggy.PluginManager(entry_points.OURS)
        self._manager.add_hookspecs(Hooks)
        self._points: dict[PluginPoint, object] = {}
        for point in found:
            with suppress(PluginError):
                self._register(point)
        self._news: queue.Queue[tuple[str, dict[str, object]] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._tell, name="hetrun-plugins", daemon=True)
        if self._points:
            self._thread.start()
            atexit.register(self.close)

    def _register(self, point: PluginPoint) -> None:
        plugin = entry_points.load(point)
        try:
            self._manager.register(plugin, f"{point.package}:{point.name}")
            self._manager.check_pending()
        except entry_points.FAILURES as e:  # an unknown argument or hook
            with suppress(Exception):
                self._manager.unregister(plugin)
            raise entry_points.leave_out(
                point, f"its hooks cannot be registered: {entry_points.in_words(e)}", e
            ) from e
        self._points[point] = plugin

    def tell(self, hook: str, **facts: object) -> None:
        """Queue an event for all plugins; returns at once, on any thread."""
        if not self._points:
            return
        try:
            self._news.put_nowait((hook, facts))
        except queue.Full:
            log.warning("plugins cannot keep up: event %s was dropped", hook)

    def _tell(self) -> None:
        while (news := self._news.get()) is not None:
            hook, facts = news
            for _ in self.ask(hook, **facts):
                pass

    def ask(self, hook: str, **facts: object) -> Iterator[tuple[PluginPoint, Any]]:
        """Call a hook of each plugin and yield the results. A plugin that raises is disabled."""
        for point, plugin in list(self._points.items()):
            others = [p for p in self._manager.get_plugins() if p is not plugin]
            call: Call = self._manager.subset_hook_caller(hook, others)
            try:
                said = call(**facts)
            except entry_points.FAILURES as e:
                self.leave_out(point, f"{hook} fails: {entry_points.in_words(e)}", e)
                continue
            yield from ((point, one) for one in said)

    def leave_out(self, point: PluginPoint, why: str, cause: BaseException | None = None) -> None:
        """Disable a plugin."""
        entry_points.leave_out(point, why, cause)
        self._manager.unregister(self._points.pop(point))

    def close(self) -> None:
        """Deliver the remaining events, within a time limit."""
        atexit.unregister(self.close)
        with suppress(queue.Full):
            self._news.put(None, timeout=FAREWELL_S)
        if self._thread.is_alive():
            self._thread.join(FAREWELL_S)


@cache
def plugins() -> Plugins | None:
    """All plugins with hooks; None if none is installed, which is usual and costs nothing."""
    found = entry_points.points("plugins").values()
    return Plugins(found) if found else None


class ReportedRequest:
    """A request that is reported to plugins: its arrival, and its end."""

    def __init__(self, listening: Plugins, request: GenerateRequest, info: Info) -> None:
        self._listening, self._request, self._info = listening, request, info
        self._ended = False
        listening.tell("hetrun_asked", request=request)

    def event(self, event: Event) -> None:
        """Record an event; plugins get the last one."""
        if event.last and not self._ended:
            self._ended = True
            facts = {"request": self._request, "last": event, "info": self._info()}
            self._listening.tell("hetrun_answered", **facts)

    def end(self) -> None:
        """The reader has gone."""
        self.event(Event("done", finish_reason="cancelled"))


def heard(request: GenerateRequest, info: Info) -> ReportedRequest | None:
    """Report a request to plugins; None if there are none."""
    listening = plugins()
    return ReportedRequest(listening, request, info) if listening else None


async def overheard(
    events: AsyncGenerator[Event, None], hearing: ReportedRequest
) -> AsyncGenerator[Event, None]:
    """The same events, reported to plugins."""
    async with aclosing(events):
        try:
            async for event in events:
                hearing.event(event)
                yield event
        finally:
            hearing.end()


def routes(client: ChatClient) -> list[tuple[PluginPoint, BaseRoute]]:
    """The routes that plugins add to the server, with each plugin's name."""
    from starlette.routing import BaseRoute

    listening, found = plugins(), list[tuple[PluginPoint, BaseRoute]]()
    if listening is None:
        return found
    for point, said in listening.ask("hetrun_routes", client=client):
        mine = list(said) if isinstance(said, list | tuple) else [said]
        if all(isinstance(route, BaseRoute) for route in mine):
            found += [(point, route) for route in mine]
        else:
            listening.leave_out(point, "hetrun_routes must return a list of Starlette routes")
    return found
