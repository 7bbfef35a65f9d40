"""Plugins that hook in: loaded when something happens that they could hear of, and left out if they fail."""

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
from hetrun.system.entry_points import Point

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from hetrun.client.interface import ChatClient

log = logging.getLogger(__name__)

# Of what plugins have not heard yet: one that hangs costs no more memory than that.
MOST_WAITING = 10_000
FAREWELL_S = 2.0  # that plugins have at the end of the process to hear the rest

Call = Callable[..., list[Any]]
Info = Callable[[], ModelInfo | None]


class Plugins:
    """Those that are installed and work, and the thread that they are called on."""

    def __init__(self, found: Iterable[Point]) -> None:
        import pluggy  # on use: few have plugins

        from hetrun.client.hooks import Hooks

        self._manager = pluggy.PluginManager(entry_points.OURS)
        self._manager.add_hookspecs(Hooks)
        self._points: dict[Point, object] = {}
        for point in found:
            with suppress(PluginError):
                self._register(point)
        self._news: queue.Queue[tuple[str, dict[str, object]] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._tell, name="hetrun-plugins", daemon=True)
        if self._points:
            self._thread.start()
            atexit.register(self.close)

    def _register(self, point: Point) -> None:
        plugin = entry_points.load(point)
        try:
            self._manager.register(plugin, f"{point.package}:{point.name}")
            self._manager.check_pending()
        except entry_points.FAILURES as e:  # an argument that no hook has, or a hook that there is not
            with suppress(Exception):
                self._manager.unregister(plugin)
            raise entry_points.leave_out(point, f"it cannot hook in: {entry_points.in_words(e)}", e) from e
        self._points[point] = plugin

    def tell(self, hook: str, **facts: object) -> None:
        """Let all hear of something, soon; from any thread, at once."""
        if not self._points:
            return
        try:
            self._news.put_nowait((hook, facts))
        except queue.Full:
            log.warning("plugins do not keep up: %s is not told", hook)

    def _tell(self) -> None:
        while (news := self._news.get()) is not None:
            hook, facts = news
            for _ in self.ask(hook, **facts):
                pass

    def ask(self, hook: str, **facts: object) -> Iterator[tuple[Point, Any]]:
        """What each says to something. Who raises is left out from now on."""
        for point, plugin in list(self._points.items()):
            others = [p for p in self._manager.get_plugins() if p is not plugin]
            call: Call = self._manager.subset_hook_caller(hook, others)
            try:
                said = call(**facts)
            except entry_points.FAILURES as e:
                self.leave_out(point, f"{hook} fails: {entry_points.in_words(e)}", e)
                continue
            yield from ((point, one) for one in said)

    def leave_out(self, point: Point, why: str, cause: BaseException | None = None) -> None:
        """Call it no more."""
        entry_points.leave_out(point, why, cause)
        self._manager.unregister(self._points.pop(point))

    def close(self) -> None:
        """Let them hear the rest, for a moment."""
        atexit.unregister(self.close)
        with suppress(queue.Full):
            self._news.put(None, timeout=FAREWELL_S)
        if self._thread.is_alive():
            self._thread.join(FAREWELL_S)


@cache
def plugins() -> Plugins | None:
    """All that hook in; None where none is installed, which is the usual thing and costs nothing."""
    found = entry_points.points("plugins").values()
    return Plugins(found) if found else None


class Hearing:
    """One request that plugins hear of: when it comes, and how it ends."""

    def __init__(self, listening: Plugins, request: GenerateRequest, info: Info) -> None:
        self._listening, self._request, self._info = listening, request, info
        self._ended = False
        listening.tell("hetrun_asked", request=request)

    def event(self, event: Event) -> None:
        """Something came; the last is what plugins hear."""
        if event.last and not self._ended:
            self._ended = True
            facts = {"request": self._request, "last": event, "info": self._info()}
            self._listening.tell("hetrun_answered", **facts)

    def end(self) -> None:
        """Nobody waits for more."""
        self.event(Event("done", finish_reason="cancelled"))


def heard(request: GenerateRequest, info: Info) -> Hearing | None:
    """Plugins hear that somebody asks; None where nobody listens."""
    listening = plugins()
    return Hearing(listening, request, info) if listening else None


async def overheard(events: AsyncGenerator[Event, None], hearing: Hearing) -> AsyncGenerator[Event, None]:
    """The same events, of which plugins hear."""
    async with aclosing(events):
        try:
            async for event in events:
                hearing.event(event)
                yield event
        finally:
            hearing.end()


def routes(client: ChatClient) -> list[tuple[Point, BaseRoute]]:
    """What plugins add to the server, and whose each is."""
    from starlette.routing import BaseRoute

    listening, found = plugins(), list[tuple[Point, BaseRoute]]()
    if listening is None:
        return found
    for point, said in listening.ask("hetrun_routes", client=client):
        mine = list(said) if isinstance(said, list | tuple) else [said]
        if all(isinstance(route, BaseRoute) for route in mine):
            found += [(point, route) for route in mine]
        else:
            listening.leave_out(point, "hetrun_routes gives something else than a list of Starlette's routes")
    return found
