"""Filling in the middle: prompts by the model's own tokens, answers as of llama.cpp and transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from hetrun import SamplingParams
from hetrun.api.local_model import LocalModel
from hetrun.client.engine_client import LocalClient
from hetrun.client.queries import FillPrompt, Snippet
from hetrun.errors import OptionError
from hetrun.loader.formats.fim_tokens import TEXTS, FimTokens, by_text
from hetrun.server.app import create_app
from hetrun.text.infill import BATCH, FAR, STEP, fill_prompt
from hetrun.tools.model_library import LocalLibrary
from tests.models import cases
from tests.support import qwen
from tests.support.peer import llama_cpp
from tests.support.qwen import FIM, Qwen
from tests.support.rig import model_file

CODER = Qwen("coder", tied=False)
PREFIX, SUFFIX = "def the_cat(on, mat):\n    return ", "\n\nthe_cat(1, 2)  # <|fim_pad|> is text here\n"
EXTRA = (Snippet("a = 1\n", "one.py"), Snippet("b = 2\n"))
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
OPEN: dict[str, Any] = {"planner": "static", "kv_type": "f32"}


def opened(path: Path, **options: Any) -> LocalModel:  # noqa: ANN401 - any option
    return LocalModel(path, **{**OPEN, **options})


@pytest.fixture(scope="module", params=["folder", "gguf"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "folder":
        return qwen.folder(CODER)
    return qwen.written(CODER, tmp_path_factory.mktemp("fim") / "coder.gguf")


def by_transformers(tokens: Sequence[int], n: int) -> list[int]:
    """The tokens that follow, the most likely at each place."""
    found = list(tokens)
    with torch.inference_mode():
        for _ in range(n):
            logits = qwen.torch_model(CODER)(torch.tensor([found])).logits[0, -1]
            found.append(int(logits.argmax()))
    return found[len(tokens) :]


def test_prompt_of_a_repository_as_llama_cpp_builds_it(path: Path) -> None:
    with opened(path) as llm:
        asked = FillPrompt(PREFIX, SUFFIX, EXTRA, "begun <|im_end|>", repository=True)
        tokens = llm.ask(asked)

        def plain(text: str) -> list[int]:
            return llm.call(lambda loaded: loaded.tokenizer.encode_plain(text))  # type: ignore[union-attr]

        t = {kind: CODER.token(text) for kind, text in FIM.items()}
        assert tokens == [
            *(t["fim_rep"], *plain("myproject\n")),
            *(t["fim_sep"], *plain("one.py\n"), *plain("a = 1\n")),
            *(t["fim_sep"], *plain("tmp\n"), *plain("b = 2\n")),
            *(t["fim_sep"], *plain("filename\n")),
            *(t["fim_pre"], *plain(PREFIX), *plain("begun "), CODER.token("<|im_end|>")),
            *(t["fim_suf"], *plain(SUFFIX)),
            t["fim_mid"],
        ]
        assert tokens.count(t["fim_pad"]) == 0  # it was only written
        alone = llm.ask(FillPrompt(PREFIX, (*plain(SUFFIX)[:3], "\n"), EXTRA))
        expected = [
            t["fim_pre"],
            *plain(PREFIX),
            t["fim_suf"],
            *plain(SUFFIX)[:3],
            *plain("\n"),
            t["fim_mid"],
        ]
        assert alone == expected


def test_greedy_answers_of_transformers_and_of_llama_cpp(tmp_path: Path) -> None:
    file = qwen.written(replace(CODER, fim="old"), tmp_path / "coder.gguf")
    found = []
    for path in (qwen.folder(CODER), file):
        with opened(path) as llm:
            tokens = llm.ask(FillPrompt(PREFIX, SUFFIX))
            (answer,) = llm.generate([tokens], GREEDY)
            found.append((tokens, answer.tokens))
    assert found[0] == found[1]
    assert found[0][1] == by_transformers(found[0][0], 12)
    peer = llama_cpp().Llama(str(file), n_ctx=512, verbose=False)
    written = peer.generate(found[0][0], temp=0, repeat_penalty=1.0)
    assert [token for token, _ in zip(written, range(12), strict=False)] == found[0][1]
    lib, vocab = llama_cpp().llama_cpp, peer._model.vocab
    kinds = {"pre": 0, "suf": found[0][0].index(CODER.token(FIM["fim_suf"])), "mid": -1}
    for kind, place in kinds.items():
        assert found[0][0][place] == getattr(lib, f"llama_vocab_fim_{kind}")(vocab)
    peer.close()


@pytest.mark.parametrize("fim", ["new", "old", "text"])
def test_tokens_are_named_by_keys_or_found_by_their_texts(fim: str, tmp_path: Path) -> None:
    model = replace(CODER, fim=fim)
    expected = FimTokens(
        *(model.token(FIM[f"fim_{kind}"]) for kind in ("pre", "suf", "mid", "pad", "rep", "sep"))
    )
    for path in (qwen.written(model, tmp_path / "m.gguf"), qwen.folder(replace(model, name=f"fim-{fim}"))):
        with opened(path) as llm:
            assert llm.call(lambda loaded: loaded.tokenizer.fim) == expected  # type: ignore[union-attr]
            assert llm.info.fills
            ends = llm.call(lambda loaded: loaded.tokenizer.ends)  # type: ignore[union-attr]
            assert expected.ends <= ends
            assert model.token("<|fim_middle|>") not in ends


def test_each_text_is_known() -> None:
    for name, texts in TEXTS.items():
        for text in texts:
            assert getattr(by_text({text: 7}.get), name) == 7
    assert by_text(lambda text: None) == FimTokens()
    assert FimTokens(suffix=1).missing == ["prefix", "middle"]


def test_models_without_the_tokens_are_refused(tmp_path: Path) -> None:
    partly = tmp_path / "partly"
    shutil.copytree(qwen.folder(CODER), partly)
    file = partly / "tokenizer.json"
    said = json.loads(file.read_text())
    for token in said["added_tokens"]:
        token["content"] = token["content"].replace("<|fim_middle|>", "<|other|>")
    said["model"]["vocab"]["<|other|>"] = said["model"]["vocab"].pop("<|fim_middle|>")
    file.write_text(json.dumps(said))
    for path, lacks in ((model_file(cases.GQA), "the prefix, suffix and middle"), (partly, "the middle")):
        with opened(path) as llm:
            assert not llm.info.fills
            with pytest.raises(OptionError, match=f"no token for {lacks}; use one"):
                llm.ask(FillPrompt(PREFIX, SUFFIX))


def test_the_beginning_of_a_repeated_prompt_is_cached(path: Path) -> None:
    """While text is written before the gap, all other files and what was there before stay."""
    extra = tuple(Snippet(f"line {i} of a file\n" * 20, f"{i}.py") for i in range(3))
    with opened(path) as llm:

        def cached(prefix: str) -> tuple[int, int]:
            tokens = llm.ask(FillPrompt(prefix, SUFFIX, extra, repository=True, max_tokens=4))
            (answer,) = llm.generate([tokens], replace(GREEDY, max_tokens=4))
            return answer.usage.cached_tokens, tokens.index(CODER.token("<|fim_suffix|>"))

        assert cached(PREFIX)[0] == 0
        again, _ = cached(PREFIX)
        more, place = cached(PREFIX + "mat")
        assert again >= more >= place - 8
        assert place > 500


async def test_repeated_requests_of_a_real_model_are_cached_and_end_at_its_tokens() -> None:
    extra = [{"filename": snippet.filename, "text": snippet.text * 20} for snippet in EXTRA]
    asked: dict[str, Any] = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": extra}
    asked |= {"n_predict": 8, "temperature": 0}
    with LocalModel(qwen.folder(CODER), **OPEN) as llm:
        app = create_app(LocalClient(llm))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            first = (await http.post("/infill", json=asked)).json()
            again = (await http.post("/infill", json=asked)).json()
            more = (await http.post("/infill", json=asked | {"input_prefix": PREFIX + "on"})).json()
            bias = [[CODER.token("<|file_sep|>"), 1000]]
            ended = (await http.post("/infill", json=asked | {"logit_bias": bias})).json()
            plain = {"prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 8, "temperature": 0}
            completed = (await http.post("/v1/completions", json=plain)).json()
        snippets = tuple(Snippet(one["text"], one["filename"]) for one in extra)
        tokens = llm.ask(FillPrompt(PREFIX, SUFFIX, snippets, repository=True, max_tokens=8))
        params = SamplingParams(max_tokens=8, temperature=0)
        (expected,) = llm.generate([tokens], params)
        (alone,) = llm.generate([llm.ask(FillPrompt(PREFIX, SUFFIX, max_tokens=8))], params)
    assert first["content"] == again["content"] == expected.text
    assert first["tokens_evaluated"] == len(tokens)
    assert (first["timings"]["cache_n"], again["timings"]["cache_n"]) == (0, len(tokens) - 1)
    assert more["timings"]["cache_n"] >= tokens.index(CODER.token("<|fim_suffix|>")) - 8
    assert (ended["content"], ended["stop_type"], ended["tokens_predicted"]) == ("", "eos", 0)
    assert completed["choices"][0]["text"] == alone.text
    assert completed["usage"]["prompt_tokens"] == alone.usage.prompt_tokens


ENCODED = {"plain": lambda text: list(map(ord, text)), "special": lambda text: list(map(ord, text))}
FIM_TOKENS = FimTokens(1000, 1001, 1002, None, 1003, 1004)


def filled(asked: FillPrompt, context: int, bos: int | None = 2000) -> list[int]:
    return fill_prompt(asked, FIM_TOKENS, bos, context, **ENCODED)


def test_long_texts_are_cut_as_llama_cpp_cuts_them() -> None:
    long = FillPrompt("p" * 10_000, "s" * 10_000, (Snippet("x" * 9_000, "f"),), "now", True, 64)
    tokens = filled(long, 8192)
    bos, suffix = tokens.index(2000), tokens.index(1001)
    assert tokens[bos + 1] == 1000
    before = tokens[bos + 2 : suffix]
    assert bytes(before[-3:]) == b"now"
    assert 3 * (BATCH // 4) - STEP < len(before) - 3 <= 3 * (BATCH // 4)
    assert len(tokens) - suffix - 2 == BATCH // 4 - 2 - len("now")
    assert tokens[-1] == 1002
    assert bytes(tokens[:bos][-len("filename\n") :]) == b"filename\n"
    assert bos <= 8192 - BATCH - 2 * 64
    assert filled(FillPrompt("p", "s", (), "", True, 64), 8192)[0] == 1003


@pytest.mark.parametrize("context", [16, 64, 512, 2048, 2300, 4096])
@pytest.mark.parametrize("limit", [None, 1, 100, 10_000])
def test_any_context_has_room_for_the_answer(context: int, limit: int | None) -> None:
    for n in (0, 10, 1000, 10_000):
        asked = FillPrompt("p" * n, "s" * n, (Snippet("x" * n, "f"),), "", True, limit)
        room = min(limit or 128, context // 2)
        assert len(filled(asked, context)) + room <= context + 1


def test_what_is_cut_off_stays_for_a_while() -> None:
    """Each letter that is written would else move all others, and none would be cached."""
    begins: dict[tuple[int, ...], list[int]] = {}
    for n in range(5000, 5000 + 3 * STEP, 7):
        text = [i % 7919 for i in range(n)]
        tokens = filled(FillPrompt(tuple(text), ""), 8192, bos=None)
        begins.setdefault(tuple(tokens[1:9]), []).append(n)
    assert 2 <= len(begins) <= 4


def test_texts_far_from_the_gap_are_not_even_tokenised() -> None:
    seen: list[int] = []

    def plain(text: str) -> list[int]:
        seen.append(len(text))
        return [ord(text[0])] * len(text)

    asked = FillPrompt("p" * 10_000_000, "s" * 10_000_000)
    tokens = fill_prompt(asked, FIM_TOKENS, None, 4096, plain, plain)
    assert max(seen) <= FAR
    assert len(tokens) < 4096


def test_files_without_a_token_between_them() -> None:
    asked = FillPrompt("p", "s", (Snippet("x"), Snippet("y")), "", True)
    tokens = fill_prompt(asked, FimTokens(1000, 1001, 1002), None, 4096, **ENCODED)
    text = "".join(map(chr, tokens))
    assert text == "\n\n--- snippet ---\n\nx\n\n--- snippet ---\n\ny\u03e8p\u03e9s\u03ea"


@pytest.mark.parametrize(("keys", "fills"), [("new", True), ("old", True), ("text", True), ("none", False)])
def test_a_header_says_whether_a_model_fills_gaps(tmp_path: Path, keys: str, fills: bool) -> None:
    coder = qwen.written(Qwen("coder", fim=keys), tmp_path / "coder.gguf")
    assert LocalLibrary().facts(coder).fills is fills
