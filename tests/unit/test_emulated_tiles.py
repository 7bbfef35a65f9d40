"""AMX's tiles in plain C (tests/support/tiles.h): products with them have the same bits."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

from hetrun.backends.llamacpp.kernels import matmul as module
from hetrun.backends.llamacpp.kernels.matmul import LEVELS, PLAIN, PORTABLE, SWIGLU, MatmulLibrary
from hetrun.graph.quant import by_name
from tests.support.paths import ROOT
from tests.support.tiers import exhaustive
from tests.unit import test_matmul_kernels as kernels
from tests.unit.test_matmul_kernels import EXACT, SCALES, STEPS, Fused, activations, computed, same, weight

FLOATS = [by_name(name).ggml_id for name in EXACT]
AVX512, AMX = LEVELS.index("AVX-512 VNNI"), LEVELS.index("AMX")
TILE_ROWS, ROUNDED_BYTES, FLOAT_BYTES = 16, 48, 128  # of activations at once; of 32 columns of one
TILES = ROOT / "tests" / "support" / "tiles.h"
FOLDER = ROOT / "hetrun" / "backends" / "llamacpp" / "kernels"
BUILT = module.library()
pytestmark = [
    exhaustive,
    pytest.mark.skipif(BUILT is None or AVX512 not in BUILT.levels, reason="this CPU has no AVX-512 VNNI"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc"),
]


class Emulated(MatmulLibrary):
    """It takes this CPU for what it is, and tiles want more rows of activations at once."""

    def scratch(self, ggml_id: int, n: int, cols: int) -> int:
        whole = -(-n // TILE_ROWS) * TILE_ROWS
        return whole * (cols // 32) * (FLOAT_BYTES if ggml_id in FLOATS else ROUNDED_BYTES)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> MatmulLibrary:
    """The library as it is compiled for users, but for tiles."""
    made = tmp_path_factory.mktemp("tiles") / "products.so"
    shared = next((ROOT / "hetrun").rglob("supply.h"))
    options = ("-O2", "-ffp-contract=off", "-fPIC", "-shared", "-include", str(TILES), f"-I{shared.parent}")
    command = ("gcc", *options, str(FOLDER / "products.c"), "-o", str(made), "-lm")
    subprocess.run(command, check=True)
    return Emulated(ctypes.PyDLL(str(made)), ctypes.CDLL(str(made)))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("activation", [PLAIN, SWIGLU])
@pytest.mark.parametrize("name", sorted(SCALES))
def test_tiles_make_the_same_bits(
    name: str, activation: int, exact: bool, emulated: MatmulLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "BUILT", emulated)
    fused = Fused(activation=activation, exact=exact)
    for steps in (1, 3, 9):
        w = weight(name, 64, STEPS[name] * steps)
        for n in (4, 7, 8, 13, 14, 16, 24, 33, 40, 130):
            x = activations(n, w.cols)
            assert same(computed(w, x, AMX, 2, fused), computed(w, x, PORTABLE, 1, fused))
