"""A picture that was copied, which terminals do not paste: other programs have it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from hetrun.client.events import MOST_PICTURE_BYTES
from hetrun.errors import UserError
from hetrun.system.run_queue import time_limit
from hetrun.system.units import format_bytes

PATIENCE_S = 5.0  # the program whose picture it is may have to make it first
MOST_KINDS = 1 << 16  # bytes of a list of kinds
KINDS = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
POWERSHELL = (
    "Add-Type -AssemblyName System.Windows.Forms; $p = [Windows.Forms.Clipboard]::GetImage(); if ($p) { "
    "$m = New-Object IO.MemoryStream; $p.Save($m, [Drawing.Imaging.ImageFormat]::Png); "
    "[Convert]::ToBase64String($m.ToArray()) }"
)
MISSING = (
    "pictures on the clipboard cannot be read here: that takes wl-clipboard (Wayland) or xclip (X11) on the "
    "machine where hetrun runs. Save the picture, and write its path in a message"
)


class ClipboardReader(NamedTuple):
    """A program that has the clipboard's picture."""

    kinds: Sequence[str]  # what lists the kinds there are; nothing: it has PNG, or nothing
    read: Callable[[str], Sequence[str]]  # what writes one of a kind
    decode: Callable[[bytes], bytes] = bytes


def reader(
    environ: Mapping[str, str] = os.environ, which: Callable[[str], str | None] = shutil.which
) -> ClipboardReader:
    """The one for this desktop; a UserError if there is none."""
    if environ.get("WAYLAND_DISPLAY") and which("wl-paste"):
        return ClipboardReader(
            ("wl-paste", "--list-types"), lambda kind: ("wl-paste", "--no-newline", "--type", kind)
        )
    if environ.get("DISPLAY") and which("xclip"):
        xclip = ("xclip", "-selection", "clipboard", "-o", "-t")
        return ClipboardReader((*xclip, "TARGETS"), lambda kind: (*xclip, kind))
    if which("pngpaste"):
        return ClipboardReader((), lambda kind: ("pngpaste", "-"))
    if which("osascript"):
        return ClipboardReader(
            (), lambda kind: ("osascript", "-e", "the clipboard as «class PNGf»"), from_applescript
        )
    if which("powershell.exe"):
        command = ("powershell.exe", "-NoProfile", "-STA", "-Command", POWERSHELL)
        return ClipboardReader((), lambda kind: command, b64decode)
    raise UserError(MISSING)


async def copied_picture(found: ClipboardReader) -> bytes | None:
    """The picture on the clipboard, if there is one."""
    kind = KINDS[0]
    if found.kinds:
        there = (await _output(found.kinds, MOST_KINDS)).decode("utf-8", "replace").split()
        kind = next((kind for kind in KINDS if kind in there), "")
    if not kind:
        return None
    raw = await _output(found.read(kind), 3 * MOST_PICTURE_BYTES)  # which may be in letters
    try:
        picture = found.decode(raw)
    except ValueError as error:
        raise UserError("the clipboard's picture is damaged") from error
    if len(picture) > MOST_PICTURE_BYTES:
        raise UserError(f"the clipboard's picture is larger than {format_bytes(MOST_PICTURE_BYTES)}")
    return picture or None


def from_applescript(raw: bytes) -> bytes:
    """«data PNGf...», in hexadecimal digits."""
    found = re.fullmatch(rb"\s*\xc2\xab\s*data PNGf([0-9A-Fa-f]*)\s*\xc2\xbb\s*", raw)
    return bytes.fromhex(found[1].decode()) if found else b""


async def _output(command: Sequence[str], most: int) -> bytes:
    """What a program writes; nothing if it fails, as those do that find no picture."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        raise UserError(f"{command[0]} does not start: {error.strerror}") from error
    try:
        async with time_limit(PATIENCE_S, process.pid, os.getpid()):
            raw = await _read(process, most)
            return raw if await process.wait() == 0 else b""
    except TimeoutError:
        raise UserError(f"{command[0]} gives no answer: the clipboard is not read") from None
    finally:
        if process.returncode is None:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill it. It has ended for asyncio only when its output is read to the end, also what is not wanted."""
    assert process.stdout is not None, "it is a pipe"
    with suppress(ProcessLookupError):
        process.kill()
    with suppress(TimeoutError):
        async with time_limit(PATIENCE_S, process.pid):  # a child of its own may keep the pipe open
            while await process.stdout.read(1 << 16):
                pass
            await process.wait()


async def _read(process: asyncio.subprocess.Process, most: int) -> bytes:
    assert process.stdout is not None, "it is a pipe"
    parts, size = [], 0
    while part := await process.stdout.read(1 << 16):
        parts.append(part)
        size += len(part)
        if size > most:
            raise UserError(f"what is on the clipboard is larger than {format_bytes(most)}")
    return b"".join(parts)
