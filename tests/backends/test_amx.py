"""Whether ggml's AMX code may be used: what a child's end says, what is remembered, and the real thing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetrun.backend import Available
from hetrun.backends import llamacpp
from hetrun.backends.llamacpp import amx_check, ggml_api, kernels, weight_memory
from hetrun.config import dirs
from hetrun.errors import BackendUnavailable
from hetrun.system import subprocesses

AMX, OTHER = 11, 22  # buffer types


class Machine:
    """A machine whose trials end as told."""

    def __init__(self, ending: int | None) -> None:
        self.ending, self.trials = ending, 0

    def try_it(self) -> int | None:
        self.trials += 1
        return self.ending


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    amx_check.verdict.cache_clear()
    yield
    amx_check.verdict.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine with AMX, whatever is under the tests, and a library that is not there but for its size."""
    (tmp_path / "libggml-cpu.so").write_bytes(b"some code")
    names = {AMX: b"AMX", OTHER: b"CPU_REPACK"}
    lib = SimpleNamespace(
        folder=tmp_path,
        cpu_path=tmp_path / "libggml-cpu.so",
        version="0.25.3",
        ggml_backend_buft_name=names.__getitem__,
    )
    machine = Machine(0)
    monkeypatch.setattr(ggml_api, "library", lambda: lib)
    monkeypatch.setattr(ggml_api, "extra_buffer_types", lambda lib: [AMX, OTHER])
    monkeypatch.setattr(ggml_api, "cpu_features", lambda lib: ["amx_int8", "avx2"])
    monkeypatch.setattr(amx_check, "_ending", machine.try_it)
    monkeypatch.setattr(amx_check, "tiles", lambda lib: object())
    return machine


def again() -> amx_check.Verdict:
    """What the next process would find."""
    amx_check.verdict.cache_clear()
    return amx_check.verdict()


def types() -> list[int]:
    return weight_memory._repacking_types(ggml_api.library())


@pytest.mark.parametrize(
    ("ending", "verdict", "remembered"),
    [
        (0, "works", True),
        (-signal.SIGSEGV, "broken", True),
        (-signal.SIGILL, "broken", True),
        (amx_check.WRONG, "broken", True),
        (-signal.SIGKILL, "untried", False),
        (1, "untried", False),
        (None, "untried", False),
    ],
)
def test_a_childs_end_decides_and_is_remembered(
    machine: Machine, ending: int | None, verdict: str, remembered: bool
) -> None:
    machine.ending = ending
    assert amx_check.verdict() == amx_check.verdict() == verdict
    assert machine.trials == 1
    assert again() == verdict
    assert machine.trials == (1 if remembered else 2)
    assert amx_check.usable() == (ending == 0)
    assert types() == ([AMX, OTHER] if ending == 0 else [OTHER])


def test_another_library_is_tried_again(machine: Machine, tmp_path: Path) -> None:
    machine.ending = -signal.SIGSEGV
    assert amx_check.verdict() == "broken"
    (tmp_path / "libggml-cpu.so").write_bytes(b"better code")
    machine.ending = 0
    assert again() == "works"
    assert machine.trials == 2


def test_a_cache_that_cannot_be_written_means_asking_again(machine: Machine) -> None:
    dirs().cache.parent.mkdir(parents=True, exist_ok=True)
    dirs().cache.write_text("a file, where a folder should be")
    assert amx_check.verdict() == again() == "works"
    assert machine.trials == 2


def test_a_mark_that_says_nothing_is_not_believed(machine: Machine) -> None:
    assert amx_check.verdict() == "works"
    (mark,) = (dirs().cache / "amx").iterdir()
    for nonsense in (b"", b"wor", b"\xff"):
        mark.write_bytes(nonsense)
        assert again() == "works"
    assert machine.trials == 4


def test_without_a_home_nothing_is_remembered(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "nowhere")
    assert amx_check.verdict() == again() == "works"
    assert machine.trials == 2


def test_without_amx_nothing_is_tried(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml_api, "extra_buffer_types", lambda lib: [OTHER])
    assert amx_check.verdict() == "absent"
    assert amx_check.usable()
    assert types() == [OTHER]
    assert machine.trials == 0
    assert not dirs().cache.exists()


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (0, "ggml 0.25.3: amx_int8, avx2; kernels"),
        (
            -signal.SIGSEGV,
            "ggml 0.25.3: avx2; kernels; its AMX code was miscompiled: reinstall with "
            "CXXFLAGS='-fno-tree-dse -fno-dse' "
            "pip install --force-reinstall --no-cache-dir --no-deps 'llama-cpp-python>=0.3.36,<0.3.37'",
        ),
        (
            None,
            "ggml 0.25.3: avx2; kernels; its AMX code is not used, "
            "because trying it in a process of its own gave no result",
        ),
    ],
)
def test_devices_says_it(
    machine: Machine, ending: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "remark", lambda: "kernels")
    machine.ending = ending
    assert llamacpp.probe() == Available(said)


@pytest.mark.parametrize("error", [OSError("no more processes"), TimeoutError()])
def test_no_child_is_no_verdict(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(subprocesses, "run", fail)
    assert amx_check._ending() is None


def test_the_flags_are_those_of_the_installation() -> None:
    script = Path(__file__).parents[2] / "scripts" / "install.py"
    assert f'AMX_FLAGS = "{amx_check.FLAGS}"' in script.read_text(encoding="utf-8")
    assert amx_check.REPAIR.rsplit("'", 2)[1] in ggml_api.INSTALL


def real() -> ggml_api.GgmlLibrary:
    try:
        return ggml_api.library()
    except BackendUnavailable as e:
        pytest.skip(str(e))


def test_ggmls_plain_memory_passes_the_trial() -> None:
    lib = real()
    assert all(amx_check.is_right(lib, lib.ggml_backend_cpu_buffer_type(), n) for n in amx_check.TOKENS)


def test_a_wrong_product_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lib, product = real(), amx_check._product
    plain = lib.ggml_backend_cpu_buffer_type()
    for wrong in (float("nan"), 1e6):

        def spoilt(*given: object, wrong: float = wrong) -> object:
            out = product(*given)  # type: ignore[arg-type]
            assert out is not None
            out[-1, -1] += wrong
            return out

        monkeypatch.setattr(amx_check, "_product", spoilt)
        assert not amx_check.is_right(lib, plain, 64)


def test_the_real_code_is_used_if_and_only_if_it_works() -> None:
    lib = real()
    if (kind := amx_check.buffer_type(lib)) is None:
        pytest.skip("no AMX here, or a ggml without it")
    assert amx_check.verdict() in ("works", "broken")
    assert len(list((dirs().cache / "amx").iterdir())) == 1
    assert (kind in weight_memory._repacking_types(lib)) == amx_check.usable()
    for n in amx_check.TOKENS:
        if keeper := amx_check.keeper():
            keeper.restore(
                amx_check.THREADS
            )  # other tests may have had other libraries' tiles on this thread
            assert amx_check.is_right(lib, kind, n)
