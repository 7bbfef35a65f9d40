"""What can be measured of a server, and how it was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun.errors import OptionError
from hetrun.tools.bench.cases import OUTPUTS
from hetrun.tools.bench.serving.servers import ServerCapacity

TAIL = 2  # words that a request has of its own behind a shared beginning
FEW = 8  # tokens of an answer where only its first one counts
LEAD = 8  # tokens of a running answer before its quiet time begins
AFTER = 2048  # tokens that a running answer may go on for beside a newcomer
SPARE = 32  # tokens by which a prompt may miss its length


@dataclass(frozen=True, slots=True)
class LoadCase:
    """Clients that each send their next request when the last one has ended."""

    clients: int
    prompt: int
    answer: int
    requests: int  # of each client

    @property
    def name(self) -> str:
        """In llama-bench's words."""
        return f"pp{self.prompt}+tg{self.answer} x{self.clients}"

    @property
    def room(self) -> ServerCapacity:
        """What the server must hold at once."""
        return ServerCapacity(self.clients, self.prompt + self.answer + SPARE)


@dataclass(frozen=True, slots=True)
class PrefixCase:
    """Two requests that begin alike: how much sooner the second one's answer begins."""

    prefix: int

    clients = 1

    @property
    def name(self) -> str:
        """For tables."""
        return f"prefix{self.prefix}"

    @property
    def room(self) -> ServerCapacity:
        """What the server must hold at once."""
        return ServerCapacity(1, self.prefix + 4 * TAIL + FEW + SPARE)


@dataclass(frozen=True, slots=True)
class ArrivalCase:
    """Answers that run while a long prompt arrives: how smooth they stay, and how long the newcomer waits."""

    clients: int  # answers that run
    prompt: int  # tokens of their prompts
    quiet: int  # tokens of each that come before the newcomer does
    arrival: int  # tokens of the newcomer's prompt

    @property
    def name(self) -> str:
        """For tables."""
        return f"arrival{self.arrival} x{self.clients}"

    @property
    def answer(self) -> int:
        """Tokens that a running answer may have at most."""
        return LEAD + self.quiet + AFTER

    @property
    def room(self) -> ServerCapacity:
        """What the server must hold at once: every slot of the peer has the same size."""
        return ServerCapacity(self.clients + 1, max(self.arrival + FEW, self.prompt + self.answer) + SPARE)


ServingCase = LoadCase | PrefixCase | ArrivalCase


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """What `hetrun bench` was asked to measure of a server."""

    clients: tuple[int, ...] = ()  # --clients
    shared_prefix: tuple[int, ...] = ()  # --shared-prefix
    arrival: tuple[int, ...] = ()  # --arrival
    prompt: tuple[int, ...] = (512,)  # -p
    generate: tuple[int, ...] = (64,)  # -n
    requests: int = 2  # --requests
    rounds: int = 5  # -r
    vs: str | None = None
    output: str = "table"

    def __post_init__(self) -> None:
        if self.output not in OUTPUTS:
            raise OptionError(f"-o must be one of {', '.join(OUTPUTS)}, not {self.output!r}")
        for flag, value in (("-r", self.rounds), ("--requests", self.requests)):
            if value < 1:
                raise OptionError(f"{flag} must be 1 or more, not {value}")
        if not min(self.prompt) or not min(self.generate):
            raise OptionError("a server needs a prompt and gives an answer: -p and -n must be 1 or more")

    def cases(self) -> list[ServingCase]:
        """Every combination, in the order of the options. With --arrival, --clients says how many answers run
        then; without either it is one."""
        sizes = [(p, n) for p in self.prompt for n in self.generate]
        found: list[ServingCase] = [PrefixCase(tokens) for tokens in self.shared_prefix]
        for clients in self.clients or (1,):
            for p, n in sizes:
                found += [ArrivalCase(clients, p, n, tokens) for tokens in self.arrival]
                if not self.arrival and self.clients:
                    found.append(LoadCase(clients, p, n, self.requests))
        return list(dict.fromkeys(found))
