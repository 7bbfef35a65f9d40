"""Backends by name: found, ordered, refused with a reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import pytest

from hetrun.backend import Available, Backend, Descriptor, Probe, Unavailable, registry
from hetrun.errors import BackendUnavailable, OptionError, PluginError
from hetrun.system import entry_points
from tests.plugins.strangers import Register
from tests.support.nulldevice import NullDevice

Add = Callable[..., None]


@pytest.fixture
def add() -> Iterator[Add]:
    """Registers a backend for one test."""
    undo: list[Callable[[], None]] = []

    def add(name: str, preference: int = 50, probe: Probe = Available("for a test")) -> None:  # noqa: B008
        descriptor = Descriptor(name, lambda: probe, lambda: NullDevice(name), preference=preference)
        undo.append(registry.register(descriptor))

    yield add
    for function in undo:
        function()


def test_the_reference_is_always_there_and_always_last() -> None:
    known = registry.backends()
    assert isinstance(known["reference"].probe(), Available)
    assert registry.choose(None)[-1] == "reference"
    assert all(name == d.name and d.summary for name, d in known.items())


def test_the_most_wanted_comes_first(add: Add) -> None:
    add("fastest", preference=1000)
    add("slowest", preference=-1)
    assert next(iter(registry.backends())) == "fastest"
    assert list(registry.backends())[-1] == "slowest"
    assert registry.choose(None)[0] == "fastest"
    assert registry.choose(["reference", "fastest"]) == ["fastest", "reference"]
    assert isinstance(registry.backends()["fastest"].create(), Backend)


def test_what_is_registered_can_be_taken_away_again() -> None:
    remove = registry.register(Descriptor("passing", lambda: Available(""), NullDevice))
    assert "passing" in registry.backends()
    remove()
    remove()
    assert "passing" not in registry.backends()


def test_one_that_does_not_work_here_is_left_out_unless_asked_for(add: Add) -> None:
    add("broken", preference=1000, probe=Unavailable("there is no such device"))
    assert "broken" not in registry.choose(None)
    assert "broken" in registry.backends()
    with pytest.raises(
        BackendUnavailable, match=r"^the backend broken cannot work here: there is no such device$"
    ):
        registry.choose(["reference", "broken"])


def test_one_that_is_not_asked_for_is_not_probed() -> None:
    def probe() -> Probe:
        raise AssertionError("probed")

    remove = registry.register(Descriptor("expensive", probe, NullDevice))
    try:
        assert registry.choose(["reference"]) == ["reference"]
    finally:
        remove()


def test_an_unknown_name() -> None:
    with pytest.raises(OptionError, match=r"^there is no backend 'tpu'; there are .*reference"):
        registry.choose(["reference", "tpu"])


def test_a_package_that_does_not_import_harms_no_other(register: Register) -> None:
    register("backends", "plugin", fails=ImportError("No module named 'vulkan'"))
    assert "plugin" not in registry.choose(None)
    assert "reference" in registry.choose(None)
    said = (
        r"^the backend plugin cannot work here: the backend plugin of stranger 0\.1 is left out: "
        r"stranger:thing cannot be imported: ImportError: No module"
    )
    with pytest.raises(BackendUnavailable, match=said):
        registry.choose(["plugin"])
    with pytest.raises(BackendUnavailable, match=said):
        registry.backends()["plugin"].create()


def fails() -> Probe:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("thing", "said"),
    [
        (Descriptor("other", lambda: Available(""), NullDevice), "is not a Descriptor of plugin"),
        ("text", "'str' object is not callable"),
        (lambda: ["text"], "'text' is not a Descriptor of plugin"),
        (Descriptor("plugin", fails, NullDevice), "of stranger 0.1: its probe fails: ZeroDivisionError"),
        (Descriptor("plugin", lambda: cast(Probe, True), NullDevice), "its probe returns neither"),
    ],
)
def test_one_that_lies_about_itself_is_said_to(register: Register, thing: object, said: str) -> None:
    register("backends", "plugin", thing)
    assert "plugin" not in registry.choose(None)
    probe = registry.backends()["plugin"].probe()
    assert isinstance(probe, Unavailable)
    assert said in probe.reason


@pytest.mark.parametrize("create", [fails, lambda: "text"])
def test_one_that_cannot_be_created(register: Register, create: Callable[[], Backend]) -> None:
    register("backends", "plugin", Descriptor("plugin", lambda: Available("yes"), create))
    with pytest.raises(PluginError, match=r"^the backend plugin of stranger 0\.1 is left out: "):
        registry.backends()["plugin"].create()
    assert "plugin" not in registry.choose(None)  # nor is it tried again


DEVICES = [
    Descriptor(name, partial(Available, name), partial(NullDevice, name), preference=40, by_name=True)
    for name in ["gpu", *(f"gpu-{n}" for n in range(1, 12))]
]


def several() -> list[Descriptor]:
    return DEVICES


def none_at_all() -> list[Descriptor]:
    raise OSError("no list of devices")


def test_a_package_may_have_several_devices(register: Register) -> None:
    register("backends", "gpu", several)
    known = registry.backends()
    assert [name for name in known if name.startswith("gpu")] == [d.name for d in DEVICES]
    assert registry.choose(["gpu"]) == ["gpu"]  # the first, not all of them
    assert registry.choose(["gpu-10", "gpu-2", "reference"]) == ["gpu-2", "gpu-10", "reference"]
    assert known["gpu-3"].create().name == "gpu-3"
    with pytest.raises(OptionError, match=r"^there is no backend 'gpu-12'; there are .*gpu-10, gpu-11, "):
        registry.choose(["gpu-12"])


def test_a_package_that_cannot_say_what_it_has_harms_no_other(register: Register) -> None:
    register("backends", "gpu", none_at_all)
    assert "reference" in registry.choose(None)
    with pytest.raises(BackendUnavailable, match=r"^the backend gpu cannot work here: .* no list of devices"):
        registry.choose(["gpu"])


def test_other_named_things() -> None:
    assert entry_points.named("vocabularies", "nothing") is None
    assert entry_points.named("backends", "reference") is registry.backends()["reference"]


def test_knowing_the_backends_loads_none_of_them() -> None:
    code = (
        "import sys; from hetrun.backend import registry; registry.backends();"
        "print([m for m in sys.modules if m.startswith(('llama_cpp', 'torch', 'cupy', 'hetrun.backends.'))])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    # The packages themselves, and two modules that import next to nothing.
    known = ("amx", "amx.sizes", "cuda", "cuda.nvrtc", "libllama", "llamacpp", "reference")
    assert sorted(eval(out)) == [f"hetrun.backends.{module}" for module in known]
