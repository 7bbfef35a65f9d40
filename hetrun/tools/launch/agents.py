"""The agents that can be started, and what each of them needs to know of a server.

An agent gets everything by its environment, by its command line, or in a folder of its own below hetrun's
cache. Its own configuration is neither read nor changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NO_KEY = "hetrun"  # most agents refuse to start without one
PATIENCE_S = 3600  # reading a long prompt on a CPU takes minutes; agents give up earlier on their own


@dataclass(frozen=True)
class Target:
    """The model that an agent shall use."""

    url: str  # of the server, without /v1
    model: str
    key: str = ""
    context: int = 0  # 0: not known
    folder: Path = Path()  # for files of the agent

    @property
    def v1(self) -> str:
        """The base of OpenAI's API."""
        return f"{self.url}/v1"


@dataclass(frozen=True)
class Start:
    """How an agent is started."""

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)  # to be written before


@dataclass(frozen=True)
class Agent:
    """A program that uses a model."""

    name: str  # also of its command
    title: str
    install: str  # what to type, or where to look
    context: int  # tokens that its prompts and a little work need
    start: Callable[[Target, Sequence[str]], Start]


def claude(target: Target, arguments: Sequence[str]) -> Start:
    env = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key or NO_KEY,
        "ANTHROPIC_API_KEY": "",  # a key of Anthropic's is not for this server
        # Every kind of model that it asks for is this one.
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
        # The text that changes with every request would cost the prefix cache.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(PATIENCE_S * 1000),
    }
    if target.context:
        env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(target.context)
    return Start(("claude", *arguments), env)


def codex(target: Target, arguments: Sequence[str]) -> Start:
    provider = {
        "name": "hetrun",
        "base_url": target.v1,
        "wire_api": "responses",
        "stream_idle_timeout_ms": PATIENCE_S * 1000,
    } | ({"env_key": "HETRUN_API_KEY"} if target.key else {})
    chosen: dict[str, object] = {
        "model_provider": "hetrun",
        "model_providers.hetrun": provider,
        "model": target.model,
        # Tools that OpenAI's server runs itself, or that are no plain functions.
        "web_search": "disabled",
        "features.multi_agent": False,
    }
    if target.context:
        chosen["model_context_window"] = target.context
    options = [word for name, value in chosen.items() for word in ("-c", f"{name}={_toml(value)}")]
    env = {"HETRUN_API_KEY": target.key} if target.key else {}
    return Start(("codex", *options, *arguments), env)


def opencode(target: Target, arguments: Sequence[str]) -> Start:
    model: dict[str, object] = {"name": target.model, "tool_call": True}
    if target.context:
        model["limit"] = {"context": target.context, "output": _answer(target)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "hetrun",
        "options": {"baseURL": target.v1, "apiKey": target.key or NO_KEY, "timeout": PATIENCE_S * 1000},
        "models": {target.model: model},
    }
    name = f"hetrun/{target.model}"
    config = {"provider": {"hetrun": provider}, "model": name, "small_model": name}
    return Start(("opencode", *arguments), {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def aider(target: Target, arguments: Sequence[str]) -> Start:
    model = f"openai/{target.model}"
    env = {"OPENAI_API_BASE": target.v1, "OPENAI_API_KEY": target.key or NO_KEY}
    options = ["--model", model, "--weak-model", model, "--timeout", str(PATIENCE_S)]
    files = {}
    if target.context:
        facts = {
            "max_input_tokens": target.context,
            "max_output_tokens": _answer(target),
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
        path = target.folder / "models.json"
        files[path] = json.dumps({model: facts}, indent=1)
        options += ["--model-metadata-file", str(path)]
    else:
        options.append("--no-show-model-warnings")
    return Start(("aider", *options, *arguments), env, files)


def cline(target: Target, arguments: Sequence[str]) -> Start:
    provider = "openai-compatible"
    settings = {
        "provider": provider,
        "apiKey": target.key or NO_KEY,
        "model": target.model,
        "baseUrl": target.v1,
    }
    known = {"settings": settings, "updatedAt": "1970-01-01T00:00:00.000Z", "tokenSource": "manual"}
    content = {"version": 1, "lastUsedProvider": provider, "modes": {}, "providers": {provider: known}}
    files = {target.folder / "settings" / "providers.json": json.dumps(content, indent=1)}
    options = ("--data-dir", str(target.folder), "-P", provider, "-m", target.model)
    return Start(("cline", *options, *arguments), {}, files)


def goose(target: Target, arguments: Sequence[str]) -> Start:
    env = {
        "GOOSE_PROVIDER": "openai",
        "GOOSE_MODEL": target.model,
        "OPENAI_HOST": target.url,
        "OPENAI_BASE_PATH": "v1/chat/completions",
        "OPENAI_API_KEY": target.key or NO_KEY,
        "OPENAI_TIMEOUT": str(PATIENCE_S),
    }
    if target.context:
        env["GOOSE_CONTEXT_LIMIT"] = str(target.context)
    return Start(("goose", *(arguments or ("session",))), env)


def llm(target: Target, arguments: Sequence[str]) -> Start:
    model = {
        "model_id": target.model,
        "model_name": target.model,
        "api_base": target.v1,
        "supports_schema": True,
        "supports_tools": True,
    }
    if target.key:
        model["headers"] = {"Authorization": f"Bearer {target.key}"}
    # JSON is YAML.
    files = {target.folder / "extra-openai-models.yaml": json.dumps([model], indent=1)}
    env = {"LLM_USER_PATH": str(target.folder), "LLM_MODEL": target.model}
    return Start(("llm", *(arguments or ("chat",))), env, files)


AGENTS: Mapping[str, Agent] = {
    agent.name: agent
    for agent in (
        Agent("claude", "Claude Code", "npm install -g @anthropic-ai/claude-code", 65_536, claude),
        Agent("codex", "Codex", "npm install -g @openai/codex", 32_768, codex),
        Agent("opencode", "OpenCode", "npm install -g opencode-ai", 32_768, opencode),
        Agent("aider", "Aider", "pip install aider-chat", 16_384, aider),
        Agent("cline", "Cline", "npm install -g cline", 32_768, cline),
        Agent("goose", "Goose", "see goose-docs.ai", 32_768, goose),
        Agent("llm", "LLM", "pip install llm", 4096, llm),
    )
}


def _answer(target: Target) -> int:
    """The part of the context that an answer may take."""
    return max(1, min(target.context // 4, 8192))


def _toml(value: object) -> str:
    """A value as TOML; a basic string of it is written like one of JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value)
