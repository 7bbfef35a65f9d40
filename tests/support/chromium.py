"""A browser, driven through its debugging pipe: Chromium, if one is installed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

MOST_MS = 20_000  # until something is seen, on a busy machine
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-sandbox",  # containers do not allow it, and the only page is ours
)


def found() -> str | None:
    """The program, or nothing."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. Commands are those of the DevTools protocol, JSON that ends with a NUL."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = os.fdopen(reader, "rb"), os.fdopen(writer, "wb")
        self._rest = b""
        self._count = 0
        self.complaints: list[str] = []  # of the console, such as what a policy forbade
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session: str | None = None
        self._session = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self._send(f"{domain}.enable", {})

    def _send(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        self._writer.write(json.dumps(message).encode() + b"\0")
        self._writer.flush()
        while True:
            said = self._read()
            if said.get("id") == self._count:
                assert "error" not in said, said["error"]
                result: dict[str, Any] = said["result"]
                return result
            self._hear(said)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._reader.read1(1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        said: dict[str, Any] = json.loads(message)
        return said

    def _hear(self, said: dict[str, Any]) -> None:
        match said:
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error", "text": text}}}:
                self.complaints.append(text)
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.complaints.append(json.dumps(details)[:500])

    def open(self, url: str) -> None:
        """Go there; it may still load."""
        self._send("Page.navigate", {"url": url})
        self.until("document.readyState === 'complete'")

    def close(self) -> None:
        """Let go of the pipes."""
        self._reader.close()
        with suppress(BrokenPipeError):
            self._writer.close()

    def value(self, expression: str) -> Any:  # noqa: ANN401 - JSON
        """What an expression is in the page; promises are waited for."""
        params = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        said = self._send("Runtime.evaluate", params)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait in the page until an expression is true there; what is seen is said if it never is."""
        look = (
            f"if ({expression}) done(true); else if (Date.now() > end) done(false); else setTimeout(look, 10)"
        )
        waited = (
            f"new Promise(done => {{ const end = Date.now() + {MOST_MS}; (function look() {{ {look} }})() }})"
        )
        assert self.value(waited), f"{expression}\n{self.value('document.body.innerText')}\n{self.complaints}"

    def key(self, name: str) -> None:
        """Press a key."""
        code = {"Enter": 13, "Escape": 27}[name]
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
            self._send(
                "Input.dispatchKeyEvent",
                {"type": kind, "key": name, "code": name, "windowsVirtualKeyCode": code, **text},
            )

    def type(self, place: str, text: str) -> None:
        """Write into a field."""
        self.value(f"document.querySelector({json.dumps(place)}).focus()")
        self._send("Input.insertText", {"text": text})

    def click(self, place: str) -> None:
        """Press the middle of an element with the mouse."""
        where = self.value(
            f"(() => {{ const r = document.querySelector({json.dumps(place)}).getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            params = {"type": kind, "x": where[0], "y": where[1], "button": "left", "clickCount": 1}
            self._send("Input.dispatchMouseEvent", params)

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Another size of the window, and a scheme of colours."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", {"features": [scheme]})

    def picture(self) -> bytes:
        """A PNG of what is seen."""
        return base64.b64decode(self._send("Page.captureScreenshot", {"format": "png"})["data"])


@contextmanager
def browser(program: str) -> Iterator[Page]:
    """A tab of a new browser without any history."""
    to_browser, from_browser = os.pipe(), os.pipe()

    def as_three_and_four() -> None:
        # Moved out of the way first, for either may be 3 or 4 itself.
        ours = [os.dup(to_browser[0]), os.dup(from_browser[1])]
        high = [os.dup2(fd, 100 + i, inheritable=True) for i, fd in enumerate(ours)]
        os.dup2(high[0], 3, inheritable=True)
        os.dup2(high[1], 4, inheritable=True)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *OPTIONS, f"--user-data-dir={profile}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=as_three_and_four,
            env={**os.environ, "HOME": profile},
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            with closing(Page(from_browser[0], to_browser[1])) as page:
                yield page
        finally:
            process.kill()
            process.wait()
