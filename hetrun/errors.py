"""The errors hetrun raises on purpose.

HetrunError
    UserError            the user's input was wrong: exit code 2, one sentence, no traceback
        ModelFileError   a model file is malformed, truncated or not supported
        OptionError      an option or setting is unknown or out of range
            FieldError   the same of a field inside messages or tools
        TemplateError    a chat template failed, or did something it may not do
        PictureError     a picture cannot be read
        ContextFull      a prompt does not fit into the context
        BudgetError      the memory granted cannot hold what was asked for
        BackendUnavailable   a backend asked for by name cannot work on this machine
        PluginError      what a package registered cannot be used, and is left out
    Cancelled            the caller asked to stop
    SystemFault          the operating system refused memory, a thread or a file operation
    BackendError         a backend failed while it worked: our fault
        DeviceLost       its device does nothing more in this process
    EngineStopped        the engine (or its worker process) is gone
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class HetrunError(Exception):
    """The root of everything hetrun raises on purpose."""


class UserError(HetrunError):
    """Something the user gave cannot be used; the message says what, where and what to do next."""


class ModelFileError(UserError):
    """A model file cannot be used."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = printable(reason)
        super().__init__(f"{printable(path)}: {self.reason}")

    def __reduce__(self) -> tuple[type[ModelFileError], tuple[str, str]]:
        # The worker process sends errors through a pipe; the default would pass one argument.
        return (type(self), (self.path, self.reason))


class OptionError(UserError):
    """An option is unknown, or its value is out of range."""


class FieldError(OptionError):
    """A field of a request is missing or wrong; `field` is its path, `code` a word for programs."""

    def __init__(self, message: str, field: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field, self.code = field, code

    def __reduce__(self) -> tuple[type[FieldError], tuple[str, str, str]]:
        return (type(self), (str(self), self.field, self.code))


class TemplateError(UserError):
    """A chat template failed."""


class PictureError(UserError):
    """A picture cannot be read."""


class ContextFull(UserError):
    """A prompt is longer than the context."""


class BudgetError(UserError):
    """The memory granted cannot hold what was asked for."""


class BackendUnavailable(UserError):
    """A backend that was asked for cannot work here."""


class PluginError(UserError):
    """What a package registered cannot be used: hetrun does without it."""

    def __init__(self, what: str, whose: str, reason: str) -> None:
        self.what, self.whose, self.reason = what, whose, reason
        super().__init__(f"{what} of {whose} is left out: {reason}")

    def __reduce__(self) -> tuple[type[PluginError], tuple[str, str, str]]:
        return (type(self), (self.what, self.whose, self.reason))


class Cancelled(HetrunError):
    """The caller asked to stop before the work was done."""


class SystemFault(HetrunError):
    """The operating system refused memory, a thread, or to read or write; another time it may work."""


class BackendError(HetrunError):
    """A backend failed while it worked."""


class DeviceLost(BackendError):
    """A device failed in such a way that this process cannot use it any more; another one can."""


class EngineStopped(HetrunError):
    """The engine has stopped and answers nothing any more."""


class Overloaded(HetrunError):
    """More is asked for than can be done in time; `retry_after_s` is when it is worth asking again."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[Overloaded], tuple[str, float | None]]:
        return (type(self), (str(self), self.retry_after_s))


class DeadlineExceeded(HetrunError):
    """The answer was not complete when it was not wanted any more."""


def printable(text: str) -> str:
    """On one line of a terminal: names and texts of strangers may hold what it obeys, and half characters."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@contextmanager
def system_faults(doing: str) -> Iterator[None]:
    """What the system refuses in here is a SystemFault that says what it was in the middle of."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError, SystemError) as error:
        if fault := system_fault(doing, error):
            raise fault from error
        raise


def system_fault(doing: str, error: BaseException) -> SystemFault | None:
    """The same error as one of ours; None: it is something else."""
    match error:
        case BrokenPipeError():  # who read our output has gone: the system is not to blame
            return None
        case MemoryError():
            return SystemFault(f"{doing}: the system has no memory left; free some, or use less (--ram)")
        # numpy says either of these where a function of arrays gets no memory.
        case SystemError() if "without exception set" in str(error) or "without setting an" in str(error):
            return SystemFault(f"{doing}: the system has no memory left; free some, or use less (--ram)")
        case RuntimeError() if str(error) == "can't start new thread":
            return SystemFault(f"{doing}: the system starts no more threads; check its limits (ulimit -u)")
        case OSError():
            name = f"{printable(str(error.filename))}: " if error.filename is not None else ""
            return SystemFault(f"{doing}: {name}{error.strerror or printable(str(error))}")
    return None
