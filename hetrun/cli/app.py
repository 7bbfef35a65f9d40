"""The subcommands and their options; what they do is imported when they run."""

from __future__ import annotations

from pathlib import Path

import click

from hetrun import __version__
from hetrun.cli import options
from hetrun.cli import sampling_options as sampling
from hetrun.cli.exit_codes import heed_sigterm
from hetrun.config import Settings
from hetrun.errors import OptionError


class InOrder(click.Group):
    """Lists its commands as they stand here: the most used first. Each has -v, of which errors tell."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        if not any(param.name == "verbose" for param in cmd.params):
            cmd.params.append(options.told_of_errors())
        super().add_command(cmd, name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=InOrder,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, message="hetrun %(version)s")
def hetrun() -> None:
    """Run language models on this machine, on whatever silicon it has."""


def run_command(arguments: list[str]) -> int:
    """Run a subcommand; its exit code."""
    return int(hetrun.main(arguments, prog_name="hetrun", standalone_mode=False) or 0)


@hetrun.command(cls=sampling.Command)
@click.argument("prompt", required=False)
@options.settings("model", "offline", *options.ANSWERING, "prompt_cache")
@click.option("--raw", is_flag=True, help="continue the text as it stands, without the chat template")
@click.option("-f", "--file", "source", metavar="FILE", help="a request in each line; -: standard input")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="with -f: where results go, in JSON lines"
)
@click.option("--resume", is_flag=True, help="with -o: go on with results that are there")
@click.option("--unordered", is_flag=True, help="with -f: results as they come, not in the file's order")
@click.option(
    "--workers",
    cls=options.Several,
    multiple=True,
    metavar="URL...",
    help="with -f: servers that answer instead, or what a package brings: ray:auto",
)
@options.settings("url", "no_server", "api_key", "strict")
@sampling.options(*sampling.SHAPE, *sampling.SCORES)
@options.settings(*options.RUNNING)
@options.as_json
@options.verbose
@sampling.options(*sampling.SAMPLING)
def run(
    prompt: str | None,
    raw: bool,
    source: str | None,
    output: Path | None,
    resume: bool,
    unordered: bool,
    workers: tuple[str, ...],
    as_json: bool,
    verbose: bool,
    **given: object,
) -> int:
    """Answer one PROMPT; - or nothing reads it from stdin.

    With -f every line of a file: a prompt, {"prompt": ...} or {"messages": [...]} with what else a request
    may have, or OpenAI's batch format. The results are JSON lines. If some lines fail, the others go on, and
    the exit code is 3.

    With --url a running server answers. Without it a server of yours that has loaded the model does (hetrun
    ps), unless options such as --ram say how the model is to run; --no-server loads it here always.
    """
    chosen = sampling.taken(given)
    if source is None:
        from hetrun.cli.run import answer

        alone = {"-o": output, "--resume": resume, "--unordered": unordered, "--workers": workers}
        options.refuse_without("-f", alone | {"--strict": given["strict"]})
        settings = options.resolved_or_remote(given)
        if settings.url is None:
            options.refuse_without("-f or --url", {"--api-key": given["api_key"]})
        answer(settings, prompt, chosen, raw=raw, as_json=as_json, verbose=verbose)
        return 0
    from hetrun.cli.batch import Files, run_file

    options.refuse_with("-f", {"--url": given["url"], "--no-server": given["no_server"]}, "use --workers")
    if prompt is not None:
        raise OptionError(f"-f {source} and a prompt are both given: take one of them")
    files = Files(source, output, resume, unordered, workers)
    settings = Settings.resolve(environ=None, **given) if workers else options.resolved(given)
    return run_file(settings, files, chosen, raw=raw, as_json=as_json, verbose=verbose)


@hetrun.command(cls=sampling.Command)
@options.settings("model", "offline", "url", "api_key", *options.ANSWERING, "prompt_cache", *options.RUNNING)
@sampling.options(*sampling.SAMPLING)
def chat(**given: object) -> None:
    """Talk to a model in the terminal, and see what the machine does.

    With --url the model is that of a running server, as http://localhost:8080 or unix:/path/to.sock.
    """
    from hetrun.cli.chat import talk

    chosen = sampling.taken(given)
    talk(options.resolved_or_remote(given), chosen)


@hetrun.command(cls=sampling.Command)
@options.settings("model", "offline", "models", "models_max", "sleep_idle")
@options.settings("host", "port", "uds", "api_key", "allowed_hosts", "cors_origins", "queue", "strict")
@options.settings("temperature", "chat_template", "tool_parser", "reasoning_format", "prompt_cache")
@options.settings(*options.RUNNING)
@options.verbose
@sampling.options(*sampling.SAMPLING)
def serve(verbose: bool, **given: object) -> None:
    """Serve OpenAI's chat API on this machine.

    Options of sampling hold for requests that do not say otherwise.
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


