"""From callbacks on other threads to readers on an event loop, with one wake-up for all that is pending."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from hetrun.client.events import Event


class MailCarrier:
    """Carries events to the mailboxes of one loop.

    A step produces an event for each of many requests; waking the loop for each would cost more than
    everything else.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.suspects = asyncio.Lock()  # held by a suspect on its last try: it runs without others
        self._loop = loop
        self._pending: deque[tuple[Mailbox, tuple[Event, ...]]] = deque()
        self._called = False

    def put(self, box: Mailbox, events: tuple[Event, ...]) -> None:
        """From any thread."""
        self._pending.append((box, events))
        if not self._called:
            self._called = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: no reader waits, and the caller must not fail
                self._pending.clear()

    def _deliver(self) -> None:
        self._called = False  # first: an event from now on is either seen below or wakes the loop again
        while self._pending:
            box, events = self._pending.popleft()
            box.arrive(events)


class MailCarriers:
    """The carrier of each event loop that a client is used on; usually one."""

    def __init__(self) -> None:
        self._posts: dict[asyncio.AbstractEventLoop, MailCarrier] = {}

    def here(self) -> MailCarrier:
        """The running loop's."""
        loop = asyncio.get_running_loop()
        if loop not in self._posts:
            self._posts = {known: post for known, post in self._posts.items() if not known.is_closed()}
            self._posts[loop] = MailCarrier(loop)
        return self._posts[loop]


class Mailbox:
    """The events of one request, for one reader."""

    def __init__(self, post: MailCarrier, when_over: Callable[[], None] = lambda: None) -> None:
        """`when_over` is called on the loop when the last event has arrived, read or not."""
        self.newest: Event | None = None
        self._post = post
        self._when_over = when_over
        self._events: deque[Event] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, events: tuple[Event, ...]) -> None:
        """From any thread."""
        self._post.put(self, events)

    def arrive(self, events: tuple[Event, ...]) -> None:
        """On the loop."""
        self._events.extend(events)
        self.newest = events[-1]
        if self._reader and not self._reader.done():
            self._reader.set_result(None)
        if self.newest.last:
            self._when_over()

    async def get(self) -> Event:
        """The next event, in order."""
        while not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._events.popleft()
