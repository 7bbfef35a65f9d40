"""The subcommands and their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetrun import __version__
from hetrun.cli import options as o
from hetrun.config import Settings

app = typer.Typer(
    name="hetrun",
    help="Run language models on this machine, on whatever silicon it has.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich takes longer to load than everything else that --help needs
    pretty_exceptions_enable=False,
)


def run_command(arguments: list[str]) -> int:
    """Run a subcommand; its exit code."""
    return int(typer.main.get_command(app).main(arguments, prog_name="hetrun", standalone_mode=False) or 0)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hetrun {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Options in front of the subcommand."""


@app.command()
def run(
    prompt: Annotated[str | None, typer.Argument(help="the prompt; - or nothing reads it from stdin")] = None,
    model: o.Model = None,
    system: o.System = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="continue the text as it stands, without the chat template")
    ] = False,
    max_tokens: o.MaxTokens = None,
    temperature: o.Temperature = None,
    seed: o.Seed = None,
    top_k: o.TopK = 40,
    top_p: o.TopP = 0.95,
    min_p: o.MinP = 0.05,
    ctx: o.Ctx = None,
    ram: o.Ram = None,
    threads: o.Threads = None,
    backend: o.Backends = None,
    ubatch: o.Ubatch = None,
    kv_type: o.KvType = None,
    deterministic: o.Deterministic = False,
    plan: o.PlanFile = None,
    chat_template: o.Template = None,
    json: o.Json = False,
    verbose: o.Verbose = False,
) -> None:
    """Answer one prompt."""
    from hetrun.cli.run import Sampling, answer

    settings = Settings.resolve(
        environ=None, model=model, system=system, max_tokens=max_tokens, temperature=temperature, seed=seed,
        ctx=ctx, ram=ram, threads=threads, backends=backend, ubatch=ubatch, kv_type=kv_type,
        deterministic=deterministic or None, plan=plan, chat_template=chat_template,
    )  # fmt: skip
    answer(settings, prompt, Sampling(top_k, top_p, min_p), raw=raw, as_json=json, verbose=verbose)


@app.command()
def chat(
    model: o.Model = None,
    system: o.System = None,
    max_tokens: o.MaxTokens = None,
    temperature: o.Temperature = None,
    seed: o.Seed = None,
    ctx: o.Ctx = None,
    ram: o.Ram = None,
    threads: o.Threads = None,
    backend: o.Backends = None,
    kv_type: o.KvType = None,
    chat_template: o.Template = None,
) -> None:
    """Talk to a model in the terminal."""
    from hetrun.cli.fronts import talk

    settings = Settings.resolve(
        environ=None, model=model, system=system, max_tokens=max_tokens, temperature=temperature,
        seed=seed, ctx=ctx, ram=ram, threads=threads, backends=backend, kv_type=kv_type,
        chat_template=chat_template,
    )  # fmt: skip
    raise typer.Exit(talk(settings))


@app.command()
def serve(
    model: o.Model = None,
    host: o.Host = None,
    port: o.Port = None,
    uds: o.Uds = None,
    api_key: o.ApiKey = None,
    strict: o.Strict = False,
    ctx: o.Ctx = None,
    ram: o.Ram = None,
    threads: o.Threads = None,
    backend: o.Backends = None,
    kv_type: o.KvType = None,
    chat_template: o.Template = None,
    verbose: o.Verbose = False,
) -> None:
    """Serve OpenAI's chat API on this machine."""
    from hetrun.cli.fronts import serve_forever

    settings = Settings.resolve(
        environ=None, model=model, host=host, port=port, uds=uds, api_key=api_key, strict=strict or None,
        ctx=ctx, ram=ram, threads=threads, backends=backend, kv_type=kv_type, chat_template=chat_template,
    )  # fmt: skip
    serve_forever(settings, verbose)


@app.command()
def bench(
    model: o.Model = None,
    prompt: Annotated[str, typer.Option("-p", help="tokens of a prompt; 512,2048 measures both")] = "512",
    generate: Annotated[str, typer.Option("-n", help="tokens to generate")] = "64",
    depth: Annotated[str, typer.Option("-d", help="tokens seen before generating")] = "512",
    batch: Annotated[str, typer.Option("-b", help="sequences at once")] = "1",
    rounds: Annotated[int, typer.Option("-r", help="samples of each")] = 5,
    vs: Annotated[str | None, typer.Option(help="measure llama.cpp in turn with hetrun")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="where the time went")] = False,
    output: Annotated[str, typer.Option("-o", help="table, json or csv")] = "table",
    ctx: o.Ctx = None,
    threads: o.Threads = None,
    backend: o.Backends = None,
    ubatch: o.Ubatch = None,
    kv_type: o.KvType = None,
) -> None:
    """Measure speed, alone or side by side with llama.cpp."""
    from hetrun import bench as tool
    from hetrun.bench.cases import BenchOptions, numbers

    settings = Settings.resolve(
        environ=None, model=model, ctx=ctx, threads=threads, backends=backend, ubatch=ubatch, kv_type=kv_type
    )
    wanted = BenchOptions(
        numbers("-p", prompt), numbers("-n", generate), numbers("-d", depth), numbers("-b", batch, 1),
        rounds, vs, explain, output,
    )  # fmt: skip
    tool.main(settings, wanted)


@app.command(name="eval")
def evaluate(
    file: Annotated[Path, typer.Option("-f", "--file", help="a text file", show_default=False)],
    model: o.Model = None,
    against: Annotated[str, typer.Option(help="reference or llama.cpp")] = "reference",
    tokens: Annotated[int, typer.Option(help="how many tokens of the text")] = 2048,
    threads: o.Threads = None,
    backend: o.Backends = None,
    ubatch: o.Ubatch = None,
    kv_type: o.KvType = None,
    json: o.Json = False,
) -> None:
    """Perplexity of a text, and how close the predictions are to another computation's."""
    from hetrun import evaluate as tool

    settings = Settings.resolve(
        environ=None, model=model, threads=threads, backends=backend, ubatch=ubatch, kv_type=kv_type
    )
    tool.main(settings, tool.EvalOptions(file, against, tokens, json))


@app.command()
def plan(
    model: o.Model = None,
    ctx: o.Ctx = None,
    ram: o.Ram = None,
    threads: o.Threads = None,
    backend: o.Backends = None,
    ubatch: o.Ubatch = None,
    kv_type: o.KvType = None,
    deterministic: o.Deterministic = False,
    plan: o.PlanFile = None,
    json: o.Json = False,
) -> None:
    """What would run where, and why, without loading the model."""
    from hetrun.cli.reports import print_plan

    settings = Settings.resolve(
        environ=None, model=model, ctx=ctx, ram=ram, threads=threads, backends=backend, ubatch=ubatch,
        kv_type=kv_type, deterministic=deterministic or None, plan=plan,
    )  # fmt: skip
    print_plan(settings, json)


@app.command()
def inspect(
    model: o.ModelFile,
    tensors: Annotated[bool, typer.Option("--tensors", help="list every tensor")] = False,
    json: o.Json = False,
) -> None:
    """What a model file says of itself."""
    from hetrun.cli.reports import print_model

    print_model(model, tensors, json)


@app.command()
def devices(json: o.Json = False) -> None:
    """The backends, and why one cannot work here."""
    from hetrun.cli.reports import print_devices

    print_devices(json)
