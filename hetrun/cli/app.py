"""The subcommands and their options; what they do is imported when they run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from hetrun import __version__
from hetrun.cli import options
from hetrun.cli import sampling_options as sampling
from hetrun.cli.commands import InOrder
from hetrun.cli.exit_codes import heed_sigterm
from hetrun.config import Settings
from hetrun.errors import OptionError

if TYPE_CHECKING:
    from hetrun.cli.model_argument import Asked


@click.group(
    cls=InOrder,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="hetrun %(version)s")
def hetrun() -> None:
    """Run local language models within a memory limit that you choose.

    hetrun run "Why is the sky blue?" asks the demonstration model; hetrun list has the names of others.
    """


def run_command(arguments: list[str]) -> int:
    """Run a subcommand; its exit code."""
    return int(hetrun.main(arguments, prog_name="hetrun", standalone_mode=False) or 0)


@hetrun.command(cls=sampling.Command, short_help="Answer a prompt, each line of a file, or line by line.")
@click.argument("words", nargs=-1, metavar="[MODEL] [PROMPT]", shell_complete=options.files)
@options.settings("model", "offline", *options.ANSWERING, "prompt_cache")
@click.option(
    "-i", "--interactive", is_flag=True, help="a conversation, line by line; /bye or Ctrl-D ends it"
)
@click.option("--continue", "go_on", is_flag=True, help="continue the last conversation of -i")
@click.option("-p", "--prompt", "text", hidden=True)
@click.option("--raw", is_flag=True, help="continue the text as it stands, without the chat template")
@click.option("-f", "--file", "source", metavar="FILE", help="a request in each line; -: standard input")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="with -f: where results go, in JSON lines"
)
@click.option("--resume", is_flag=True, help="with -o: continue with the results that exist")
@click.option(
    "--unordered", is_flag=True, help="with -f: results as they are finished, not in the file's order"
)
@click.option(
    "--workers",
    cls=options.Several,
    multiple=True,
    metavar="URL...",
    help="with -f: servers that answer instead, or a package's workers: ray:auto",
)
@options.settings(
    "url", "no_server", "api_key", "strict", help={"api_key": "with --url or --workers: their key"}
)
@sampling.options(*sampling.SHAPE, *sampling.SCORES)
@options.settings(*options.RUNNING)
@options.json_or_full
@options.verbose
@sampling.options(*sampling.SAMPLING)
def run(
    words: tuple[str, ...],
    text: str | None,
    interactive: bool,
    go_on: bool,
    raw: bool,
    source: str | None,
    output: Path | None,
    resume: bool,
    unordered: bool,
    workers: tuple[str, ...],
    as_json: Literal["short", "full"] | None,
    verbose: bool,
    **given: object,
) -> int:
    """Answer a PROMPT, for example: hetrun run smollm2 "Why is the sky blue?"

    MODEL is a .gguf file, a folder, hf:user/repo, or a name that hetrun list shows; with -m, all words are
    the prompt. Text on standard input comes before the prompt: hetrun run "Sum this up." < report.txt. Alone,
    it is the prompt.

    With -f it answers every line of a file: a prompt, {"prompt": ...} or {"messages": [...]} with other
    fields of a request, or OpenAI's batch format. The results are JSON lines. If some lines fail, the others
    continue, and the exit code is 3.

    With --url a running server answers. Without it, a server of yours that has loaded the model does (hetrun
    ps), unless options such as --ram say how the model runs; --no-server always loads it.
    """
    from hetrun.cli.model_argument import Asked

    chosen = sampling.taken(given)
    asked = Asked.of(words, text, given, here=not given["url"])
    if source is None:
        alone = {"-o": output, "--resume": resume, "--unordered": unordered, "--workers": workers}
        options.refuse_without("-f", alone | {"--strict": given["strict"]})
        talks = {"-i": interactive, "--continue": go_on}
        return _ask(asked, chosen, given, talks, raw=raw, as_json=as_json, verbose=verbose)
    from hetrun.cli.batch import Files, run_file

    options.refuse_beside("-f", {"-i": interactive, "--continue": go_on})
    elsewhere = {"--url": given["url"], "--no-server": given["no_server"]}
    options.refuse_beside("-f", elsewhere, "use --workers")
    if asked.prompt is not None:
        raise OptionError(f"-f {source} and a prompt are both given: take one of them")
    files = Files(source, output, resume, unordered, workers)
    settings = Settings.resolve(environ=None, **given) if workers else asked.resolved(given)
    return run_file(settings, files, chosen, raw=raw, as_json=as_json is not None, verbose=verbose)


def _ask(
    asked: Asked,
    chosen: Mapping[str, object],
    given: dict[str, object],
    talks: Mapping[str, bool],
    *,
    raw: bool,
    as_json: Literal["short", "full"] | None,
    verbose: bool,
) -> int:
    """One prompt, of a running server or a model that is loaded here; or a conversation (`talks`)."""
    if given["url"]:
        options.refuse_beside("--url", talks)
    else:
        options.refuse_without("-f or --url", {"--api-key": given["api_key"]})
    settings = asked.resolved(given)
    interactive, go_on = talks["-i"], talks["--continue"]
    if not settings.url and asked.is_conversation(interactive, go_on, plain=not raw and not as_json):
        from hetrun.cli.conversation import converse

        flag = "--continue" if go_on else "-i" if interactive else "a conversation"
        options.refuse_beside(flag, {"--raw": raw, "--json": as_json})
        once = go_on and not interactive
        return converse(settings, asked.prompt, chosen, go_on=go_on, once=once, verbose=verbose)
    from hetrun.cli.run import answer

    answer(settings, asked.prompt, chosen, raw=raw, as_json=as_json, verbose=verbose)
    return 0


@hetrun.command(cls=sampling.Command, short_help="Talk to a model in the terminal.")
@options.model
@options.settings("url", "api_key", *options.ANSWERING, "prompt_cache", *options.RUNNING)
@sampling.options(*sampling.SAMPLING)
def chat(**given: object) -> None:
    """Talk to a model in the terminal, and see what the machine does.

    With --url the model is that of a running server, such as http://localhost:8080 or unix:/path/to.sock.
    """
    from hetrun.cli.chat import talk

    chosen = sampling.taken(given)
    talk(options.resolved_or_remote(given), chosen)


@hetrun.command(cls=sampling.Command, short_help="Serve OpenAI's chat API on this machine.")
@options.model
@options.settings("models", "models_max", "sleep_idle")
@options.settings("host", "port", "uds", "api_key", "allowed_hosts", "cors_origins", "queue", "strict")
@options.settings("temperature", "chat_template", "tool_parser", "reasoning_format", "prompt_cache")
@options.settings(*options.RUNNING)
@options.verbose
@sampling.options(*sampling.SAMPLING)
def serve(verbose: bool, **given: object) -> None:
    """Serve OpenAI's chat API on this machine.

    Sampling options are the defaults of requests.
    """
    from hetrun.cli.serve import serve_forever

    chosen = sampling.taken(given)
    serve_forever(options.resolved(given), chosen, verbose)


@hetrun.command(name="ps")
@options.as_json
def list_servers(as_json: bool) -> None:
    """Your running servers: models, addresses, memory, requests."""
    from hetrun.cli import servers

    servers.print_servers(as_json)


@hetrun.command(short_help="Stop a running server of yours.")
@click.argument("name", required=False)
@click.option("--all", "all_of_them", is_flag=True, help="every server of yours")
def stop(name: str | None, all_of_them: bool) -> None:
    """Stop a running server of yours: NAME is its model, address or pid.

    Without NAME it stops the only one. Running answers have two seconds to end.
    """
    from hetrun.cli import servers

    servers.stop_servers(name, all_of_them)


@hetrun.command(short_help="Measure speed, alone or beside llama.cpp.")
@options.model
@click.option("-p", "prompt", help="tokens of the prompt; 512,2048: both  [default: 512]")
@click.option("-n", "generate", default="64", show_default=True, help="tokens to generate")
@click.option(
    "-d", "depth", help="tokens before the generated ones  [default: 512; 32 in a sweep over --ram]"
)
@click.option("-b", "batch", help="sequences at once  [default: 1]")
@click.option("-r", "rounds", default=5, show_default=True, help="samples of each")
@click.option(
    "--vs", metavar="PEER", help="measure a peer in turn: llama.cpp, or for servers llama-server[=PATH]"
)
@click.option(
    "--vs-threads", metavar="N", help="the peer's threads  [default: the number that suits it best]"
)
@click.option("--beside", metavar="N", help="while N other programs keep a core busy each")
@click.option(
    "--text",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="read and write the tokens of this text, not random ones",
)
@click.option("--explain", is_flag=True, help="where the time went")
@click.option("--clients", metavar="N", help="measure a server with N clients at once; 1,4,16: each")
@click.option("--requests", metavar="N", help="requests of each client in one sample  [default: 2]")
@click.option(
    "--shared-prefix",
    metavar="N",
    help="time to a server's first token if N tokens of the prompt were seen before",
)
@click.option(
    "--arrival", metavar="N", help="how smooth --clients answers are while a prompt of N tokens arrives"
)
@click.option(
    "--ram", metavar="VALUE", help="memory limit, such as 2GiB; several or shares are a sweep: 1GiB,2GiB,50%"
)
@click.option("--picture", metavar="FILE", type=click.Path(path_type=Path), help="draw a sweep into FILE.svg")
@click.option("-o", "output", default="table", show_default=True, help="table, json or csv")
@options.settings(
    "ctx", "vram", "threads", "backends", "ubatch", "kv_type", "precision", "planner", "streaming"
)
@options.settings("spec")
def bench(
    prompt: str | None,
    generate: str,
    depth: str | None,
    batch: str | None,
    rounds: int,
    vs: str | None,
    vs_threads: str | None,
    beside: str | None,
    text: Path | None,
    explain: bool,
    clients: str | None,
    requests: str | None,
    shared_prefix: str | None,
    arrival: str | None,
    ram: str | None,
    picture: Path | None,
    output: str,
    **given: object,
) -> None:
    """Measure speed, alone or side by side with llama.cpp.

    It measures the engine in this process, from the request to the token. With --clients, --shared-prefix or
    --arrival it measures a server: on a socket, with streamed answers, in turn with llama-server. With
    several limits in --ram (1GiB,2GiB,50%) it measures answers in each, and the disk; a share is of the
    model's bytes, plus 300 MiB.

    With --text both sides read the same parts of a text, different ones in each round, and write what follows
    there: the text decides which experts of a mixture are needed.
    """
    from hetrun.tools import bench as tool
    from hetrun.tools.bench.options import Asked, options_of

    asked = Asked(
        *(prompt, generate, depth, batch, rounds, vs, explain, clients, requests),
        *(shared_prefix, arrival, output, vs_threads, beside, ram, picture, text),
    )
    chosen = options_of(asked)
    if isinstance(chosen, tool.SweepOptions):
        heed_sigterm()  # its control groups shall go with it
        tool.in_budgets(options.resolved(given), chosen)
        return
    settings = options.resolved(given | {"ram": ram})
    if isinstance(chosen, tool.BenchOptions):
        tool.main(settings, chosen)
    else:
        tool.serve(settings, chosen)


@hetrun.command(name="eval", short_help="Measure perplexity, and how close predictions are.")
@options.model
@click.option("-f", "--file", "file", type=click.Path(path_type=Path), required=True, help="a text file")
@click.option("--against", default="reference", show_default=True, help="reference or llama.cpp")
@click.option("--vs", metavar="PEER", help="llama.cpp: also measure how close llama.cpp is")
@click.option("--tokens", default=2048, show_default=True, help="how many tokens of the text")
@options.settings("vram", "threads", "backends", "ubatch", "kv_type", "precision", "planner")
@options.as_json
def evaluate(file: Path, against: str, vs: str | None, tokens: int, as_json: bool, **given: object) -> None:
    """Measure perplexity of a text, and how close predictions are to those of another computation."""
    from hetrun.tools import evaluate as tool

    settings = options.resolved(given)
    tool.main(settings, tool.EvalOptions(file, against, tokens, as_json, vs))


@hetrun.command(short_help="Show what would run where, and why, without loading.")
@options.model
@options.settings(*options.RUNNING)
@click.option("--machine", metavar="NAME|FILE", help="predict for another machine, described in a file")
@click.option(
    "--shape", metavar="NAME", help="with --machine: a model's shape, such as opt-30b or llama-70b:q4_0"
)
@click.option("--batch", metavar="N", help="with --machine: sequences at once  [default: 1]")
@click.option("--prompt", metavar="N", help="with --machine: tokens of each prompt  [default: 512]")
@click.option("--generate", metavar="N", help="with --machine: tokens of each answer  [default: 128]")
@options.as_json
def plan(
    as_json: bool,
    machine: str | None,
    shape: str | None,
    batch: str | None,
    prompt: str | None,
    generate: str | None,
    **given: object,
) -> None:
    """Show what would run where, how fast, and why, without loading the model."""
    from hetrun.cli.reports.plan import print_plan
    from hetrun.cli.reports.simulate import Question, print_prediction, refuse_what_contradicts

    question = Question(machine, shape, batch, prompt, generate)
    refuse_what_contradicts(question, given)
    settings = options.resolved(given)
    if machine is not None:
        print_prediction(question, settings, as_json)
    else:
        print_plan(settings, as_json)


@hetrun.command(short_help="Write a model to a GGUF file of another type.")
@options.only_model
@click.option("-q", "--quant", metavar="TYPE", help="q4_k_m, q8_0, f16, ...")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="a file, or the folder it goes to")
@click.option("--force", is_flag=True, help="replace a file that is there")
@options.settings("threads")
@options.as_json
def convert(
    model: Path, quant: str | None, output: Path | None, force: bool, as_json: bool, **given: object
) -> None:
    """Write MODEL, a folder of safetensors, to one GGUF file of another type.

    A GGUF file of F32, F16 or BF16 works, too. TYPE is one of llama.cpp's: f32 f16
    bf16 q8_0 q6_k q5_k_m q5_k_s q5_1 q5_0 q4_k_m q4_k_s q4_1 q4_0 iq4_nl iq4_xs mxfp4_moe q3_k_l q3_k_m
    q3_k_s q2_k.
    """
    from hetrun.cli import convert as tool

    threads = Settings.resolve(environ=None, **given).threads
    tool.convert(model, quant, output, threads, force, as_json)


@hetrun.command(short_help="Reorder a GGUF file that is larger than memory.")
@options.only_model
@click.option("-o", "--output", type=click.Path(path_type=Path), help="a file, or the folder it goes to")
@click.option("--merged", is_flag=True, help="keep the experts of a mixture in one tensor, as llama.cpp does")
@click.option(
    "--in-place",
    is_flag=True,
    help="reorder the file itself, if the disk has no room for two; continues after a kill",
)
@click.option("--force", is_flag=True, help="replace a file that is there; repack again")
@options.as_json
def repack(
    model: Path, output: Path | None, merged: bool, in_place: bool, force: bool, as_json: bool
) -> None:
    """Write MODEL, a GGUF file, with its tensors in the order of use, for models larger than memory.

    Each tensor begins at a multiple of 4096 bytes, so that it is read from disk in whole pages. Nothing else
    changes: other programs read the file as before. Each expert of a mixture becomes one record, which is one
    read; llama.cpp cannot read such a file, unless --merged is given. The parts of a split model become one
    file.
    """
    from hetrun.cli import repack as tool

    tool.repack(model, output, force, as_json, merged=merged, in_place=in_place)


@hetrun.command(short_help="Show what a model is made of, and what it takes to run.")
@options.only_model
@click.option("--tensors", is_flag=True, help="list every tensor")
@click.option("--full", is_flag=True, help="with --json: whole arrays")
@options.as_json
def inspect(model: Path, tensors: bool, full: bool, as_json: bool) -> None:
    """Show what MODEL, a GGUF file or a folder, is made of, and what it takes to run."""
    from hetrun.cli.reports.inspect import print_model

    print_model(model, tensors, full, as_json)


@hetrun.command(short_help="Find what is wrong with models' files.")
@click.argument("files", nargs=-1, metavar="MODEL...", shell_complete=options.files)
@options.also_by_option
@click.option(
    "--weights",
    is_flag=True,
    help="read every weight too: find NaN, infinity and missing pieces, compare checksums",
)
@options.as_json
def check(files: tuple[str, ...], other: str | None, weights: bool, as_json: bool) -> int:
    """Find what is wrong with models, files or folders, without loading them.

    A changed byte in a weight shows in nothing but a checksum. --weights compares the checksums of files
    that are in the cache of Hugging Face or Ollama. Of others it prints the sha256, to compare with the
    publisher's.
    """
    from hetrun.cli.reports import check as tool

    if not (named := [*files, *filter(None, [other])]):
        raise click.UsageError("Missing argument 'MODEL...'.", click.get_current_context())
    return tool.check([(model, options.placed_if_known(model)) for model in named], weights, as_json)


@hetrun.command(short_help="List the backends, and why one cannot work here.")
@click.option("--measure", is_flag=True, help="measure the speed of matrix products; takes a few seconds")
@click.option("--conformance", is_flag=True, help="compare each with the reference")
@click.option("--backend", "chosen", metavar="NAME", multiple=True, help="with --conformance: only this one")
@options.as_json
def devices(measure: bool, conformance: bool, chosen: tuple[str, ...], as_json: bool) -> int:
    """List the backends, and why one cannot work here.

    --conformance runs every kind of op, with weights of every type, on small random numbers, and compares
    the results with the reference. It takes about half a minute and needs no model. --backend may be
    repeated. The exit code is 1 if a backend computes another result than the reference, or fails; an op that
    it does not support is no fault.
    """
    from hetrun.cli.reports.devices import of_devices

    return of_devices(measure, conformance, chosen, as_json)


@hetrun.command(short_help="Download a model from Hugging Face's hub.")
@click.argument("name")
@options.settings("offline")
@options.as_json
def pull(name: str, as_json: bool, **given: object) -> None:
    """Download a model from Hugging Face's hub: user/repo, or user/repo:Q4_K_M.

    It goes into Hugging Face's own cache, where other programs find it too. Interrupted downloads are
    resumed. Commands that run a model accept hf:user/repo, and download it if necessary.
    """
    from hetrun.cli import models

    models.pull(name, Settings.resolve(environ=None, **given).offline, as_json)


@hetrun.command(name="list", short_help="List the models on this machine.")
@options.as_json
def list_models(as_json: bool) -> None:
    """List the models on this machine by the names that -m takes, with those of Ollama and LM Studio.

    A name may be shorter if it means only one model: tiny for ollama:tiny:latest.
    """
    from hetrun.cli import models

    models.print_list(as_json)


@hetrun.command(name="rm")
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="do not ask")
@options.as_json
def remove(name: str, yes: bool, as_json: bool) -> None:
    """Remove a model that was pulled."""
    from hetrun.cli import models

    models.take_away(name, yes, as_json)


@hetrun.command(short_help="Check the installation, and say how to repair it.")
@options.as_json
def doctor(as_json: bool) -> int:
    """Show what is installed, what works here, and how to repair what does not.

    The exit code is 2 if something is broken.
    """
    from hetrun.cli.reports import doctor as tool

    return tool.doctor(as_json)


@hetrun.command(short_help="Print completion for bash, zsh or fish.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete commands and options.

    For bash: hetrun completion bash > ~/.local/share/bash-completion/completions/hetrun
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(hetrun, {}, "hetrun", "_HETRUN_COMPLETE").source())
