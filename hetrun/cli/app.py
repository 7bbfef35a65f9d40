"""The subcommands and their options; what they do is imported when they run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from hetrun import __version__
from hetrun.cli import options, sampling_options as sampling
from hetrun.cli.commands import InOrder
from hetrun.cli.exit_codes import heed_sigterm
from hetrun.config import Settings
from hetrun.errors import OptionError

if TYPE_CHECKING:
    from hetrun.cli.model_argument import ModelArgument
    from hetrun.tools.bench import BenchOptions, SweepOptions
    from hetrun.tools.bench.serving.cases import ServingOptions


@click.group(
    cls=InOrder,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="hetrun %(version)s")
def hetrun() -> None:
    """Run local language models within a memory limit that you choose.

    hetrun run "Why is the sky blue?" asks a small demonstration model. hetrun list shows the models on this
    machine, and hetrun COMMAND --help the options of a command.
    """


def run_command(arguments: list[str]) -> int:
    """Run a subcommand; its exit code."""
    return int(hetrun.main(arguments, prog_name="hetrun", standalone_mode=False) or 0)


@hetrun.command(
    cls=sampling.SamplingCommand, short_help="Answer a prompt or a file of prompts, or hold a conversation."
)
@click.argument("words", nargs=-1, metavar="[MODEL] [PROMPT]", shell_complete=options.files)
@options.settings("model", "offline", *options.ANSWERING, "prompt_cache")
@click.option(
    "-i", "--interactive", is_flag=True, help="hold a conversation, line by line; /bye or Ctrl-D ends it"
)
@click.option(
    "--continue", "go_on", is_flag=True, help="continue the last conversation of -i, with its model"
)
@click.option(
    "-a",
    "--attach",
    "--image",
    "attached",
    multiple=True,
    metavar="FILE",
    help="a picture that the prompt is about; -: standard input; may be repeated",
)
@click.option("-p", "--prompt", "text", hidden=True)
@click.option("--raw", is_flag=True, help="continue the text as it is, without the chat template")
@click.option(
    "-f",
    "--file",
    "source",
    metavar="FILE",
    help="answer the requests in this file, one in each line; -: standard input",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="with -f: write the results to this file, as JSON lines",
)
@click.option(
    "--resume", is_flag=True, help="with -o: keep the results that are in the file, and answer the rest"
)
@click.option(
    "--unordered",
    is_flag=True,
    help="with -f: write results as they are finished, not in the order of the file",
)
@click.option(
    "--workers",
    cls=options.MultiValueOption,
    multiple=True,
    metavar="URL...",
    help="with -f: let these servers answer, or the workers of a package, such as ray:auto",
)
@options.settings(
    "url",
    "api",
    "no_server",
    "api_key",
    "strict",
    help={"api_key": "with --url or --workers: the key of the server"},
)
@sampling.options(*sampling.SHAPE, *sampling.SCORES)
@options.settings(*options.RUNNING)
@options.json_or_full
@options.verbose
@sampling.options(*sampling.SAMPLING)
def run(
    words: tuple[str, ...],
    text: str | None,
    attached: tuple[str, ...],
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
    the prompt. Text on standard input comes before the prompt: hetrun run "Sum this up." < report.txt.
    Without a PROMPT, that text is the prompt. -a attaches pictures, for models that read them:
    hetrun run -a cat.png "What is this?"

    With -f it answers every line of a file. A line is a prompt, {"prompt": ...} or {"messages": [...]} with
    other fields of a request, or a request in OpenAI's batch format. The results are JSON lines. If some
    lines fail, the others are answered, and the exit code is 3.

    With --url the server at that address answers. Without --url, hetrun first looks for a server of yours
    that has loaded the model (hetrun ps lists them) and lets it answer. It loads the model itself if there is
    none, with --no-server, and with options such as --ram, which a running server cannot change.
    """
    from hetrun.cli.model_argument import ModelArgument

    chosen = sampling.taken(given)
    asked = ModelArgument.of(words, text, given, here=not given["url"])
    if source is None:
        alone = {"-o": output, "--resume": resume, "--unordered": unordered, "--workers": workers}
        options.refuse_without("-f", alone | {"--strict": given["strict"]})
        talks = {"-i": interactive, "--continue": go_on}
        return _ask(asked, chosen, given, talks, attached, raw=raw, as_json=as_json, verbose=verbose)
    from hetrun.cli.batch import Files, run_file

    options.refuse_beside("-f", {"-i": interactive, "--continue": go_on})
    options.refuse_beside("-f", {"-a": attached}, "name pictures in the messages of its lines")
    elsewhere = {"--url": given["url"], "--api": given["api"], "--no-server": given["no_server"]}
    options.refuse_beside("-f", elsewhere, "use --workers")
    if asked.prompt is not None:
        raise OptionError(f"-f {source} and a prompt are both given: use only one of them")
    files = Files(source, output, resume, unordered, workers)
    settings = Settings.resolve(environ=None, **given) if workers else asked.resolved(given)
    return run_file(settings, files, chosen, raw=raw, as_json=as_json is not None, verbose=verbose)


