"""lm-eval against the server: scores of continuations, and chat. Its tokenizer is the server's."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tests.clients.checks import KEY, MODEL, URL, check, expect, package

FACTS = json.loads(os.environ["CHECK_FACTS"])
NEAR = 1e-3  # of a sum of log-probabilities


def tasks(folder: Path) -> TaskManager:
    """Two tasks over a small file: nothing is fetched."""
    rows = [{"text": context, "endings": endings} for context, endings, _ in FACTS["scores"]]
    data = folder / "data.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common: dict[str, object] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "target_delimiter": "",
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{endings}}", "doc_to_target": 0}
    ending = {"until": ["\n\n"], "max_gen_toks": 8, "temperature": 0}
    text = {"output_type": "generate_until", "doc_to_target": "{{endings[0]}}", "generation_kwargs": ending}
    for name, own in (("hetrun_scores", choice), ("hetrun_text", text)):
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **own}))
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(kind: str, task: str, manager: TaskManager, path: str, **more: object) -> list[Any]:
    arguments = {"model": MODEL, "base_url": f"{URL}/{path}", "max_retries": 1, "max_length": 2048}
    found: Any = simple_evaluate(
        model=kind,
        model_args={**arguments, **more},
        tasks=[task],
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
        apply_chat_template="chat" in kind,
    )
    return list(found["samples"][task])


def scores(manager: TaskManager) -> None:
    """Each continuation has the log-probability that follows from the model's logits."""
    samples = evaluated(
        "local-completions",
        "hetrun_scores",
        manager,
        "completions",
        tokenizer_backend="remote",
        auth_token=KEY,
        tokenized_requests=True,
        batch_size=4,
    )
    expect(len(samples) == len(FACTS["scores"]), samples)
    for sample, (_, _, wanted) in zip(
        sorted(samples, key=lambda s: s["doc_id"]), FACTS["scores"], strict=True
    ):
        got = [float(response[0][0]) for response in sample["resps"]]
        worst = max(abs(a - b) for a, b in zip(got, wanted, strict=True))
        expect(worst < NEAR, {"got": got, "wanted": wanted})


def chat(manager: TaskManager) -> None:
    samples = evaluated("local-chat-completions", "hetrun_text", manager, "chat/completions")
    expect(all(sample["resps"][0][0].strip() for sample in samples), samples)


if __name__ == "__main__":
    os.environ["OPENAI_API_KEY"] = KEY
    package("lm_eval")
    with tempfile.TemporaryDirectory() as name:
        manager = tasks(Path(name))
        check("loglikelihood", lambda: scores(manager))
        check("chat", lambda: chat(manager))
