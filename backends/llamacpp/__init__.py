"""ggml, from the libraries of an installed package: a segment is one ggml graph, run by one call."""

from __future__ import annotations

from hetrun.backend import Available, Backend, Descriptor, Probe, Unavailable
from hetrun.errors import BackendUnavailable


def probe() -> Probe:
    """Whether ggml's libraries are there and are a version whose structures we know."""
    from hetrun.backends.llamacpp import amx_check, ggml_api, kernels

    try:
        lib = ggml_api.library()
    except BackendUnavailable as e:
        return Unavailable(str(e))
    features = [name for name in ggml_api.cpu_features(lib) if name != "amx_int8" or amx_check.usable()]
    return Available(f"ggml {lib.version}: {', '.join(features)}; {kernels.remark()}{amx_check.remark()}")


def create() -> Backend:
    """ggml on the CPU."""
    from hetrun.backends.llamacpp.backend import LlamacppBackend

    return LlamacppBackend()


descriptor = Descriptor(
    "llamacpp",
    probe,
    create,
    "ggml of llama.cpp: the CPU's fast path for every quantised type",
    preference=100,
)
