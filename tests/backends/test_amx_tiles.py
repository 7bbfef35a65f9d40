"""The tile configuration that is loaded before ggml's graphs."""

from __future__ import annotations

import pytest

from hetrun.backend import Available, registry


def test_the_configuration_has_the_form_that_the_instruction_reads() -> None:
    from hetrun.backends.llamacpp.amx_tiles import ROW_BYTES, ROWS, config

    data = config()
    assert len(data) == 64
    assert data[0] == 1
    assert not any(data[1:16])
    assert [int.from_bytes(data[16 + 2 * i : 18 + 2 * i], "little") for i in range(16)] == [
        *ROW_BYTES,
        *[0] * 8,
    ]
    assert tuple(data[48:56]) == ROWS
    assert not any(data[56:])


def test_ggml_does_without_its_amx_code_where_the_tiles_cannot_be_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not isinstance(registry.backends()["llamacpp"].probe(), Available):
        pytest.skip("llama-cpp-python is not installed")
    from hetrun.backends.llamacpp import amx_check

    monkeypatch.setattr(amx_check, "tiles", lambda lib: None)
    for found, usable in (("works", False), ("absent", True), ("broken", False), ("untried", False)):
        monkeypatch.setattr(amx_check, "verdict", lambda found=found: found)
        assert amx_check.usable() is usable
        assert amx_check.keeper() is None