def _ask(
    asked: ModelArgument,
    chosen: Mapping[str, object],
    given: dict[str, object],
    talks: Mapping[str, bool],
    attached: tuple[str, ...],
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
    _refuse_api(settings)
    interactive, go_on = talks["-i"], talks["--continue"]
    if not settings.url and asked.is_conversation(interactive, go_on, plain=not (raw or as_json or attached)):
        from hetrun.cli.conversation import converse

        flag = "--continue" if go_on else "-i" if interactive else "a conversation"
        options.refuse_beside(flag, {"--raw": raw, "--json": as_json})
        options.refuse_beside(flag, {"-a": attached}, "use hetrun chat, where pictures belong to messages")
        once = go_on and not interactive
        return converse(settings, asked.prompt, chosen, go_on=go_on, once=once, verbose=verbose)
    from hetrun.cli.run import answer

    answer(settings, asked.prompt, chosen, attached, raw=raw, as_json=as_json, verbose=verbose)
    return 0


def _refuse_api(settings: Settings) -> None:
    """--api says what the server of --url speaks."""
    if settings.url is None and settings.origin("api") == "explicit":
        options.refuse_without("--url", {"--api": settings.api})


@hetrun.command(cls=sampling.SamplingCommand, short_help="Talk to a model in the terminal.")
@options.model
@options.settings(
    "url",
    "api",
    "api_key",
    *options.ANSWERING,
    "prompt_cache",
    "sandbox",
    *options.RUNNING,
    help={"api_key": "with --url: the key of the server"},
)
@sampling.options(*sampling.SAMPLING)
def chat(**given: object) -> None:
    """Talk to a model in the terminal, and see what the machine is doing.

    With --url a running server answers, such as http://localhost:8080 or unix:/path/to.sock.
    """
    from hetrun.cli.chat import talk

    chosen = sampling.taken(given)
    settings = options.resolved_or_remote(given)
    _refuse_api(settings)
    talk(settings, chosen)


@hetrun.command(
    cls=sampling.SamplingCommand, short_help="Serve models over HTTP: OpenAI's, Anthropic's, Ollama's API."
)
@options.model_or_all
@options.settings("aliases", "models", "models_max", "sleep_idle")
@options.settings("host", "port", "ollama", "uds", "api_key", "allowed_hosts", "cors_origins", "queue")
@options.settings("strict", "sandbox")
@options.settings(
    "max_tokens",
    "temperature",
    "seed",
    help={"max_tokens": "most tokens in an answer of requests that set no limit; -1: no limit"},
    shows={"temperature": "what the model recommends, or 1", "seed": "random"},
)
@options.settings(*options.TEMPLATE, "tool_parser", "reasoning_format", "prompt_cache")
@options.settings("slot_save_path", "media_path", "media_domains")
@options.settings("context_shift", "keep_billing_header")
@options.settings(*options.RUNNING)
@options.verbose
@sampling.options(*sampling.SAMPLING)
def serve(verbose: bool, **given: object) -> None:
    """Serve models over HTTP: the APIs of OpenAI, Anthropic, Ollama and llama.cpp.

    Without a model, every model that hetrun list shows is offered, and loaded when a request names it.

    Sampling options are the defaults for requests that do not set their own.
    """
    from hetrun.cli.serve import serve_forever

    chosen = sampling.taken(given)
    serve_forever(options.resolved(given), chosen, verbose)


@hetrun.command(short_help="Start an agent, such as Claude Code, with a model here.")
@click.argument("name", required=False)
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS]", type=click.UNPROCESSED)
@options.settings(
    "model",
    "ctx",
    "ram",
    "url",
    "api_key",
    help={
        "ctx": "context length of a server that is started",
        "ram": "memory limit of a server that is started, such as 2GiB or 50%",
        "url": "use this running server, such as http://localhost:8080",
        "api_key": "the key of the server",
    },
    shows={"model": "the one that is loaded, or the only one", "url": "one of yours, else a new one"},
)
@click.option("--keep", is_flag=True, help="leave a server that was started running afterwards")
@click.option("--print", "shown", is_flag=True, help="print what would be started and written, and end")
@options.as_json
def launch(
    name: str | None, arguments: tuple[str, ...], keep: bool, shown: bool, as_json: bool, **given: object
) -> int:
    """Start an agent with a model of this machine: claude, codex, opencode, aider, cline, goose or llm.

    Arguments after -- are the agent's: hetrun launch claude -m qwen3:8b -- -p "What is in this folder?"

    A running server of yours that has the model is used; if there is none, one is started, which ends with
    the agent. The agent gets the server's address and the model by its environment, by options, and in files
    below ~/.cache/hetrun/launch; its own configuration is not changed. The exit code is the agent's.

    Without a NAME, the agents are listed: which are installed, and how each would be started.
    """
    from hetrun.cli import launch as tool

    settings = Settings.resolve(environ=None, **given)
    if name is None:
        tool.print_agents(settings, as_json)
        return 0
    if shown or as_json:
        tool.show(settings, name, arguments, as_json)
        return 0
    return tool.launch(settings, name, arguments, keep)


