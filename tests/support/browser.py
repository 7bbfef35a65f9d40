"""A Chromium without a window, driven through a pair of pipes with its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *(
        "--headless=new",
        "--remote-debugging-pipe",
        "--no-first-run",
        "--disable-gpu",
        "--disable-dev-shm-usage",
    ),
    *(
        "--disable-extensions",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-proxy-server",
    ),
    "--no-sandbox",  # which containers do not let it have; it only ever sees our own page
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing else can be reached
)
# The browser wants its pipes at these numbers, where the process that starts it may have other files.
LAUNCH = "import os, sys; a = sys.argv; os.dup2(int(a[1]), 3); os.dup2(int(a[2]), 4); os.execv(a[3], a[3:])"
MOST_MESSAGE = 64 << 20
PATIENCE_S = 60.0  # on a busy machine

Json = dict[str, Any]


def executable() -> str | None:
    """Where there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, pipe: _Pipe, session: str) -> None:
        self._pipe, self._session = pipe, session

    @property
    def complaints(self) -> list[str]:
        """Errors of its script, and what the browser refused to do for it."""
        return self._pipe.complaints

    async def call(self, method: str, **params: object) -> Json:
        return await self._pipe.call(method, params, self._session)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:  # noqa: ANN401 - whatever JavaScript says
        """Of a JavaScript expression; a promise's when it is there."""
        said = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def until(self, condition: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not await self.value(condition):
            assert time.monotonic() < end, f"{condition}; the page says: {await self.text('body')}"
            await asyncio.sleep(0.01)

    async def text(self, selector: str) -> str:
        """What can be read there."""
        return str(await self.value(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def type(self, selector: str, text: str) -> None:
        """As a person does it, key by key or pasted."""
        await self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)

    async def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    async def click(self, selector: str) -> None:
        """In the middle of it, whatever lies there."""
        where = (
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            "found.scrollIntoView({block: 'nearest'}); const r = found.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        x, y = await self.value(where)
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def choose(self, selector: str, value: str) -> None:
        """One of a list; the list itself is drawn by the system, where no mouse of ours comes."""
        change = f"found.value = {json.dumps(value)}; found.dispatchEvent(new Event('change'))"
        await self.value(f"(found => {{ {change} }})(document.querySelector({json.dumps(selector)}))")

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def dark(self, on: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


class _Pipe:
    """Messages end with a zero byte; answers have the number of what was asked."""

    def __init__(self, reader: asyncio.StreamReader, out: int) -> None:
        self.complaints: list[str] = []
        self._reader, self._out = reader, out
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Json]] = {}

    async def call(self, method: str, params: Json, session: str | None = None) -> Json:
        number = next(self._numbers)
        message: Json = {"id": number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        self._waiting[number] = asyncio.get_running_loop().create_future()
        os.write(self._out, json.dumps(message).encode() + b"\0")  # short: a pipe takes it whole
        async with asyncio.timeout(PATIENCE_S):
            said = await self._waiting[number]
        assert "error" not in said, (method, said["error"])
        found: Json = said["result"]
        return found

    async def listen(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                said = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if "id" in said:
                    self._waiting.pop(said["id"]).set_result(said)
                elif said["method"] == "Runtime.exceptionThrown":
                    self.complaints.append(json.dumps(said["params"]["exceptionDetails"]))
                elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                    self.complaints.append(said["params"]["entry"]["text"])
        for future in self._waiting.values():
            future.set_exception(AssertionError("the browser has ended"))


@asynccontextmanager
async def browser(program: str, profile: Path) -> AsyncIterator[Page]:
    """A browser with one empty tab; what it writes lies in `profile`."""
    (its_in, our_out), (our_in, its_out) = _high_pipe(), _high_pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LAUNCH, str(its_in), str(its_out)),
        *(program, *FLAGS, f"--user-data-dir={profile}", "about:blank"),
        pass_fds=(its_in, its_out),
        env={**os.environ, "HOME": str(profile)},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(its_in)
    os.close(its_out)
    reader = asyncio.StreamReader(MOST_MESSAGE)
    file = os.fdopen(our_in, "rb")
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), file
    )
    pipe = _Pipe(reader, our_out)
    listening = asyncio.create_task(pipe.listen())
    try:
        target = (await pipe.call("Target.createTarget", {"url": "about:blank"}))["targetId"]
        attached = await pipe.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        page = Page(pipe, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        yield page
    finally:
        with contextlib.suppress(Exception):
            await pipe.call("Browser.close", {})
        os.close(our_out)
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()
        listening.cancel()
        transport.close()


def _high_pipe() -> tuple[int, int]:
    """With numbers that are in nobody's way."""
    low = os.pipe()
    reading, writing = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in low)
    for fd in low:
        os.close(fd)
    return reading, writing
