"""In which order backends are taken, where those of ours that compute fast are installed."""

from __future__ import annotations

from hetrun.backend import Available, Descriptor, registry
from tests.plugins.strangers import Register
from tests.support.nulldevice import NullDevice


def test_a_stranger_comes_behind_ours_and_before_the_reference(register: Register) -> None:
    register("backends", "loud", Descriptor("loud", lambda: Available("yes"), NullDevice, preference=10**9))
    chosen = registry.choose(None)
    assert chosen.index("llamacpp") < chosen.index("loud") < chosen.index("reference")
    assert registry.stranger("loud")
    assert not registry.stranger("llamacpp")