@hetrun.command(name="ps", short_help="List your running servers.")
@options.as_json
def list_servers(as_json: bool) -> None:
    """List your running servers, with their models, addresses, memory and requests."""
    from hetrun.cli import servers

    servers.print_servers(as_json)


@hetrun.command(short_help="Stop one of your running servers.")
@click.argument("name", required=False)
@click.option("--all", "all_of_them", is_flag=True, help="stop all of your servers")
def stop(name: str | None, all_of_them: bool) -> None:
    """Stop one of your running servers.

    NAME is its model, by any name that hetrun run takes (smollm2, model.gguf); its address, of which the port
    is enough (8080); or its process id. If only one is running, NAME may be left out. Answers that are
    running get two seconds to finish.
    """
    from hetrun.cli import servers

    servers.stop_servers(name, all_of_them)


@hetrun.command(short_help="Measure speed, also in comparison with llama.cpp.")
@options.model
@click.option(
    "-p", "prompt", metavar="N", help="tokens in the prompt; 512,2048 measures both  [default: 512]"
)
@click.option(
    "-n", "generate", metavar="N", default="64", show_default=True, help="tokens to generate; 16,64: both"
)
@click.option(
    "-d",
    "depth",
    metavar="N",
    help="tokens in the context before those  [default: 512; 32 with several --ram limits]",
)
@click.option("-b", "batch", metavar="N", help="sequences at the same time  [default: 1]")
@click.option("-r", "rounds", metavar="N", default=5, show_default=True, help="samples of each measurement")
@click.option(
    "--vs", metavar="PEER", help="also measure llama.cpp, in turn; of a server: llama-server[=PATH]"
)
@click.option("--vs-threads", metavar="N", help="threads of llama.cpp  [default: as many as are best for it]")
@click.option("--beside", metavar="N", help="measure while N other programs each keep a core busy")
@click.option(
    "--text",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="use the tokens of this text instead of random ones",
)
@click.option("--explain", is_flag=True, help="show where the time went")
@click.option(
    "--clients", metavar="N", help="measure a server with N clients at the same time; 1,4,16 measures each"
)
@click.option("--requests", metavar="N", help="requests of each client in one sample  [default: 2]")
@click.option(
    "--shared-prefix",
    metavar="N",
    help="measure a server's time to the first token if it has seen N tokens of the prompt before",
)
@click.option(
    "--arrival",
    metavar="N",
    help="measure how smooth the answers of --clients are while a prompt of N tokens arrives",
)
@click.option("--ram", metavar="VALUE", help="memory limit, such as 2GiB; 1GiB,2GiB,50% measures each")
@click.option(
    "--picture",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="with several --ram limits: draw the results into FILE.svg",
)
@click.option(
    "-o", "output", default="table", show_default=True, help="format of the results: table, json or csv"
)
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
    """Measure speed, alone or in turn with llama.cpp.

    A quick look: hetrun bench -r 1 -p 64 -n 16. With -r 1 only the precision in force is measured; without
    it, both are.

    It measures the engine in this process, from the request to the token. With --clients, --shared-prefix or
    --arrival it measures a server with streamed answers, and llama-server in turn. With several limits in
    --ram (1GiB,2GiB,50%) it measures answers within each, and the disk; a percentage is of the model's size,
    plus 300 MiB.

    With --text both sides read the same parts of a text, different ones in each round, and write what follows
    there. Use it for a mixture of experts: the text decides which experts are needed.
    """
    from hetrun.tools.bench.options import TypedBenchOptions, options_of

    asked = TypedBenchOptions(
        prompt,
        generate,
        depth,
        batch,
        rounds,
        vs,
        explain,
        clients,
        requests,
        shared_prefix,
        arrival,
        output,
        vs_threads,
        beside,
        ram,
        picture,
        text,
    )
    _measure(options_of(asked), given, ram)


