"""Architectures that hetrun has no file for, through llama.cpp as a whole."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hetrun import SamplingParams, cli
from hetrun.api.local_model import LocalModel
from hetrun.backend import Floats, Unavailable
from hetrun.backend.registry import backends
from hetrun.client.events import GenerateRequest
from hetrun.config import dirs
from hetrun.errors import Cancelled, ModelFileError, OptionError
from hetrun.executor.library.model import WholeModel
from hetrun.executor.planned_model import open_planned
from hetrun.loader.open_model import open_model
from hetrun.planner.options import Options, Wishes
from hetrun.system import subprocesses
from hetrun.tools.bench.peer import Peer
from tests.models import cases, foreign, tiny
from tests.models.foreign import Foreign
from tests.support.rig import model_file, step
from tests.support.server_log import next_line

pytestmark = pytest.mark.skipif(
    isinstance(backends()["libllama"].probe(), Unavailable), reason="llama.cpp is not installed"
)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
MODELS = pytest.mark.parametrize("model", foreign.ALL, ids=str)
Files = Callable[[Foreign], Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Where a tiny model lies."""
    folder = tmp_path_factory.mktemp("foreign")
    for model in foreign.ALL:
        foreign.write(model, folder / f"{model}.gguf")
    return lambda model: folder / f"{model}.gguf"


