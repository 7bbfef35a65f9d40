"""`hetrun launch`: what each agent gets, which server it uses, and how both end."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import stat
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetrun.client.engine_client import LocalClient
from hetrun.client.interface import ChatClient
from hetrun.client.local_servers import alike, private_socket, running_servers
from hetrun.client.model_catalog import CatalogModel
from hetrun.client.model_pool import ModelPool
from hetrun.config import Settings, dirs
from hetrun.loader.hub import catalog, stores
from hetrun.server import listen
from hetrun.server.app import create_app
from hetrun.server.private_socket import private_app
from hetrun.tools.launch.agents import AGENTS, Start
from hetrun.tools.launch.start import as_shell
from tests.cli.conftest import Run
from tests.support.fakes import FakeEngine

KEY = "sesame"
AGENT = """#!{python}
import json, os, signal, sys
with open({out!r}, "w") as file:
    json.dump({{"argv": sys.argv[1:], "env": dict(os.environ)}}, file)
{more}
sys.exit(7)
"""

Json = dict[str, Any]
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a program of this name on the path; what it writes when it is started."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def install(name: str, more: str = "") -> Path:
        out = tmp_path / f"{name}.json"
        program = folder / name
        program.write_text(AGENT.format(python=sys.executable, out=str(out), more=more))
        program.chmod(0o755)
        return out

    return install


@contextmanager
def serving(*names: str, key: str | None = None) -> Iterator[str]:
    """A server of this user's with scripted engines, in a thread; its address."""
    found: list[str] = []
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    def start(model: CatalogModel, ram: int | None) -> ChatClient:
        return LocalClient(FakeEngine())

    async def serve() -> None:
        shelf = ModelPool([CatalogModel(name, Path(f"/models/{name}.gguf"), 1) for name in names], start)
        if shelf.only:
            await shelf.only.info()
        with listen.listening(listen.ListenAddress(port=0)) as bound, private_socket() as private:
            url, options = listen.url(bound), alike(Settings.resolve())
            asked = private_app(
                shelf, asyncio.Event(), address=url, needs_key=key is not None, options=options
            )
            async with listen.served(create_app(shelf, api_key=key), bound), listen.served(asked, private):
                found.append(url)
                ready.set()
                await stop.wait()
        await shelf.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One that is not found by itself, for --url."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("outside")))
        with serving("m", key=KEY) as url:
            patch.undo()
            yield url


