"""Which architectures there are, hetrun's own and plugins', and the graph that one builds of a model."""

from __future__ import annotations

import re
from collections.abc import Container
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import cast

from hetrun.errors import HetrunError, ModelFileError, PluginError
from hetrun.graph import Architecture, Graph, GraphBuilder, Leaves, PredictionBlock, Predicts
from hetrun.loader.source import ModelSource
from hetrun.system import entry_points

MODELS = "hetrun.models"


def own_model(name: str = "") -> ModuleType:
    """A file of `models/`, or the folder itself; by name, because no core module knows an architecture."""
    return import_module(f"{MODELS}.{name}" if name else MODELS)


def build_graph(source: ModelSource, context: int | None = None, spatial: bool = False) -> Graph:
    """The forward step of a model for sequences up to `context` tokens; `spatial`: these may have positions
    in height and width."""
    point = entry_points.find("models", source.architecture)
    try:
        return architecture_of(source).build(GraphBuilder(source, context, spatial), source)
    except HetrunError:
        raise
    except entry_points.FAILURES as e:
        if point is None or point in entry_points.left_out():
            raise
        raise entry_points.leave_out(
            point, f"it cannot build {source.name[:80]!r}: {entry_points.in_words(e)}", e
        ) from e


def prediction_block(source: ModelSource) -> PredictionBlock | None:
    """The part of a model's file that predicts the token after the next; None where there is none."""
    if plugged(source.architecture) is not None:
        return None
    architecture = architecture_of(source)
    return architecture.predicts(GraphBuilder(source), source) if isinstance(architecture, Predicts) else None


def is_known(source: ModelSource) -> bool:
    """Whether hetrun has the model's architecture, from a plugin or of its own, and does not leave files like
    this one to llama.cpp."""
    architecture = source.architecture
    if plugged(architecture) is not None:
        return True
    if not is_ours(architecture):
        return False
    found = own_model(_file_of(architecture))
    return not (isinstance(found, Leaves) and found.leaves(source))


def is_ours(architecture: str) -> bool:
    """Whether there is a file for it in `models/`."""
    # The name comes from a file: it must not become a path.
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", architecture):
        return False
    shared: Container[str] = own_model().SHARED
    file = _file_of(architecture)
    if file in shared or find_spec(f"{MODELS}.{file}") is None:
        return False
    return cast(Architecture, own_model(file)).name == architecture


def _file_of(architecture: str) -> str:
    """The file here of GGUF's name, which may have dashes."""
    return architecture.replace("-", "_")


def plugged(architecture: str, has: str = "build") -> Architecture | None:
    """A plugin's architecture that has a function; None where there is none, or where it was left out."""
    point = entry_points.find("models", architecture)
    try:
        found = entry_points.load(point) if point else None
    except PluginError:
        return None
    if point is None or callable(getattr(found, has, None)):
        return cast("Architecture | None", found)
    entry_points.leave_out(point, f"{point.entry.value} has no function {has}")
    return None


def builds(source: ModelSource) -> bool:
    """Whether there is an architecture for the model; a plugin's is tried, so that what fails is left out
    before anything stands on it."""
    if plugged(source.architecture) is not None:
        with suppress(PluginError):
            build_graph(source)
    return is_known(source)


def architecture_of(source: ModelSource) -> Architecture:
    """A plugin's architecture, or the file of that name in `models/`."""
    if found := plugged(source.architecture):
        return found
    if not is_ours(source.architecture):
        raise ModelFileError(
            source.path, f"its architecture {source.architecture[:40]!r} is not one that hetrun runs yet"
        )
    return cast(Architecture, own_model(_file_of(source.architecture)))
