"""Pictures that a request names by an address: in one folder, or on named hosts; none by default."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from time import monotonic
from typing import IO
from urllib.parse import unquote, urlsplit

from hetrun.client.events import MOST_PICTURE_BYTES, MOST_PICTURES
from hetrun.client.pictures import PART_TYPES
from hetrun.errors import OptionError, printable
from hetrun.server.pictures.parts import HOW, Loaded, url_of
from hetrun.system.files import open_regular
from hetrun.system.units import format_bytes

FETCH_S = 20.0  # for a picture, from the first look-up of its host
STALL_S = 5.0  # without a byte
HOST = re.compile(r"[\w.-]+(:\d{1,5})?|\[[0-9a-f:.]+\](:\d{1,5})?")
PART = 1 << 16
TOGETHER = 8  # pictures that are fetched at a time
MOST_URL = 8192  # characters
PLACES = ("messages", "input", "system")  # fields of a request that hold parts
LATE = f"its host did not send it within {FETCH_S:g} s"
LARGE = f"it is larger than {format_bytes(MOST_PICTURE_BYTES)}"


class UnreadablePicture(Exception):
    """A picture is not read; the text says why, and has no path of this machine."""


@dataclass(frozen=True)
class Sources:
    """What the server may read for a request."""

    folder: Path | None = None  # --media-path
    hosts: tuple[str, ...] = ()  # --allowed-media-domain

    @classmethod
    def of(cls, folder: Path | None, hosts: Iterable[str]) -> Sources:
        """Checked: a host is a name, such as example.com, perhaps with a port."""
        named = [host.strip().lower() for some in hosts for host in some.split(",") if host.strip()]
        for host in named:
            if not HOST.fullmatch(host):
                said = (
                    f"--allowed-media-domain {printable(host)} is not the name of a host, as example.com is"
                )
                raise OptionError(said)
        return cls(folder, tuple(named))

    async def loaded(self, body: Mapping[str, object]) -> Loaded:
        """Everything that the request names by an address."""
        urls = list(dict.fromkeys(url for url in _urls(body) if not url[:5].lower() == "data:"))
        room = asyncio.Semaphore(TOGETHER)

        async def load(url: str) -> bytes | str:
            async with room:
                try:
                    # The thread of a host that sends byte after byte may outlast this.
                    return await asyncio.wait_for(asyncio.to_thread(self.read, url), FETCH_S + STALL_S)
                except UnreadablePicture as error:
                    return str(error)
                except TimeoutError:
                    return LATE

        return dict(zip(urls, await asyncio.gather(*map(load, urls[:MOST_PICTURES])), strict=False))

    def read(self, url: str) -> bytes:
        """The file at an address."""
        if len(url) > MOST_URL:
            raise UnreadablePicture(f"this is no address: it has more than {MOST_URL} characters")
        scheme = url.partition(":")[0].lower()
        if scheme == "file":
            return self._file(url)
        if scheme in ("http", "https"):
            return self._page(url)
        raise UnreadablePicture(f"this is no address that can be read; {HOW}")

    def _file(self, url: str) -> bytes:
        if self.folder is None:
            raise UnreadablePicture(
                f"this server reads no files for requests (--media-path DIR allows a folder); {HOW}"
            )
        name = unquote(url[len("file:") :])
        name = name.removeprefix("//localhost").removeprefix("//")
        if "\0" in name:
            raise UnreadablePicture("there is no such file")
        # An absolute path, as in vLLM, or one within the folder, as in llama.cpp.
        path = Path(os.path.realpath(self.folder / name))
        if not path.is_relative_to(self.folder):
            raise UnreadablePicture("this file does not lie in the folder of --media-path")
        try:
            with open(open_regular(path, follow=False), "rb") as file:
                found = file.read(MOST_PICTURE_BYTES + 1)
        except OSError as error:
            raise UnreadablePicture(f"the file cannot be read ({error.strerror})") from None
        return _bounded(found)

    def _page(self, url: str) -> bytes:
        self.check_host(url)
        from urllib.error import HTTPError, URLError  # on use, as what it brings along

        try:
            return _bounded(fetch(url))
        except HTTPError as error:
            error.close()
            raise UnreadablePicture(f"its host did not send it ({error.code} {error.reason})") from None
        except URLError as error:
            raise UnreadablePicture(f"its host did not send it ({error.reason})") from None
        except (OSError, HTTPException, ValueError) as error:
            raise UnreadablePicture(
                f"its host did not send it ({str(error) or type(error).__name__})"
            ) from None

    def check_host(self, url: str) -> None:
        """Refuse a host that was not named. One that was named may have any address: its owner said so."""
        if not self.hosts:
            raise UnreadablePicture(
                f"this server fetches no pictures (--allowed-media-domain HOST allows a host); {HOW}"
            )
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
        except ValueError:
            raise UnreadablePicture("this is no address") from None
        usual = port in (None, 80, 443)
        if f"{host}:{port}" not in self.hosts and not (usual and host in self.hosts):
            raise UnreadablePicture("its host is not on this server's list (--allowed-media-domain)")


def fetch(url: str) -> bytes:
    """What a host sends, within limits of time and size. It may send us on, but only to itself."""
    from urllib.error import HTTPError
    from urllib.request import (
        HTTPDefaultErrorHandler,
        HTTPErrorProcessor,
        HTTPHandler,
        HTTPRedirectHandler,
        HTTPSHandler,
        OpenerDirector,
        Request,
    )

    class Stays(HTTPRedirectHandler):
        def redirect_request(
            self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
        ) -> Request | None:
            before, after = urlsplit(req.full_url), urlsplit(newurl)
            if after.scheme not in ("http", "https") or after.netloc != before.netloc:
                raise HTTPError(newurl, code, "it sends us to another host", headers, fp)
            return super().redirect_request(req, fp, code, msg, headers, newurl)

    opener = OpenerDirector()  # without files, FTP and proxies
    for handler in (HTTPHandler, HTTPSHandler, HTTPDefaultErrorHandler, HTTPErrorProcessor, Stays):
        opener.add_handler(handler())
    end, parts, size = monotonic() + FETCH_S, [], 0
    request = Request(url, headers={"User-Agent": "hetrun", "Accept": "image/*"})
    with opener.open(request, timeout=STALL_S) as answer:
        while part := answer.read1(PART):
            size += len(part)
            parts.append(part)
            if size > MOST_PICTURE_BYTES:
                raise UnreadablePicture(LARGE)
            if monotonic() > end:
                raise UnreadablePicture(LATE)
    return b"".join(parts)


def _bounded(file: bytes) -> bytes:
    if len(file) > MOST_PICTURE_BYTES:
        raise UnreadablePicture(LARGE)
    return file


def _urls(body: Mapping[str, object]) -> Iterator[str]:
    """All addresses of pictures in a request's parts."""
    waiting = [body.get(name) for name in PLACES]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            kind = value.get("type")
            if kind == "image" and isinstance(source := value.get("source"), dict):  # Anthropic's
                if isinstance(url := source.get("url"), str):
                    yield url
            elif kind in PART_TYPES:
                if (url := url_of(value)) is not None:
                    yield url
            else:
                waiting += [value.get(name) for name in ("content", "output")]