def _measure(
    chosen: BenchOptions | ServingOptions | SweepOptions, given: dict[str, object], ram: str | None
) -> None:
    from hetrun.tools import bench as tool

    if isinstance(chosen, tool.SweepOptions):
        heed_sigterm()  # its control groups shall go with it
        tool.in_budgets(options.resolved(given), chosen)
        return
    settings = options.resolved(given | {"ram": ram})
    if isinstance(chosen, tool.BenchOptions):
        tool.main(settings, chosen)
    else:
        tool.serve(settings, chosen)


@hetrun.command(name="eval", short_help="Measure perplexity, and how exact predictions are.")
@options.model
@click.option("-f", "--file", "file", type=click.Path(path_type=Path), required=True, help="a text file")
@click.option(
    "--against", default="reference", show_default=True, help="compare with: reference or llama.cpp"
)
@click.option("--vs", metavar="PEER", help="llama.cpp: also measure how close llama.cpp is")
@click.option("--tokens", default=2048, show_default=True, help="how many tokens of the text to use")
@options.settings("vram", "threads", "backends", "ubatch", "kv_type", "precision", "planner")
@options.as_json
def evaluate(file: Path, against: str, vs: str | None, tokens: int, as_json: bool, **given: object) -> None:
    """Measure the perplexity of a text, and how close predictions are to those of another implementation."""
    from hetrun.tools import evaluate as tool

    settings = options.resolved(given)
    tool.main(settings, tool.EvalOptions(file, against, tokens, as_json, vs))


@hetrun.command(short_help="Show the memory, speed and layout of a run before it starts.")
@options.model
@options.settings(*options.RUNNING)
@click.option(
    "--machine", metavar="NAME|FILE", help="predict for another machine: a name, or a file that describes it"
)
@click.option(
    "--shape", metavar="NAME", help="with --machine: a model's shape, such as opt-30b or llama-70b:q4_0"
)
@click.option("--batch", metavar="N", help="with --machine: sequences at the same time  [default: 1]")
@click.option("--prompt", metavar="N", help="with --machine: tokens in each prompt  [default: 512]")
@click.option("--generate", metavar="N", help="with --machine: tokens in each answer  [default: 128]")
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
    """Show how much memory a run would take, how fast it would be, what would run where, and why.

    The model is not loaded."""
    from hetrun.cli.reports.plan import print_plan
    from hetrun.cli.reports.simulate import SimulationQuestion, print_prediction, refuse_what_contradicts

    question = SimulationQuestion(machine, shape, batch, prompt, generate)
    refuse_what_contradicts(question, given)
    settings = options.resolved(given)
    if machine is not None:
        print_prediction(question, settings, as_json)
    else:
        print_plan(settings, as_json)


@hetrun.command(short_help="Write a model to a GGUF file of another type.")
@options.only_model
@click.option("-q", "--quant", metavar="TYPE", help="q4_k_m, q8_0, f16, ...")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="the file to write, or a folder for it")
@click.option("--force", is_flag=True, help="replace an existing file")
@click.option(
    "--allow-requantize",
    "requantize",
    is_flag=True,
    help="also convert a model that is quantised already, which loses precision a second time",
)
@options.settings("threads")
@options.as_json
def convert(
    model: Path,
    quant: str | None,
    output: Path | None,
    force: bool,
    requantize: bool,
    as_json: bool,
    **given: object,
) -> None:
    """Write MODEL, a folder of safetensors, to one GGUF file of another type.

    MODEL may also be a GGUF file of type F32, F16 or BF16, or a name that hetrun list shows; one that is
    quantised only becomes F32 or F16, or needs --allow-requantize. TYPE is one of llama.cpp's: f32 f16
    bf16 q8_0 q6_k q5_k_m q5_k_s q5_1 q5_0 q4_k_m q4_k_s q4_1 q4_0 iq4_nl iq4_xs mxfp4_moe q3_k_l q3_k_m
    q3_k_s q2_k.
    """
    from hetrun.cli import convert as tool

    threads = Settings.resolve(environ=None, **given).threads
    tool.convert(model, quant, output, threads, force, requantize, as_json)


@hetrun.command(short_help="Reorder a GGUF file that is larger than memory.")
@options.only_model
@click.option("-o", "--output", type=click.Path(path_type=Path), help="the file to write, or a folder for it")
@click.option(
    "--merged", is_flag=True, help="keep the experts of a mixture in one tensor, as llama.cpp needs them"
)
@click.option(
    "--in-place",
    is_flag=True,
    help="reorder the file itself, if the disk has no room for two; can be continued after a kill",
)
@click.option("--force", is_flag=True, help="replace an existing file, and repack one again")
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