def option(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def claude(url: str, argv: list[str], env: Json) -> None:
    assert argv == ["--arg", "a b"]
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_AUTH_TOKEN"], env["ANTHROPIC_API_KEY"]) == (
        url,
        KEY,
        "",
    )
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    assert {env[name] for name in names} == {"m"}
    assert (env["CLAUDE_CODE_ATTRIBUTION_HEADER"], env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"]) == ("0", "2048")


def codex(url: str, argv: list[str], env: Json) -> None:
    values = [argv[i + 1] for i, word in enumerate(argv) if word == "-c"]
    config = tomllib.loads("\n".join(values))
    provider = config["model_providers"]["hetrun"]
    assert (provider["base_url"], provider["wire_api"]) == (f"{url}/v1", "responses")
    assert env[provider["env_key"]] == KEY
    assert (config["model_provider"], config["model"]) == ("hetrun", "m")
    assert config["model_context_window"] == 2048


def opencode(url: str, argv: list[str], env: Json) -> None:
    config = json.loads(env["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["hetrun"]
    assert (provider["options"]["baseURL"], provider["options"]["apiKey"]) == (f"{url}/v1", KEY)
    assert provider["models"]["m"]["limit"] == {"context": 2048, "output": 512}
    assert config["model"] == config["small_model"] == "hetrun/m"


def aider(url: str, argv: list[str], env: Json) -> None:
    assert (env["OPENAI_API_BASE"], env["OPENAI_API_KEY"]) == (f"{url}/v1", KEY)
    assert option(argv, "--model") == option(argv, "--weak-model") == "openai/m"
    facts = json.loads(Path(option(argv, "--model-metadata-file")).read_text())
    assert facts["openai/m"]["max_input_tokens"] == 2048


def cline(url: str, argv: list[str], env: Json) -> None:
    folder = Path(option(argv, "--data-dir"))
    said = json.loads((folder / "settings" / "providers.json").read_text())
    settings = said["providers"][said["lastUsedProvider"]]["settings"]
    assert (settings["baseUrl"], settings["apiKey"], settings["model"]) == (f"{url}/v1", KEY, "m")
    assert (option(argv, "-P"), option(argv, "-m")) == (settings["provider"], "m")


def goose(url: str, argv: list[str], env: Json) -> None:
    assert (env["GOOSE_PROVIDER"], env["GOOSE_MODEL"]) == ("openai", "m")
    assert f"{env['OPENAI_HOST']}/{env['OPENAI_BASE_PATH']}" == f"{url}/v1/chat/completions"
    assert (env["OPENAI_API_KEY"], env["GOOSE_CONTEXT_LIMIT"]) == (KEY, "2048")


def llm(url: str, argv: list[str], env: Json) -> None:
    [model] = json.loads((Path(env["LLM_USER_PATH"]) / "extra-openai-models.yaml").read_text())
    assert (model["api_base"], model["model_id"], env["LLM_MODEL"]) == (f"{url}/v1", "m", "m")
    assert model["headers"] == {"Authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("check", [claude, codex, opencode, aider, cline, goose, llm])
def test_an_agent_gets_the_server_the_model_and_its_arguments(
    check: Callable[[str, list[str], Json], None], install: Install, outside: str, run: Run
) -> None:
    name = check.__name__
    out = install(name)
    done = run("launch", name, "--url", f"{outside}/v1", "--api-key", KEY, "--", "--arg", "a b")
    assert done.code == 7  # the agent's own
    said = json.loads(out.read_text())
    assert said["argv"][-2:] == ["--arg", "a b"]
    check(outside, said["argv"], said["env"])
    assert f"uses m on {outside}" in done.err
    assert f"a context of 2,048 tokens, and {AGENTS[name].title} needs about" in done.err
    folder = dirs().cache / "launch"
    written = [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []
    assert [stat.S_IMODE(path.stat().st_mode) for path in written] == [0o600] * len(written)
    assert all(f"{path} is written for" in done.err for path in written)
    assert set(os.listdir(Path.home())) <= {folder.relative_to(Path.home()).parts[0]}  # nothing of its own


def test_agents_without_arguments_begin_a_conversation(install: Install, outside: str, run: Run) -> None:
    for name, first in (("llm", "chat"), ("goose", "session")):
        out = install(name)
        assert run("launch", name, "--url", outside, "--api-key", KEY).code == 7
        assert json.loads(out.read_text())["argv"] == [first]


# --- the server


def test_a_running_server_is_used(install: Install, run: Run) -> None:
    out = install("claude")
    with serving("large", "small") as several, serving("one") as alone:
        assert run("launch", "claude").code == 7  # the one whose model is loaded
        env = json.loads(out.read_text())["env"]
        assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_MODEL"]) == (alone, "one")
        assert run("launch", "claude", "-m", "small.gguf").code == 7
        env = json.loads(out.read_text())["env"]
        assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_MODEL"]) == (several, "small")


def test_print_loads_no_model(install: Install, run: Run) -> None:
    with serving("large", "small"):
        assert "ANTHROPIC_MODEL=small" in run("launch", "claude", "-m", "small", "--print").out
        [server] = running_servers()
        assert server.facts
        assert [model.status for model in server.facts.models] == ["unloaded", "unloaded"]


def test_a_server_that_needs_a_key(install: Install, run: Run) -> None:
    install("claude")
    with serving("one", key=KEY) as url:
        done = run("launch", "claude")
        assert done.code == 2
        assert done.sentence == f"hetrun: the server on {url} needs its key: give it with --api-key"
        assert run("launch", "claude", "--api-key", KEY).code == 7
        with serving("two") as other:
            assert f"uses two on {other}" in run("launch", "claude").err


def test_a_server_is_started_and_ends_with_the_agent(
    install: Install, run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETRUN_PLANNER", "static")
    more = "import urllib.request; urllib.request.urlopen(os.environ['ANTHROPIC_BASE_URL'] + '/v1/models')"
    out = install("claude", more)
    done = run("launch", "claude", "-m", tiny, "-c", "300")
    assert done.code == 7, done.err
    assert "starting a server with tiny; it ends with Claude Code" in done.err
    env = json.loads(out.read_text())["env"]
    assert (env["ANTHROPIC_MODEL"], env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"]) == ("tiny", "300")
    assert running_servers() == []


def test_a_server_that_cannot_start_says_why(
    install: Install, run: Run, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("claude")
    monkeypatch.setenv("HETRUN_MODELS", tiny)
    monkeypatch.setenv("HETRUN_PROMPT_CACHE", "cache")
    done = run("launch", "claude", "-m", tiny)
    assert done.code == 2
    said = "hetrun: hetrun serve exited with code 2: --prompt-cache is a file of one model"
    assert done.err.splitlines()[-1].startswith(said)


# --- how it ends


def test_ctrl_c_is_for_the_agent(install: Install, outside: str, run: Run) -> None:
    install("llm", "os.kill(os.getppid(), signal.SIGINT); sys.exit(3)")
    assert run("launch", "llm", "--url", outside, "--api-key", KEY).code == 3


def test_an_agent_that_is_killed(install: Install, outside: str, run: Run) -> None:
    install("llm", "os.kill(os.getpid(), signal.SIGKILL)")
    assert run("launch", "llm", "--url", outside, "--api-key", KEY).code == 137


def test_a_polite_end_is_passed_on(install: Install, outside: str, run: Run) -> None:
    more = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); os.kill(os.getppid(), signal.SIGTERM)\n"
    install("llm", f"{more}signal.pause()")
    assert run("launch", "llm", "--url", outside, "--api-key", KEY).code == 5


# --- what is only shown


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models on this machine."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    models = [stores.StoredModel(name, tmp_path / f"{name}.gguf", 4, "", "hetrun") for name in ("a", "b")]
    monkeypatch.setattr(catalog, "available", lambda warn=None: models)


def test_print_starts_and_writes_nothing(install: Install, run: Run, tmp_path: Path, two: None) -> None:
    out = install("llm")
    done = run("launch", "llm", "-m", str(tmp_path / "a.gguf"), "--api-key", KEY, "--print", "--", "it's")
    assert done.code == 0
    serve, *comments, start = done.out.splitlines()
    assert serve == f"hetrun serve -m {tmp_path / 'a.gguf'}"
    assert '"api_base": "http://127.0.0.1:8080/v1",' in done.out
    assert comments[0] == f"# {dirs().cache / 'launch' / 'llm' / 'extra-openai-models.yaml'}:"
    assert shlex.split(start)[-3:] == ["LLM_MODEL=a", "llm", "it's"]
    assert KEY not in done.out
    assert not out.exists()
    assert not dirs().cache.exists()
    said = json.loads(run("launch", "codex", "-m", "b", "--json").out)
    assert (said["server"], said["program"]) == (["hetrun", "serve", "-m", "b"], None)
    assert said["command"][:2] == ["codex", "-c"]


def test_the_key_is_shown_as_a_variable() -> None:
    start = Start(("x", f"a{KEY}"), {"ONE": KEY, "TWO": f"it's {KEY}!"})
    shown = as_shell(start, KEY)
    assert shown == 'ONE="$HETRUN_API_KEY" TWO=\'it\'"\'"\'s \'"$HETRUN_API_KEY"\'!\' x a"$HETRUN_API_KEY"'
    assert shlex.split(shown.replace("$HETRUN_API_KEY", KEY)) == [
        *(f"ONE={KEY}", f"TWO=it's {KEY}!"),
        *("x", f"a{KEY}"),
    ]


def test_the_list_says_what_is_installed(install: Install, run: Run) -> None:
    program = install("claude").with_name("bin") / "claude"
    lines = run("launch").out.splitlines()
    assert lines[0].split() == ["claude", "Claude", "Code", str(program)]
    assert lines[1].split()[:2] == ["by", "ANTHROPIC_BASE_URL,"]
    assert "opencode  OpenCode     not installed: npm install -g opencode-ai" in lines
    said = json.loads(run("launch", "--json").out)
    assert [agent["name"] for agent in said] == list(AGENTS)
    assert said[0]["program"] == str(program)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["claud"], "there is no agent claud; did you mean claude?"),
        (["absent"], "there is no agent absent; there are claude, codex, opencode, aider, cline, goose, llm"),
        (["aider"], "Aider is not installed: pip install aider-chat"),
        (["llm", "--url", "localhost:1", "-c", "5"], "--ctx is for a server that is started here"),
        (["llm", "--url", "unix:x.sock", "--print"], "cannot be reached"),
        (["llm"], "choose a model with -m: a, b"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_is_wrong_is_one_sentence(
    arguments: list[str], said: str, install: Install, run: Run, two: None
) -> None:
    install("llm")
    done = run("launch", *arguments)
    assert done.code == 2
    assert said in done.sentence
