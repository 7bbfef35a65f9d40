"""What docs/adding-a-*.md write down, done: each page's package is built, installed and used."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hetrun.client.hooks import Hooks
from hetrun.system import entry_points
from tests.models import hf
from tests.models.hf import Row
from tests.models.tiny import TinyLlama, write_gguf
from tests.plugins.strangers import PLUGINS, Home, blocks, home_at, home_with, project_of
from tests.support.once import once
from tests.support.paths import ROOT
from tests.support.tiers import exhaustive

DOCS = ROOT / "docs"
PAGES = ("backend", "model", "quant", "sampler", "endpoint", "planner")


def named(page: str) -> str:
    """The file of a page."""
    return f"adding-an-{page}.md" if page == "endpoint" else f"adding-a-{page}.md"


SAY = ("run", "The capital of France is", "--raw", "-n", "4", "--temp", "0", "--spec", "off")
TINY = TinyLlama("tiny", layers=2, embd=64, ffn=64, heads=2, kv_heads=2)

Given = Callable[[str], Home]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(TINY, tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture
def together(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """One environment of the run with the packages of all pages, and two that are no good."""
    return home_of_all_pages(tmp_path_factory)


@pytest.fixture(params=["together", pytest.param("alone", marks=exhaustive)])
def given(request: pytest.FixtureRequest, tmp_path: Path) -> Given:
    """An environment with the package that a page shows: with those of the others, or clean."""
    if request.param == "together":
        home: Home = request.getfixturevalue("together")
        return lambda page: home
    return lambda page: home_with(tmp_path, project_of(DOCS / named(page), tmp_path / "projects"))


@pytest.mark.parametrize("page", ["backend", "model", "sampler", "endpoint", "planner"])
def test_what_is_added_is_one_file_and_one_row(page: str) -> None:
    files = blocks(DOCS / named(page))
    (code,) = (name for name in files if name.endswith(".py"))
    assert files.keys() == {code, "pyproject.toml"}
    groups = [
        line for line in files["pyproject.toml"].splitlines() if line.startswith("[project.entry-points")
    ]
    assert len(groups) == 2  # the version, and the row
    compile(files[code], code, "exec")


def test_the_sampler_of_the_page_is_the_one_in_plugins() -> None:
    files = blocks(DOCS / "adding-a-sampler.md")
    for name, text in files.items():
        assert text == (PLUGINS / "hetrun-top-a" / name).read_text(), f"{name} differs from the page's"


def test_every_page_is_there_and_the_list_of_plugins_leads_to_it() -> None:
    listed = (DOCS / "plugins.md").read_text()
    for page in PAGES:
        assert (DOCS / named(page)).is_file()
        assert page == "quant" or f"({named(page)})" in listed


def test_the_page_on_plugins_has_every_group_every_hook_and_the_version() -> None:
    page = (DOCS / "plugins.md").read_text()
    for group in (*entry_points.KINDS, entry_points.SAYS_API):
        assert f"| `hetrun.{group}` |" in page
    for name, hook in inspect.getmembers(Hooks, inspect.isfunction):
        arguments = ", ".join(list(inspect.signature(hook).parameters)[1:])
        assert f"| `{name}({arguments})` |" in page
    assert f"version {entry_points.API} of" in page


def test_packages_use_what_the_page_lists_and_nothing_else() -> None:
    listed = set(re.findall(r"`(hetrun(?:\.[a-z_]+)*)`", (DOCS / "plugins.md").read_text()))
    code = [path.read_text() for path in PLUGINS.rglob("*.py")]
    code += [t for page in PAGES for n, t in blocks(DOCS / named(page)).items() if n.startswith("hetrun")]
    used = {name for text in code for node in ast.walk(ast.parse(text)) for name in imported(node)}
    assert len(code) > len(PAGES)
    assert {name for name in used if name.split(".")[0] == "hetrun"} <= listed


def imported(node: ast.AST) -> list[str]:
    """The modules that a statement imports; of a package, what it takes of it."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module == "hetrun.models":
        return [f"hetrun.models.{alias.name}" for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def no_good(folder: Path, name: str, code: str, api: int) -> Path:
    """A package that registers an architecture."""
    project = folder / f"hetrun-{name}"
    project.mkdir()
    (project / f"hetrun_{name}.py").write_text(code)
    page = blocks(DOCS / "adding-a-model.md")["pyproject.toml"]
    row = page.replace("ernie4_5", name).replace("ernie", name).replace(f"{entry_points.API} = ", f"{api} = ")
    (project / "pyproject.toml").write_text(row)
    return project


def home_of_all_pages(factory: pytest.TempPathFactory) -> Home:
    """Made once in a run. Nothing is measured in it: that is left to the clean ones."""

    def make(folder: Path) -> None:
        made = [project_of(DOCS / named(p), folder / "made") for p in PAGES if p != "quant"]
        bad = no_good(folder, "bad", "import no_such_thing\n", entry_points.API)
        old = no_good(folder, "old", "raise SystemExit(9)\n", entry_points.API - 1)
        home_with(folder, *made, bad, old)

    home = home_at(once(factory, "pages", make))
    return home.with_variables(HETRUN_PLANNER="static", HETRUN_THREADS="1")


@pytest.mark.slow
def test_all_of_them_together_and_two_that_are_no_good(together: Home) -> None:
    home = together
    found = json.loads(home.hetrun("doctor", "--json").stdout)
    plugins = {f["name"]: (f["state"], f["text"]) for f in found["findings"] if f["group"] == "plugins"}
    assert {name for name, (state, _) in plugins.items() if state == "ok"} == {
        *("ernie4_5", "top_a", "usage", "divided")
    }
    assert plugins["bad"][0] == plugins["old"][0] == "warning"
    assert "hetrun-bad 0.1.0 is left out: hetrun_bad cannot be imported" in plugins["bad"][1]
    assert (
        f"hetrun-old 0.1.0 is left out: it was written for version {entry_points.API - 1}"
        in plugins["old"][1]
    )
    assert any(f["name"] == "blas" and f["state"] == "ok" for f in found["findings"])
    assert home.hetrun("run", "Hello", "-n", "2", "--temp", "0").stdout.strip()


@pytest.mark.slow
def test_a_backend(given: Given, tiny: str) -> None:
    home = given("backend")
    assert "blas" in home.hetrun("devices").stdout
    table = json.loads(home.hetrun("devices", "--conformance", "--backend", "blas", "--json").stdout)
    mine = [cell for cell in table["cells"] if cell["backend"] == "blas"]
    assert {cell["op"] for cell in mine if cell["state"] == "ok"} == {"linear", "rms_norm", "swiglu", "add"}
    assert {cell["state"] for cell in mine} <= {"ok", "unsupported"}
    both = ("-m", tiny, "--backend", "blas", "--backend", "reference")
    plan = json.loads(home.hetrun("plan", *both, "--json").stdout)
    segments = [s for stage in plan["plans"][0]["stages"] for s in stage]
    assert {s["backend"] for s in segments} == {"blas", "reference"}
    together = home.hetrun(*SAY, *both).stdout
    assert together.strip()
    assert together == home.hetrun(*SAY, "-m", tiny, "--backend", "reference").stdout


LOGITS = """
import sys, numpy
from hetrun import LLM
backends = sys.argv[3].split(",")
with LLM(sys.argv[1], backends=backends, ctx=128, kv_type="f32") as llm:
    numpy.save(sys.argv[2], llm.logits(range(2, 42)))
"""


@pytest.mark.slow
def test_a_model(given: Given, tmp_path: Path) -> None:
    home = given("model")
    folder = hf.folder(Row("page", "ernie4_5", {"num_hidden_layers": 3, "head_dim": 32}))

    def logits(model: Path, backends: str) -> np.ndarray:
        home.run("-c", LOGITS, str(model), str(tmp_path / "found.npy"), backends)
        return np.asarray(np.load(tmp_path / "found.npy"))

    expected = hf.logits(folder, range(2, 42))
    assert np.abs(logits(folder, "reference") - expected).max() < 1e-3
    assert np.abs(logits(folder, "llamacpp") - expected).max() < 1e-2
    gguf = tmp_path / "ernie.gguf"
    home.hetrun("convert", str(folder), "-q", "f32", "-o", str(gguf))
    assert np.abs(logits(gguf, "reference") - expected).max() < 1e-3
    assert np.abs(logits(gguf, "libllama") - expected).max() < 1e-2  # llama.cpp's own idea of it


@contextmanager
def server(home: Home, *arguments: str) -> Iterator[str]:
    """A server of this environment, by its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(home.python), "-m", "hetrun", "serve", "--port", str(port), "--ctx", "256", *arguments]
    with subprocess.Popen(command, env=home.env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "/v1" in line:
                    break
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


def fetch(url: str, body: object = None) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, object] = json.load(answer)
        return found


@pytest.mark.slow
def test_an_endpoint(given: Given) -> None:
    with server(given("endpoint")) as url:
        assert fetch(f"{url}/usage").keys() == {"model"}
        for _ in range(2):
            fetch(f"{url}/v1/completions", {"prompt": "Once", "max_tokens": 3, "temperature": 0})
        while (found := fetch(f"{url}/usage")).get("answered") != 2:
            time.sleep(0.01)  # it is told on a thread of its own
        assert found["completion_tokens"] == 6


@pytest.mark.slow
def test_a_planner(given: Given, tiny: str) -> None:
    home = given("planner")
    chosen = ("-m", tiny, "--planner", "divided", "--backend", "llamacpp", "--backend", "reference")
    plan = json.loads(home.hetrun("plan", *chosen, "--json").stdout)
    places = {p["scope"]: p["backend"] for p in plan["plans"][0]["placements"]}
    assert places[""] == "llamacpp"
    assert {backend for scope, backend in places.items() if scope} == {"reference"}
    divided = home.hetrun(*SAY, *chosen).stdout
    assert divided.strip()
    assert divided == home.hetrun(*SAY, "-m", tiny, "--backend", "reference").stdout
    assert (
        "measured or static or divided, not 'divide'"
        in home.hetrun("plan", "-m", tiny, "--planner", "divide", code=2).stderr
    )


TYPE = """
import numpy as np
from hetrun.graph.quant import by_ggml_id, by_name
x = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
q = by_name("Q6_0")
assert by_ggml_id(133) is q
error = np.square(q.dequantise(q.quantise(x), 256) - x).mean() / np.square(x).mean()
print(float(error))
"""


@pytest.mark.slow
def test_a_quantisation_type(given: Given, tmp_path: Path) -> None:
    """What the page says, done to a copy of hetrun."""
    copy = tmp_path / "hetrun"
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "hetrun", copy, ignore=skipped)  # follows the links
    files = blocks(DOCS / "adding-a-quant.md")
    simple = copy / "graph" / "quant" / "basic.py"
    simple.write_text(f"{simple.read_text()}\n\n{files['graph/quant/basic.py']}")
    for path, before in (
        ("graph/quant/__init__.py", '    QuantType("Q8_0"'),
        ("backend/conformance/cases.py", '"F32": EXACT'),
    ):
        text = (copy / path).read_text()
        assert text.count(before) == 1
        (copy / path).write_text(text.replace(before, f"{files[path].rstrip()}\n{before}"))
    home = given("backend").with_variables(PYTHONPATH=str(tmp_path))
    assert 1e-4 < float(home.run("-c", TYPE, cwd=tmp_path).stdout) < 1e-3  # six bits
    asked = ("devices", "--conformance", "--backend", "blas", "--backend", "llamacpp", "--json")
    said = home.hetrun(*asked, cwd=tmp_path).stdout
    cells = [cell for cell in json.loads(said)["cells"] if cell["type"] == "Q6_0"]
    states = {(cell["op"], cell["backend"]): cell["state"] for cell in cells}
    assert states["linear", "blas"] == "ok"  # which multiplies by whatever can be unpacked
    assert states["linear", "llamacpp"] == "unsupported"
