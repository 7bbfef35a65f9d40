"""The options of `hetrun bench` as they were typed, and which of its three parts they mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetrun.errors import OptionError
from hetrun.tools.bench.cases import BenchOptions, numbers
from hetrun.tools.bench.serving.cases import ServingOptions
from hetrun.tools.bench.sweep.budgets import DEPTH, SweepOptions, budgets, is_sweep


@dataclass(frozen=True, slots=True)
class TypedBenchOptions:
    """As they were typed; None is what was not."""

    prompt: str | None
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
    ram: str | None = None
    picture: Path | None = None
    text: Path | None = None


def options_of(asked: TypedBenchOptions) -> BenchOptions | ServingOptions | SweepOptions:
    """What is to be measured: in process, of a server, or in several budgets. What belongs to another one is
    refused."""
    of_servers = {
        "--clients": asked.clients,
        "--shared-prefix": asked.shared_prefix,
        "--arrival": asked.arrival,
    }
    if asked.ram is not None and is_sweep(asked.ram):
        return _sweep(asked, asked.ram, of_servers)
    if asked.picture is not None:
        raise OptionError("--picture draws a sweep over budgets; give --ram several, as 1GiB,2GiB,50%")
    prompt = numbers("-p", "512" if asked.prompt is None else asked.prompt)
    generate = numbers("-n", asked.generate)
    if any(text is not None for text in of_servers.values()):
        in_process: dict[str, object] = {"-d": asked.depth, "-b": asked.batch, "--beside": asked.beside}
        in_process |= {"--vs-threads": asked.vs_threads, "--explain": asked.explain or None}
        in_process |= {"--ram": asked.ram, "--text": asked.text}
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
        prompt=prompt,
        generate=generate,
        depth=depth,
        batch=batch,
        rounds=asked.rounds,
        vs=asked.vs,
        explain=asked.explain,
        output=asked.output,
        vs_threads=threads,
        beside=beside,
        text=asked.text,
    )


def _sweep(asked: TypedBenchOptions, ram: str, of_servers: dict[str, str | None]) -> SweepOptions:
    others: dict[str, object] = {"-p": asked.prompt, "--beside": asked.beside, "--requests": asked.requests}
    for flag, value in (others | of_servers | {"--explain": asked.explain or None}).items():
        if value is not None:
            raise OptionError(
                f"{flag} is not for a sweep over budgets, which measures answers in each of them"
            )
    return SweepOptions(
        budgets(ram),
        generate=_number("-n", asked.generate),
        depth=DEPTH if asked.depth is None else _number("-d", asked.depth, 0),
        batch=_number("-b", asked.batch or "1"),
        rounds=asked.rounds,
        vs=asked.vs,
        output=asked.output,
        vs_threads=None if asked.vs_threads is None else _number("--vs-threads", asked.vs_threads),
        picture=asked.picture,
        text=asked.text,
    )


def _number(flag: str, text: str, least: int = 1) -> int:
    found = numbers(flag, text, least)
    if len(found) > 1:
        raise OptionError(f"{flag} must be one number, not {text!r}")
    return found[0]


def _refuse(given: dict[str, object], *of_servers: str) -> None:
    for flag, value in given.items():
        if value is not None:
            raise OptionError(f"{flag} is for runs in process, and {', '.join(of_servers)} measure a server")
