"""The options of `hetrun bench` as they were typed, and which of its two parts they mean."""

from __future__ import annotations

from dataclasses import dataclass

from hetrun.bench.cases import BenchOptions, numbers
from hetrun.bench.serving_cases import ServingOptions
from hetrun.errors import OptionError


@dataclass(frozen=True, slots=True)
class Asked:
    """As they were typed; None is what was not."""

    prompt: str
    generate: str
    depth: str | None
    batch: str | None
    rounds: int
    vs: str | None
    explain: bool
    clients: str | None
    requests: str | None
    shared_prefix: str | None
    arrival: str | None
    output: str
    vs_threads: str | None = None
    beside: str | None = None


def options_of(asked: Asked) -> BenchOptions | ServingOptions:
    """What is to be measured: in process, or of a server. What belongs to the other one is refused."""
    of_servers = {
        "--clients": asked.clients,
        "--shared-prefix": asked.shared_prefix,
        "--arrival": asked.arrival,
    }
    prompt, generate = numbers("-p", asked.prompt), numbers("-n", asked.generate)
    if any(text is not None for text in of_servers.values()):
        in_process: dict[str, object] = {"-d": asked.depth, "-b": asked.batch, "--beside": asked.beside}
        in_process |= {"--vs-threads": asked.vs_threads, "--explain": asked.explain or None}
        _refuse(in_process, *of_servers)
        clients, prefix, arrival = (
            () if text is None else numbers(flag, text, 1) for flag, text in of_servers.items()
        )
        requests = _number("--requests", asked.requests or "2")
        return ServingOptions(
            clients, prefix, arrival, prompt, generate, requests, asked.rounds, asked.vs, asked.output
        )
    if asked.requests is not None:
        raise OptionError("--requests says how many requests each of --clients sends; give --clients too")
    depth, batch = numbers("-d", asked.depth or "512"), numbers("-b", asked.batch or "1", 1)
    threads = None if asked.vs_threads is None else _number("--vs-threads", asked.vs_threads)
    beside = 0 if asked.beside is None else _number("--beside", asked.beside)
    return BenchOptions(
        *(prompt, generate, depth, batch, asked.rounds),
        *(asked.vs, asked.explain, asked.output, threads, beside),
    )


def _number(flag: str, text: str) -> int:
    found = numbers(flag, text, 1)
    if len(found) > 1:
        raise OptionError(f"{flag} must be one number, not {text!r}")
    return found[0]


def _refuse(given: dict[str, object], *of_servers: str) -> None:
    for flag, value in given.items():
        if value is not None:
            raise OptionError(f"{flag} is for runs in process, and {', '.join(of_servers)} measure a server")
