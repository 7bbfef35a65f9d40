"""Mistakes in a request are told before the weights of its model are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetrun import cli
from hetrun.client.sampling_params import Structure
from hetrun.executor.weight_store import WeightStore
from hetrun.sampling.grammar.token_mask import Grammars
from tests.models.tiny import TinyLlama, write_gguf

TINY = TinyLlama("tiny", layers=1, embd=64, ffn=64, heads=2, kv_heads=2, context=64)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(TINY, tmp_path_factory.mktemp("first-look") / "tiny.gguf")


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was read of weights."""
    read: list[str] = []
    load = WeightStore.load

    def noted(store: WeightStore, *arguments: object) -> None:
        read.append("weights")
        load(store, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(WeightStore, "load", noted)
    return read


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hi", "--regex", "("], "regex: unclosed group"),
        (["hi", "--json-schema", '{"type": 3}'], "json_schema: "),
        (["hi", "--grammar", "root ::= ("], "grammar, line 1"),
        (["hi", "--logit-bias", "99999999+1"], "logit_bias: token 99999999 does not exist"),
        (["word " * 200], "but the context holds 64 with the answer"),
        (["word " * 200, "--raw"], "but the context holds 64 with the answer"),
        (["word " * 200, "--raw", "-c", "32"], "but the context holds 32 with the answer"),
    ],
)
def test_what_is_wrong_with_a_request_is_told_before_weights_are_read(
    tiny: Path, weights: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code = cli.exit_code(["run", *arguments, "-m", str(tiny), "--backend", "reference"])
    out, err = capsys.readouterr()
    (sentence,) = err.splitlines()
    assert (code, out, weights) == (2, "", [])
    assert said in sentence


def test_what_is_wrong_with_the_model_is_told_before_what_is_wrong_with_the_request(
    tiny: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    unknown = tmp_path / "unknown.gguf"
    unknown.write_bytes(tiny.read_bytes().replace(b"llama", b"lllll"))
    code = cli.exit_code(["run", "hi", "--regex", "(", "-m", str(unknown), "--backend", "reference"])
    assert code == 2
    assert "lllll" in capsys.readouterr().err


def test_a_form_is_compiled_once(
    tiny: Path, weights: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Structure] = []
    real = Grammars._compile

    def counting(grammars: Grammars, structure: Structure) -> object:
        compiled.append(structure)
        return real(grammars, structure)

    monkeypatch.setattr(Grammars, "_compile", counting)
    code = cli.exit_code(
        ["run", "hi", "--regex", "yes|no", "--temp", "0", "-m", str(tiny), "--backend", "reference"]
    )
    assert (code, len(compiled), len(weights)) == (0, 1, 1)
    assert capsys.readouterr().out in ("yes\n", "no\n")
