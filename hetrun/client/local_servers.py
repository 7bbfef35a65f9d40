"""The servers that this user runs on this machine, and how each is found, asked and stopped.

Each has a control socket in a folder that only the user may enter. It says what it serves, and ends when
it is told to: no process is ever signalled, so none that took over the number of one that is gone. A socket
at which nobody listens any more was left by a server that was killed, and is removed.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hetrun.client.address import address
from hetrun.config import dirs
from hetrun.errors import OptionError, UserError
from hetrun.system.strict_json import parsed

STATUS, STOP = b"status\n", b"stop\n"
ENDING = ".sock"
MOST_PATH = 90  # bytes of a folder's path: with a name behind it, it has to fit into a socket's address
MOST_REPLY = 1 << 20  # bytes: a thousand names of models
ANSWER_S = 5.0  # in which a server says what it serves
END_S = 60.0  # in which it ends; writing a prompt cache may take so long


@dataclass(frozen=True, slots=True)
class Running:
    """One server, as it describes itself."""

    address: str
    pid: int
    models: tuple[str, ...]
    state: str  # loading, ready or stopping; stuck: it does not answer
    since: float  # seconds since 1970
    version: str
    control: Path

    def is_called(self, name: str) -> bool:
        """Whether somebody means it by this address or number."""
        place = _place(self.address)
        return name == str(self.pid) or (place is not None and place == _place(name))


def runtime_folder() -> Path:
    """Where the control sockets are; it exists then, and is this user's alone. OSError: it cannot be had."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    folder = base / "hetrun" if base.is_absolute() and base.is_dir() else dirs().cache / "servers"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "is not a folder of this user", str(folder))
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


@contextmanager
def control_socket() -> Iterator[socket.socket]:
    """A control socket of this process that listens; its file goes with it."""
    folder = runtime_folder()
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
        try:
            with _short(folder) as short:
                listener.bind(str(short / name))
        finally:
            os.umask(before)
        listener.listen()
        # Only now does it get the name of one that is looked at: none is found before it listens.
        (folder / name).rename(folder / f"{name}{ENDING}")
        yield listener
    finally:
        listener.close()
        for left in (name, f"{name}{ENDING}"):
            (folder / left).unlink(missing_ok=True)


def running() -> list[Running]:
    """All of them, the oldest first."""
    try:
        folder = runtime_folder()
        controls = sorted(path for path in folder.iterdir() if path.suffix == ENDING and path.is_socket())
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from None
    found = [server for control in controls if (server := _look(control))]
    return sorted(found, key=lambda server: (server.since, server.pid))


def meant(servers: list[Running], name: str | None, everyone: bool) -> list[Running]:
    """Those that are meant by an address or a number of a process, or by nothing where there is only one."""
    if everyone:
        if name is not None:
            raise OptionError(f"--all and {name} are both given: take one of them")
        return servers
    if name is None:
        if len(servers) > 1:
            raise UserError(f"several servers run: name one, or give --all: {_listed(servers)}")
        if not servers:
            raise UserError("no server of yours is running")
        return servers
    found = [server for server in servers if server.is_called(name)]
    if not found:
        raise UserError(f"no server of yours is {name}: {_listed(servers) or 'none is running'}")
    return found


def stop(servers: list[Running]) -> None:
    """End them, and wait until they have ended; UserError names one that does not."""
    waiting: list[tuple[Running, socket.socket]] = []
    try:
        for server in servers:
            with suppress(ConnectionError, FileNotFoundError):  # it has ended by itself
                waiting.append((server, _asked(server.control, STOP)))
        for server, connection in waiting:
            _until_ended(server, connection)
    finally:
        for _, connection in waiting:
            connection.close()


def _until_ended(server: Running, connection: socket.socket) -> None:
    with suppress(ConnectionError):
        try:
            if not _line(connection):
                return
            connection.settimeout(END_S)
            while connection.recv(4096):
                pass
        except TimeoutError:
            raise UserError(
                f"the server with pid {server.pid} does not end; kill -9 {server.pid} ends it without a word"
            ) from None


def _listed(servers: list[Running]) -> str:
    return ", ".join(
        f"{server.address or 'one that does not answer'} (pid {server.pid})" for server in servers
    )


def _look(control: Path) -> Running | None:
    """None: nobody is there, or somebody else."""
    try:
        connection = _asked(control, STATUS)
    except ConnectionRefusedError:
        control.unlink(missing_ok=True)
        return None
    except OSError:
        return None
    with closing(connection):
        pid = _pid_of(connection)
        try:
            said = parsed(_line(connection))
            return _read(said, pid, control) if isinstance(said, dict) else None
        except TimeoutError:
            return Running("", pid, (), "stuck", control.lstat().st_mtime, "", control)
        except (OSError, ValueError, RecursionError):
            return None


def _asked(control: Path, what: bytes) -> socket.socket:
    """A connection over which something was asked."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(ANSWER_S)
        with _short(control.parent) as folder:
            connection.connect(str(folder / control.name))
        connection.sendall(what)
    except BaseException:
        connection.close()
        raise
    return connection


def _line(connection: socket.socket) -> bytes:
    """Up to the end of the line, or of what comes."""
    found = b""
    while not found.endswith(b"\n") and len(found) <= MOST_REPLY:
        if not (more := connection.recv(65536)):
            break
        found += more
    return found


def _pid_of(connection: socket.socket) -> int:
    """The process that listens, as the kernel knows it; 0 where it does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    size = struct.calcsize("3i")
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid)


def _read(said: Mapping[str, object], pid: int, control: Path) -> Running | None:
    match said:
        case {
            "address": str(where),
            "pid": int(own),
            "models": [*models],
            "state": str(state),
            "since": int() | float() as since,
            "version": str(version),
        } if all(isinstance(name, str) for name in models):
            return Running(where, pid or own, tuple(map(str, models)), state, float(since), version, control)
    return None


def _place(name: str) -> tuple[object, ...] | None:
    """An address in one form, however it is written; None: it is none."""
    try:
        found = address(name, "ADDRESS")
    except OptionError:
        return None
    if found.socket:
        return (os.path.abspath(found.socket),)
    if "://" not in name and not urlsplit(f"//{name}").port:
        return None  # a word
    here = found.host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")
    return ("this machine" if here else found.host, found.port)


@contextmanager
def _short(folder: Path) -> Iterator[Path]:
    """A way to the folder that fits into a socket's address, where the system has one."""
    if len(os.fsencode(folder)) <= MOST_PATH or not Path("/proc/self/fd").is_dir():
        yield folder
        return
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{opened}")
    finally:
        os.close(opened)