@hetrun.command()
@click.argument("name", required=False)
@click.option("--all", "all_of_them", is_flag=True, help="every server of yours")
def stop(name: str | None, all_of_them: bool) -> None:
    """Stop a running server of yours: NAME is its model, address or pid.

    Without NAME the only one. Answers that run have two seconds to end.
    """
    from hetrun.cli import servers

    servers.stop_servers(name, all_of_them)


@hetrun.command()
@options.settings("model", "offline")
@click.option("-p", "prompt", help="tokens of a prompt; 512,2048: both  [default: 512]")
@click.option("-n", "generate", default="64", show_default=True, help="tokens to generate")
@click.option("-d", "depth", help="tokens seen before generating  [default: 512; 32 in a sweep over --ram]")
@click.option("-b", "batch", help="sequences at once  [default: 1]")
@click.option("-r", "rounds", default=5, show_default=True, help="samples of each")
@click.option("--vs", metavar="PEER", help="measure a peer in turn: llama.cpp; servers: llama-server[=PATH]")
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
@click.option("--clients", metavar="N", help="measure a server, with so many clients at once; 1,4,16: each")
@click.option("--requests", metavar="N", help="of each client in one sample  [default: 2]")
@click.option(
    "--shared-prefix", metavar="N", help="a server's first token where so many tokens were seen before"
)
@click.option(
    "--arrival", metavar="N", help="how smooth --clients answers stay while so long a prompt arrives"
)
@click.option(
    "--ram", metavar="VALUE", help="most memory, as 2GiB; a sweep over several, or shares: 1GiB,2GiB,50%"
)
@click.option("--picture", metavar="FILE", type=click.Path(path_type=Path), help="of a sweep, as FILE.svg")
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

    In process, from the request to the token; or, with --clients, --shared-prefix or --arrival, of a server
    as its users have it: on a socket, answers streamed, their own llama-server in turn with it. With several
    budgets in --ram (1GiB,2GiB,50%): answers in each, beside what the disk gives; a share is of the model's
    bytes, and 300 MiB come on top.

    With --text both sides read the same stretches of a text, others in each round, and write what follows
    there: which experts of a mixture are needed depends on the text.
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


@hetrun.command(name="eval")
@click.option("-f", "--file", "file", type=click.Path(path_type=Path), required=True, help="a text file")
@options.settings("model", "offline")
@click.option("--against", default="reference", show_default=True, help="reference or llama.cpp")
@click.option("--vs", metavar="PEER", help="llama.cpp: how close it is to the float32 model, too")
@click.option("--tokens", default=2048, show_default=True, help="how many tokens of the text")
@options.settings("vram", "threads", "backends", "ubatch", "kv_type", "precision", "planner")
@options.as_json
def evaluate(file: Path, against: str, vs: str | None, tokens: int, as_json: bool, **given: object) -> None:
    """Perplexity of a text, and how close the predictions are to another computation's."""
    from hetrun.tools import evaluate as tool

    settings = options.resolved(given)
    tool.main(settings, tool.EvalOptions(file, against, tokens, as_json, vs))