@hetrun.command(short_help="Show what a model consists of, and what it needs to run.")
@options.only_model
@click.option("--tensors", is_flag=True, help="list every tensor")
@click.option("--full", is_flag=True, help="with --json: print arrays in full")
@options.as_json
def inspect(model: Path, tensors: bool, full: bool, as_json: bool) -> None:
    """Show what MODEL, a GGUF file or a folder, consists of, and what it needs to run."""
    from hetrun.cli.reports.inspect import print_model

    print_model(model, tensors, full, as_json)


@hetrun.command(short_help="Check the files of models for errors.")
@click.argument("files", nargs=-1, metavar="MODEL...", shell_complete=options.files)
@options.also_by_option
@click.option(
    "--weights/--structure",
    default=True,
    help="read every weight, or only settings, list of tensors, vocabulary and chat template  "
    "[default: weights]",
)
@options.as_json
def check(files: tuple[str, ...], other: str | None, weights: bool, as_json: bool) -> int:
    """Check the files of models for errors, without loading them. MODEL is a file or a folder.

    It reads every weight, and finds NaN, infinity and long runs of zeros, which interrupted downloads leave.
    Only a checksum shows a changed byte: check compares the checksums of files that are in the cache of
    Hugging Face or Ollama, and prints the sha256 of others, to compare with the publisher's. Large models
    take as long as the disk needs to read them twice; --structure takes a second, and leaves out the weights.
    """
    from hetrun.cli.reports import check as tool

    if not (named := [*files, *filter(None, [other])]):
        raise click.UsageError("Missing argument 'MODEL...'.", click.get_current_context())
    return tool.check([(model, options.placed_if_known(model)) for model in named], weights, as_json)


@hetrun.command(short_help="List the backends, and why some cannot work here.")
@click.option("--measure", is_flag=True, help="measure the speed of matrix products; takes a few seconds")
@click.option("--conformance", is_flag=True, help="compare the results of each with the reference")
@click.option("--backend", "chosen", metavar="NAME", multiple=True, help="with --conformance: only this one")
@options.as_json
def devices(measure: bool, conformance: bool, chosen: tuple[str, ...], as_json: bool) -> int:
    """List the backends, and why some cannot work here.

    --conformance runs every kind of op, with weights of every type, on small random numbers, and compares
    the results with the reference. It takes about half a minute and needs no model. --backend may be
    repeated. The exit code is 1 if a result differs from the reference, or a backend fails; an op that a
    backend does not support is no error.
    """
    from hetrun.cli.reports.devices import of_devices

    return of_devices(measure, conformance, chosen, as_json)


@hetrun.command(short_help="Download a model from Hugging Face's hub.")
@click.argument("name")
@options.settings("offline")
@options.as_json
def pull(name: str, as_json: bool, **given: object) -> None:
    """Download a model from Hugging Face's hub: user/repo, or user/repo:Q4_K_M.

    It goes into Hugging Face's own cache, where other programs find it, too. Interrupted downloads are
    resumed. Commands that run a model also take hf:user/repo, and download the model if necessary.
    """
    from hetrun.cli import models

    models.pull(name, Settings.resolve(environ=None, **given).offline, as_json)


@hetrun.command(name="list", short_help="List the models on this machine.")
@options.as_json
def list_models(as_json: bool) -> None:
    """List the models on this machine by the names that -m takes, with those of Ollama and LM Studio.

    A name may be shortened if only one model fits: tiny for ollama:tiny:latest.
    """
    from hetrun.cli import models

    models.print_list(as_json)


@hetrun.command(name="rm")
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="do not ask")
@options.as_json
def remove(name: str, yes: bool, as_json: bool) -> None:
    """Remove a model that hetrun pull has downloaded."""
    from hetrun.cli import models

    models.take_away(name, yes, as_json)


@hetrun.command(short_help="Check the installation, and show how to repair it.")
@options.as_json
def doctor(as_json: bool) -> int:
    """Show what is installed, what works here, and how to repair what does not.

    The exit code is 2 if something is broken.
    """
    from hetrun.cli.reports import doctor as tool

    return tool.doctor(as_json)


@hetrun.command(short_help="Print a completion script for bash, zsh or fish.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script with which a shell completes commands and options.

    \b
    For bash:
    hetrun completion bash > ~/.local/share/bash-completion/completions/hetrun
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(hetrun, {}, "hetrun", "_HETRUN_COMPLETE").source())
