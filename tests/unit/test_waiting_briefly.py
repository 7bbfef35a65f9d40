"""How ggml's threads wait is set where they are loaded, and nowhere else."""

from __future__ import annotations

import os

import pytest

from hetrun.backends.llamacpp import ggml_api


def test_it_is_there_while_libraries_load_and_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ggml_api.SPINNING, raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with ggml_api._waiting_briefly():
        assert os.environ[ggml_api.SPINNING] == ggml_api.SPINS
    assert ggml_api.SPINNING not in os.environ


@pytest.mark.parametrize(("name", "value"), [(ggml_api.SPINNING, "7"), ("OMP_WAIT_POLICY", "active")])
def test_what_the_user_says_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ggml_api.SPINNING, raising=False)
    monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with ggml_api._waiting_briefly():
        assert dict(os.environ) == before
    assert dict(os.environ) == before
