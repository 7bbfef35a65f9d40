"""Real clients against `hetrun serve`, each in an environment of its own, and a table of what they could do.

    python -m tests.clients                    all of them
    python -m tests.clients openai lm-eval     some
    python -m tests.clients --keep FOLDER      environments are made there, and used again

Everything comes from the package registries of Python and Node; no data set and no tokenizer is fetched.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from hetrun import LLM
from hetrun.config import default_model
from hetrun.loader.hub.catalog import name_in_list
from hetrun.system import subprocesses
from hetrun.tools.bench.serving.http_load import ServerEndpoint
from hetrun.tools.bench.serving.servers import ServerProcess
from tests.clients import checks
from tests.support.hostile_pictures import png
from tests.support.towers import write_pair

ROOT = Path(__file__).parents[2]
CONTEXT = 2048
QUESTION = "What is this?"
LONGEST_S = 900.0  # of a client's checks
INSTALL_S = 900.0
ENDINGS = (
    ("The capital of France is", (" Paris, of course.", " London.", " a small fish")),
    ("Water boils at a hundred", (" degrees.", " and one dogs", " times")),
)


@dataclass(frozen=True, slots=True)
class Client:
    """Packages, and what tries the first: a module, or a script for Node."""

    packages: tuple[str, ...]
    script: str

    @property
    def is_for_node(self) -> bool:
        """Whether its packages come from npm."""
        return self.script.endswith(".mjs")


CLIENTS = {
    "openai": Client(("openai", "httpx"), "with_openai"),
    "openai-npm": Client(("openai",), "openai_npm.mjs"),
    "litellm": Client(("litellm", "mcp"), "with_litellm"),
    "llm": Client(("llm",), "with_llm"),
    "langchain": Client(("langchain-openai",), "with_langchain"),
    "lm-eval": Client(("lm-eval[api]",), "with_lm_eval"),
    "anthropic": Client(("anthropic",), "with_anthropic"),
    "anthropic-npm": Client(("@anthropic-ai/sdk",), "anthropic_npm.mjs"),
    "claude-code": Client(("@anthropic-ai/claude-code",), "claude_code.mjs"),
    "ollama": Client(("ollama",), "with_ollama"),
    "ollama-npm": Client(("ollama",), "ollama_npm.mjs"),
    "ollama-editors": Client((), "with_ollama_editors"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What one client could do, and where it failed."""

    client: str
    version: str
    good: tuple[str, ...]
    bad: tuple[tuple[str, str], ...]


def serve(*options: str, endpoint: ServerEndpoint, model: Path | None = None) -> ServerProcess:
    """A model, or the default one, behind an address."""
    command = subprocesses.python(
        "from hetrun.cli import main; main()",
        *("serve", "-m", str(model or default_model({})), "--ctx", str(CONTEXT), *options),
    )
    return ServerProcess(command, endpoint)