@pytest.fixture(autouse=True)
def passed(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests here: what was tried once is not tried again."""
    path = tmp_path_factory.getbasetemp() / "fallback-cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path / "hetrun" / "opened"


@contextmanager
def opened(path: Path, ubatch: int | None = None, **given: Any) -> Iterator[WholeModel]:  # noqa: ANN401
    """The model itself, without an engine."""
    model = open_planned(open_model(path), Options(Wishes(threads=1, ubatch=ubatch), **given))
    assert isinstance(model, WholeModel)
    try:
        yield model
    finally:
        model.close()


def run(model: WholeModel, *chunks: tuple[int, Sequence[int], Sequence[int]]) -> Floats:
    return model.step(step(*chunks)).copy()


def close(a: Floats, b: Floats) -> bool:
    """Other batches, other sums: the same but for the last bits of the cache's half floats."""
    return bool(np.mean((a - b) ** 2) < 1e-4 * np.var(a)) and bool(
        (a.argmax(-1) == b.argmax(-1)).mean() > 0.95
    )


# --- the numbers


def test_gpt2_gives_transformers_logits(files: Files) -> None:
    tokens = tiny.random_tokens(48, seed=3)
    with LocalModel(files(foreign.GPT2), kv_type="f32", threads=1) as llm:
        ours = llm.logits(tokens)
    oracle = transformers_gpt2()
    with torch.no_grad():
        theirs = oracle(torch.tensor([tokens])).logits[0].numpy()
    # llama.cpp looks gelu up in a table of half floats.
    assert np.mean((ours - theirs) ** 2) < 1e-5 * np.var(theirs)
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()


def transformers_gpt2() -> Any:  # noqa: ANN401
    config = GPT2Config(
        vocab_size=tiny.VOCAB,
        n_positions=foreign.CONTEXT,
        n_embd=foreign.EMBD,
        n_layer=foreign.LAYERS,
        n_head=foreign.HEADS,
        n_inner=foreign.FFN,
        layer_norm_epsilon=foreign.EPS,
        tie_word_embeddings=False,
    )
    names = {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    }
    state = {}
    for name, values in foreign.GPT2.weights().items():
        *block, part, kind = name.split(".")
        if block and values.ndim == 2:
            values = values.T  # GPT-2's layers multiply from the other side
        layer = f"transformer.h.{block[1]}." if block else ""
        state[f"{layer}{names[part]}.{kind}"] = torch.tensor(values)
    model: Any = GPT2LMHeadModel(config)
    model.load_state_dict(state)
    return model.eval()


@MODELS
def test_the_same_logits_as_llama_cpp_by_itself(files: Files, model: Foreign) -> None:
    tokens = tiny.random_tokens(60, seed=1)
    with LocalModel(files(model), threads=1) as llm, Peer(files(model)) as peer:
        theirs = np.concatenate(list(peer.logits(tokens)))
        assert close(theirs, llm.logits(tokens))


def test_asked_for_by_name_it_also_runs_what_hetrun_knows() -> None:
    path, tokens = model_file(cases.GQA), tiny.random_tokens(40)
    with LocalModel(path, backends=["libllama"], kv_type="f32") as llm:
        assert llm.plan.backends == ["libllama"]
        found = llm.logits(tokens)
    with LocalModel(path, backends=["reference"], kv_type="f32") as llm:
        assert close(llm.logits(tokens), found)


# --- sequences


@MODELS
def test_prompts_together_are_what_they_are_alone(files: Files, model: Foreign) -> None:
    texts = [tiny.random_tokens(n, seed=n) for n in (5, 40, 17)]
    with opened(files(model), ubatch=16) as m:
        alone = []
        for text in texts:
            seq = m.alloc()
            alone.append(np.concatenate([run(m, (seq, text, [len(text) - 1])), run(m, (seq, [9], [0]))]))
            m.free(seq)
        seqs = [m.alloc() for _ in texts]
        first = run(m, *[(s, t, [len(t) - 1]) for s, t in zip(seqs, texts, strict=True)])
        second = run(m, *[(s, [9], [0]) for s in seqs])
        assert close(np.concatenate(alone), np.stack([first, second], 1).reshape(6, -1))


@MODELS
def test_forked_cut_and_continued_is_a_run_alone(files: Files, model: Foreign) -> None:
    text = tiny.random_tokens(60, seed=2)
    with opened(files(model), ubatch=32) as m:
        seq = m.alloc()
        expected = run(m, (seq, text, range(60)))
        m.free(seq)
        parent = m.alloc()
        run(m, (parent, text[:36], []))
        run(m, (parent, tiny.random_tokens(19, seed=1), [18]))  # a continuation that is taken back
        m.truncate(parent, 36)
        child = m.fork(parent)
        run(m, (parent, tiny.random_tokens(30, seed=4), [29]))  # the parent goes another way
        found = [run(m, (child, text[36:40], [3]))]
        found += [run(m, (child, [t], [0]), (parent, [t], [0]))[:1] for t in text[40:50]]
        assert close(expected[39:50], np.concatenate(found))
        m.truncate(child, 3)  # behind every window
        assert close(expected[59:], run(m, (child, text[3:], [56])))
        m.free(parent)
        m.free(child)
        assert m.kv_bytes == 0


@MODELS
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_cancel_in_the_middle_leaves_every_sequence_as_it_was(
    files: Files, model: Foreign, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, other = tiny.random_tokens(80, seed=5), tiny.random_tokens(30, seed=6)
    with opened(files(model), ubatch=16) as m:
        a, b = m.alloc(), m.alloc()
        run(m, (a, text[:20], []), (b, other[:20], []))
        runner, runs = m._runner, 0
        real = runner.run

        def then_cancel(*arguments: Any) -> Floats:  # noqa: ANN401
            nonlocal runs
            if runs == after:
                m.cancel()
            runs += 1
            return real(*arguments)

        monkeypatch.setattr(runner, "run", then_cancel)
        with pytest.raises(Cancelled):
            run(m, (a, text[20:], [59]))
        assert runs == after + 1
        monkeypatch.undo()
        m.rearm()
        assert (m.length(a), m.length(b)) == (20, 20)
        found = run(m, (b, other[20:], [9]), (a, text[20:], [59]))
        for seq in (a, b):
            m.free(seq)
        fresh = [m.alloc(), m.alloc()]
        assert close(run(m, (fresh[0], other, [29]), (fresh[1], text, [79])), found)


def test_kv_of_a_wanted_type_or_a_refusal(files: Files, tmp_path: Path) -> None:
    tokens = tiny.random_tokens(30)
    with LocalModel(files(foreign.GPT2), kv_type="q8_0") as eight, LocalModel(files(foreign.GPT2)) as half:
        a, b = eight.logits(tokens), half.logits(tokens)
        assert 0 < np.mean((a - b) ** 2) < 1e-2 * np.var(b)
    narrow = foreign.write(foreign.GPT2, tmp_path / "narrow.gguf", {"attention.head_count": 4})
    with pytest.raises(OptionError, match=r"does not run narrow\.gguf with --kv-type q8_0; leave it out"):
        LocalModel(narrow, kv_type="q8_0")


# --- the engine


def test_the_engine_does_not_notice(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LocalModel(files(foreign.GPT2)) as llm:
        assert [r.getMessage() for r in caplog.records] == [
            f"{files(foreign.GPT2)}: hetrun has no architecture 'gpt2', so libllama runs it as a whole; "
            "`hetrun plan` says more"
        ]
        prompts = [f"Prompt {i}" for i in range(7)]  # more than run together
        together = llm.generate(prompts, GREEDY)
        assert [len(c.tokens) for c in together] == [8] * 7
        assert llm.generate(prompts[0], GREEDY)[0].tokens == together[0].tokens
        streamed = [e.token for e in llm.stream(prompts[0], GREEDY) if e.kind == "token"]
        assert streamed == together[0].tokens
        said = ({"role": "user", "content": "hello"},)
        assert llm.collect([GenerateRequest(GREEDY, messages=said)])[0][-1].usage.completion_tokens == 8
        assert {k.segment for k, _ in llm.stats} == {"everything"}
        assert llm.stats.native_seconds > 0
        llm.call(lambda loaded: loaded.prefixes.clear())  # type: ignore[union-attr]
        assert llm.call(lambda loaded: loaded.model.kv_bytes) == 0  # type: ignore[attr-defined]


def test_a_request_is_cancelled_and_the_next_one_runs(files: Files) -> None:
    with LocalModel(files(foreign.JAMBA)) as llm:
        expected = llm.generate("Hello", GREEDY)[0].tokens
        for event in llm.stream("Hello", SamplingParams(ignore_eos=True)):
            if event.kind == "token":
                break
        assert llm.generate("Hello", GREEDY)[0].tokens == expected


def test_only_the_engine_thread_calls_llama_cpp(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    from hetrun.backends.llamacpp import libllama_api

    calls: dict[str, set[int]] = {}

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: object) -> object:
            calls.setdefault(name, set()).add(threading.get_ident())
            return function(*arguments)

        return call

    for name in libllama_api.PROTOTYPES:
        monkeypatch.setattr(libllama_api.library(), name, noted(name, getattr(libllama_api.library(), name)))
    with LocalModel(files(foreign.GEMMA2)) as llm:
        engine = llm._engine.thread_id
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda i: llm.generate([f"one {i}", "two"], GREEDY), range(3)))
        llm.logits([1, 2, 3])
    assert {"llama_decode", "llama_model_load_from_file", "llama_free", "llama_tokenize"} <= set(calls)
    assert {name: idents for name, idents in calls.items() if idents != {engine}} == {}


# --- files from strangers


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as refused:
        LocalModel(path)
    sentence = str(refused.value)
    assert sentence.startswith(f"{path}: ")
    assert "\n" not in sentence
    return sentence


def test_a_file_that_passed_is_not_tried_again(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started = []
    real = subprocesses.run

    def counted(*arguments: Any, **options: Any) -> object:  # noqa: ANN401
        started.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(subprocesses, "run", counted)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(files(foreign.GPT2).read_bytes())
    for _ in range(2):
        LocalModel(copy).close()
        assert len(started) == 1
    os.utime(copy, (1, 1))
    LocalModel(copy).close()
    assert len(started) == 2
    assert len(list((dirs().cache / "opened").iterdir())) == 2


def test_a_missing_tensor_is_one_sentence(tmp_path: Path) -> None:
    bad = foreign.write(foreign.GPT2, tmp_path / "bad.gguf", without="blk.1.ffn_up.weight")
    assert "llama.cpp cannot load it; get or convert it again" in refusal(bad)
    assert "(tensor 'blk.1.ffn_up.weight' not found)" in refusal(bad)


def test_a_file_that_ends_llama_cpp_is_one_sentence(tmp_path: Path) -> None:
    bad = foreign.write(foreign.GPT2, tmp_path / "bad.gguf", {"expert_used_count": 3})
    said = refusal(bad)
    assert "llama.cpp crashed (SIGABRT) while opening the file: llama-model.cpp:" in said
    assert "GGML_ASSERT(n_expert_used_max" in said


def test_an_unknown_architecture_is_one_sentence(tmp_path: Path) -> None:
    unknown = Foreign("transmogrifier", foreign.GPT2.settings, foreign.GPT2.shapes)
    assert "unknown model architecture: 'transmogrifier'" in refusal(
        foreign.write(unknown, tmp_path / "unknown.gguf")
    )


def test_a_model_that_continues_no_text_is_one_sentence(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetrun.backends.llamacpp import libllama_api

    LocalModel(files(foreign.GPT2)).close()  # it passed, so the next one is opened here
    monkeypatch.setattr(libllama_api.library(), "llama_model_has_encoder", lambda model: True)
    assert refusal(files(foreign.GPT2)).endswith("it is not a model that generates text token by token")


def test_weights_that_are_no_numbers_are_one_sentence(tmp_path: Path) -> None:
    weights = {"output_norm.weight": np.full(foreign.EMBD, np.nan, np.float32)}
    bad = foreign.write(foreign.GPT2, tmp_path / "nan.gguf", weights=weights)
    assert "its weights give results that are not numbers" in refusal(bad)


def test_a_file_that_takes_for_ever_is_one_sentence(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetrun.backends.libllama import crash_probe

    monkeypatch.setattr(crash_probe, "LEAST_S", 0.01)
    copy = tmp_path / "slow.gguf"
    copy.write_bytes(files(foreign.GPT2).read_bytes())
    assert "llama.cpp did not open it within 0 s" in refusal(copy)


# --- the command


@pytest.fixture
def hetrun(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: its exit code, stdout and stderr."""

    def command(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.exit_code(list(arguments))
        return (code, *capfd.readouterr())

    return command


Command = Callable[..., tuple[int, str, str]]


def test_the_command_runs_it(files: Files) -> None:
    path = str(files(foreign.GPT2))
    out = subprocess.run(
        [sys.executable, "-m", "hetrun", "run", "-m", path, "Hi", "-n", "8", "--temp", "0", "--json=full"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    answer = json.loads(out.stdout)
    assert answer["usage"]["completion_tokens"] <= 8
    assert answer["plan"]["promises_off"]
    (remark,) = out.stderr.splitlines()
    assert "so libllama runs it as a whole" in remark


def test_serve_answers_several_at_once(files: Files, tmp_path: Path) -> None:
    socket = tmp_path / "hetrun.sock"
    command = [sys.executable, "-m", "hetrun", "serve", "-m", str(files(foreign.GPT2)), "--uds", str(socket)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stderr is not None
            assert "so libllama runs it as a whole" in next_line(process.stderr)
            assert f"unix:{socket}" in next_line(process.stderr)
            transport = httpx.HTTPTransport(uds=str(socket))
            with httpx.Client(transport=transport, base_url="http://localhost", timeout=30) as http:

                def ask(i: int) -> list[str]:
                    messages = [{"role": "user", "content": f"hello {i}"}]
                    body = {"messages": messages, "max_tokens": 5, "temperature": 0, "stream": True}
                    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                        return [line for line in answer.iter_lines() if line]

                with ThreadPoolExecutor(6) as pool:
                    answers = list(pool.map(ask, range(6)))
            assert all(lines[-1] == "data: [DONE]" and len(lines) > 2 for lines in answers)
        finally:
            process.terminate()
            assert process.wait(20) == 0


def test_a_file_that_ends_llama_cpp_does_not_end_serve_without_a_word(tmp_path: Path) -> None:
    bad = foreign.write(foreign.GPT2, tmp_path / "bad.gguf", {"expert_used_count": 3})
    command = [sys.executable, "-m", "hetrun", "serve", "-m", str(bad), "--uds", str(tmp_path / "x.sock")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert (done.returncode, done.stdout) == (2, "")
    (sentence,) = done.stderr.splitlines()
    assert "llama.cpp crashed (SIGABRT)" in sentence


@pytest.mark.slow
def test_bench_and_eval_measure_it_beside_llama_cpp(files: Files, tmp_path: Path, hetrun: Command) -> None:
    path, text = str(files(foreign.GPT2)), tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 4)
    code, out, err = hetrun("eval", "-m", path, "-f", str(text), "--against", "llama.cpp", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["mean_kl"] < 1e-3
    sizes = ("-p", "16", "-n", "4", "-d", "8", "-r", "1", "-o", "json")
    code, out, err = hetrun("bench", "-m", path, *sizes)
    assert code == 0, err
    assert "libllama" in out


def test_plan_and_devices_name_it(files: Files, hetrun: Command) -> None:
    code, out, err = hetrun("plan", "-m", str(files(foreign.GEMMA2)), "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert {s["backend"] for p in plan["plans"] for stage in p["stages"] for s in stage} == {"libllama"}
    assert any("--ram" in promise for promise in plan["promises_off"])
    code, out, _ = hetrun("devices")
    assert code == 0
    assert any(line.startswith("libllama   yes") for line in out.splitlines())


def test_wishes_that_it_cannot_meet_are_one_sentence(files: Files, hetrun: Command) -> None:
    path = str(files(foreign.GPT2))
    for arguments, says in (
        (["--deterministic"], "--deterministic is not available here"),
        (["--plan", path], "--plan is not available here"),
        (["--backend", "libllama", "--backend", "reference"], "runs whole models and cannot be combined"),
        (["--ram", "1MiB"], "is too little"),
    ):
        code, out, err = hetrun("plan", "-m", path, *arguments)
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert says in line
