"""Simon Willison's `llm`, as its users have it: a command, and a YAML file that names the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients.checks import KEY, MODEL, SCHEMA, URL, check, expect, good_city, package

LLM = Path(sys.executable).with_name("llm")


def known(folder: Path) -> None:
    """The server as two models: one that chats, one that continues a text."""
    common = {"model_name": MODEL, "api_base": URL, "api_key_name": "hetrun"}
    chats = {"model_id": "here", **common, "supports_schema": True, "supports_tools": True}
    plain = {"model_id": "plain", **common, "completion": True}
    # JSON is YAML.
    (folder / "extra-openai-models.yaml").write_text(json.dumps([chats, plain]))
    keys = folder / "keys.json"
    keys.write_text(json.dumps({"hetrun": KEY}))
    keys.chmod(0o600)


def says(folder: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(LLM), *arguments],
        env={**os.environ, "LLM_USER_PATH": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def answers(folder: Path, *arguments: str) -> str:
    code, said = says(folder, *arguments)
    expect(code == 0 and bool(said.strip()), said)
    return said


def refuses(folder: Path, wanted: str, *arguments: str) -> None:
    code, said = says(folder, *arguments)
    expect(code != 0 and wanted in said and "Traceback" not in said, said)


def tools(folder: Path) -> None:
    said = answers(folder, "-m", "here", "-T", "llm_version", "-o", "max_tokens", "60", "Say hello.")
    expect("rror" not in said, said)


if __name__ == "__main__":
    package("llm")
    with tempfile.TemporaryDirectory() as name:
        user = Path(name)
        known(user)
        short = ("-o", "max_tokens", "16")
        check("stream", lambda: expect(bool(answers(user, "-m", "here", *short, "Say hello.")), ""))
        check("chat", lambda: expect(bool(answers(user, "-m", "here", "--no-stream", *short, "Hello?")), ""))
        check("completion", lambda: expect(bool(answers(user, "-m", "plain", *short, "One, two,")), ""))
        schema = json.dumps(SCHEMA)
        long = ("-o", "max_tokens", "60", "-o", "temperature", "0")
        check(
            "structured",
            lambda: good_city(answers(user, "-m", "here", "--schema", schema, *long, "Say hello.")),
        )
        check("tools", lambda: tools(user))
        check("401", lambda: refuses(user, "key", "-m", "here", "--key", "wrong", "Hello?"))
        check("too long", lambda: refuses(user, "context", "-m", "here", "hello " * 5000))