def seen(model: Path) -> dict[str, object]:
    """A picture, and what a made model that reads pictures answers about it."""
    width, height = 90, 60
    file = png(
        width, height, 8, 2, b"".join(b"\0" + bytes(range(i, i + 3 * width // 2)) * 2 for i in range(height))
    )
    content = [{"type": "text", "text": QUESTION}, {"type": "image", "image": file}]
    with LLM(str(model), ctx=CONTEXT) as llm:
        found = llm.chat([{"role": "user", "content": content}], max_tokens=8, temperature=0)
        alone = llm.chat(QUESTION, max_tokens=8, temperature=0)
    picture = base64.b64encode(file).decode()
    return {
        "model": model.stem,
        "question": QUESTION,
        "picture": picture,
        "text": found.text,
        "tokens": found.usage.prompt_tokens,
        "alone": alone.usage.prompt_tokens,
    }


def facts() -> dict[str, object]:
    """What scripts compare with: sums of log-probabilities that follow from the model's logits."""
    with LLM(str(default_model({})), ctx=CONTEXT) as llm:
        found = [(text, endings, [_score(llm, text, end) for end in endings]) for text, endings in ENDINGS]
    return {
        "scores": found,
        "model": name_in_list(default_model({})),
        "messages": checks.MESSAGES,
        "tooLong": checks.TOO_LONG,
        "schema": checks.SCHEMA,
        "tool": checks.TOOL,
        "hurry": checks.HURRY,
        "hurried": checks.HURRIED,
    }


def _score(llm: LLM, text: str, end: str) -> float:
    """ln P(end | text), with text and end cut into tokens together."""
    tokens, before = llm.tokenize(text + end), len(llm.tokenize(text))
    logits = llm.logits(tokens).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    scores = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return float(sum(scores[n - 1, tokens[n]] for n in range(before, len(tokens))))


def prepared(client: Client, folder: Path) -> list[str]:
    """The command of its script, with the client installed."""
    run = partial(subprocess.run, check=True, timeout=INSTALL_S, stdout=sys.stderr)
    if client.is_for_node:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "node_modules" / client.packages[0]).exists():
            run(["npm", "install", "--silent", "--prefix", str(folder), *client.packages])
        # A module finds its packages beside itself.
        shutil.copy(Path(__file__).with_name(client.script), folder)
        return ["node", client.script]
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        if client.packages:
            run([str(python), "-m", "pip", "install", "-q", *client.packages])
    return [str(python), "-m", f"tests.clients.{client.script}"]


def tried(name: str, folder: Path, env: Mapping[str, str]) -> Row:
    """What came of one client."""
    client = CLIENTS[name]
    try:
        command = prepared(client, folder)
    except (OSError, subprocess.SubprocessError) as error:
        return Row(name, "?", (), (("install", str(error)),))
    try:
        done = subprocess.run(
            command,
            cwd=folder if client.is_for_node else ROOT,
            env={**os.environ, **env, "PYTHONPATH": ""},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Row(name, "?", (), (("run", str(error)),))
    return read(name, done)


def read(name: str, done: subprocess.CompletedProcess[str]) -> Row:
    """The lines that a script printed; other lines are its client's."""
    version, good, bad = "?", [], []
    for line in done.stdout.splitlines():
        if not line.startswith('{"'):
            continue
        said = json.loads(line)
        if "version" in said:
            version = said["version"]
        elif said["why"]:
            bad.append((said["what"], said["why"]))
        else:
            good.append(said["what"])
    if done.returncode or not good:
        bad.append(("run", f"it {subprocesses.ending(done.returncode)}: {done.stderr[-500:]}"))
    return Row(name, version, tuple(good), tuple(bad))


def rows(names: Sequence[str], keep: Path | None) -> list[Row]:
    """All servers, and one client after the other."""
    key = secrets.token_hex(8)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hetrun-clients-")))
        port, uds, third = free_port(), work / "hetrun.sock", free_port()
        sees = write_pair("gemma3", work).text
        by_port, by_file = ServerEndpoint(port=port, key=key), ServerEndpoint(uds=uds)
        stack.callback(serve("--port", str(port), "--api-key", key, "--strict", endpoint=by_port).close)
        stack.callback(serve("--uds", str(uds), "--strict", endpoint=by_file).close)
        by_eye = ServerEndpoint(port=third, key=key)
        stack.callback(serve("--port", str(third), "--api-key", key, endpoint=by_eye, model=sees).close)
        env = {
            "CHECK_SEEING_URL": f"http://127.0.0.1:{third}/v1",
            "CHECK_SEEN": json.dumps(seen(sees)),
            "CHECK_URL": f"http://127.0.0.1:{port}/v1",
            "CHECK_KEY": key,
            "CHECK_UDS": str(uds),
            "CHECK_MODEL": name_in_list(default_model({})),
            "CHECK_FACTS": json.dumps(facts()),
            "CHECK_PYTHON": sys.executable,
            "CHECK_ROOT": str(ROOT),
        }
        return [tried(name, (keep or work) / name, env) for name in names]


def free_port() -> int:
    """A port that no program listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}")
    parser.add_argument("--keep", type=Path, help="folder for the environments; else they are temporary")
    args = parser.parse_args()
    if unknown := set(args.names) - set(CLIENTS):
        parser.error(f"no client {', '.join(sorted(unknown))}: there are {', '.join(CLIENTS)}")
    found = rows(args.names or list(CLIENTS), args.keep and args.keep.resolve())
    for row in found:
        print(f"{row.client:12} {row.version:10} {len(row.good)} ok: {', '.join(row.good)}")
        for what, why in row.bad:
            print(f"  FAILED {what}: {why}")
    return 1 if any(row.bad for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