@hetrun.command()
@options.settings("model", "offline", *options.RUNNING)
@click.option("--machine", metavar="NAME|FILE", help="predict for another machine, as its file describes it")
@click.option(
    "--shape", metavar="NAME", help="with --machine: a model's measures, as opt-30b or llama-70b:q4_0"
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
    """What would run where, and why, without loading the model."""
    from hetrun.cli.plan import print_plan
    from hetrun.cli.simulate import Question, print_prediction, refuse_what_contradicts

    question = Question(machine, shape, batch, prompt, generate)
    refuse_what_contradicts(question, given)
    settings = options.resolved(given)
    if machine is not None:
        print_prediction(question, settings, as_json)
    else:
        print_plan(settings, as_json)


@hetrun.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-q", "--quant", required=True, metavar="TYPE", help="q4_k_m, q8_0, f16, ...")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="a file, or the folder it goes to")
@click.option("--force", is_flag=True, help="replace a file that is there")
@options.settings("threads")
@options.as_json
def convert(
    model: Path, quant: str, output: Path | None, force: bool, as_json: bool, **given: object
) -> None:
    """Write MODEL, a folder of safetensors, to one GGUF file of another type.

    A GGUF file of F32, F16 or BF16 is taken too, and converted again. TYPE is one of llama.cpp's: f32 f16
    bf16 q8_0 q6_k q5_k_m q5_k_s q5_1 q5_0 q4_k_m q4_k_s q4_1 q4_0 iq4_nl iq4_xs mxfp4_moe q3_k_l q3_k_m
    q3_k_s q2_k.
    """
    from hetrun.cli import convert as tool

    threads = Settings.resolve(environ=None, **given).threads
    tool.convert(options.placed(model), quant, output, threads, force, as_json)


@hetrun.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="a file, or the folder it goes to")
@click.option("--merged", is_flag=True, help="keep the experts of a mixture in one tensor, as llama.cpp does")
@click.option("--in-place", is_flag=True, help="where the disk has no room for two; goes on after a kill")
@click.option("--force", is_flag=True, help="replace a file that is there; repack again")
@options.as_json
def repack(
    model: Path, output: Path | None, merged: bool, in_place: bool, force: bool, as_json: bool
) -> None:
    """Write MODEL, a GGUF file, with its tensors in the order of use, for models bigger than memory.

    Each tensor begins at a multiple of 4096 bytes, so that it is read from disk in whole pages. Nothing else
    changes: other programs read the file as before. Of a mixture each expert becomes a record, which is one
    read; that llama.cpp does not read, unless --merged is given. The parts of a split model become one file.
    """
    from hetrun.cli import repack as tool

    tool.repack(options.placed(model), output, force, as_json, merged=merged, in_place=in_place)


@hetrun.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--tensors", is_flag=True, help="list every tensor")
@click.option("--full", is_flag=True, help="with --json: arrays to their end")
@options.as_json
def inspect(model: Path, tensors: bool, full: bool, as_json: bool) -> None:
    """What MODEL, a GGUF file or a folder, is made of, and what it takes to run."""
    from hetrun.cli.inspect import print_model

    print_model(options.placed(model), tensors, full, as_json)


@hetrun.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--weights", is_flag=True, help="read every weight too: find NaN and infinity")
@options.as_json
def check(files: tuple[Path, ...], weights: bool, as_json: bool) -> int:
    """Find what is wrong with models, files or folders, without loading them."""
    from hetrun.cli import check as tool

    return tool.check([options.placed(file) for file in files], weights, as_json)


@hetrun.command()
@click.option("--measure", is_flag=True, help="measure what products reach here; it takes a second or two")
@click.option("--conformance", is_flag=True, help="compare what each computes with the reference")
@click.option("--backend", "chosen", metavar="NAME", multiple=True, help="with --conformance: only this one")
@options.as_json
def devices(measure: bool, conformance: bool, chosen: tuple[str, ...], as_json: bool) -> int:
    """The backends, and why one cannot work here.

    With --conformance every kind of op, with weights of every type, on small random numbers: alone and in
    company, behind what was seen, in shares. About half a minute; no model is needed. --backend may be
    repeated. The exit code is 1 where a backend computes something else than the reference, or fails; what
    it does not support is no fault.
    """
    from hetrun.cli.plan import of_devices

    return of_devices(measure, conformance, chosen, as_json)


@hetrun.command()
@click.argument("name")
@options.settings("offline")
@options.as_json
def pull(name: str, as_json: bool, **given: object) -> None:
    """Bring a model from Hugging Face's hub: user/repo, or user/repo:Q4_K_M.

    It goes into Hugging Face's own cache, where other programs find it too; what was begun is gone on with.
    Commands that run a model take hf:user/repo as its name, and do the same where it is not here.
    """
    from hetrun.cli import models

    models.pull(name, Settings.resolve(environ=None, **given).offline, as_json)


@hetrun.command(name="list")
@options.as_json
def list_models(as_json: bool) -> None:
    """The models on this machine, those of Ollama and LM Studio too, by the names that -m takes."""
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


@hetrun.command()
@options.as_json
def doctor(as_json: bool) -> int:
    """What is installed, what works here, and the line that mends what does not.

    The exit code is 2 where something is broken.
    """
    from hetrun.cli import doctor as tool

    return tool.doctor(as_json)


@hetrun.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes SHELL complete commands and options.

    For bash: hetrun completion bash > ~/.local/share/bash-completion/completions/hetrun
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(hetrun, {}, "hetrun", "_HETRUN_COMPLETE").source())
