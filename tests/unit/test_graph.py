"""Weights as pieces of files, and graphs that are refused where they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from hetrun.errors import ModelFileError
from hetrun.graph import (
    Constant,
    Extent,
    Graph,
    GraphBuilder,
    KvShape,
    Op,
    Value,
    Weight,
    constant,
    in_scope,
    kv_shapes,
    stack,
)
from hetrun.graph.ops import NONE, Attention, RmsNorm, Rope
from hetrun.graph.quant import QUANTS, Bytes, Floats, QuantType, by_name, external
from hetrun.loader.weight_reader import FileReader

F32, Q4_0 = by_name("F32"), by_name("Q4_0")
FILE_BYTES = 1 << 16


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random bytes: any place in it is a weight."""
    path = tmp_path_factory.mktemp("weights") / "noise.bin"
    path.write_bytes(np.random.default_rng(0).bytes(FILE_BYTES))
    return path


def weight(rows: int, cols: int, quant: QuantType = F32, name: str = "w", path: str = "f") -> Weight:
    width = quant.row_bytes(cols)
    return Weight(name, (rows, cols), quant, (Extent(path, 0, rows, width, width),))


@st.composite
def weights(draw: st.DrawFn) -> Weight:
    """A weight in up to three places, its rows apart or one behind the other."""
    quant = draw(st.sampled_from(list(QUANTS.values())))
    cols = quant.block * draw(st.integers(1, 4))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        rows, stride = draw(st.integers(1, 5)), quant.row_bytes(cols) + draw(st.sampled_from((0, 0, 7, 64)))
        offset = draw(st.integers(0, FILE_BYTES - rows * stride))
        parts.append(Extent("noise", offset, rows, quant.row_bytes(cols), stride))
    return Weight("w", (sum(p.rows for p in parts), cols), quant, tuple(parts))


def at(path: Path, w: Weight) -> Weight:
    return replace(w, parts=tuple(replace(p, path=str(path)) for p in extents(w)))


def extents(w: Weight) -> list[Extent]:
    return [p for p in w.parts if isinstance(p, Extent)]


def stored(w: Weight) -> np.ndarray:
    """The bytes of a weight's rows, [rows, row_bytes], as FileReader gives them."""
    out, reader = np.zeros(w.nbytes, np.uint8), FileReader()
    reader.read(w, out)
    reader.close()
    assert reader.bytes_read == w.nbytes
    return out.reshape(w.shape[0], -1)


@pytest.fixture(scope="module")
def unpacked() -> Iterator[None]:
    """Types that ggml unpacks elsewhere: here the weights of a block are its bytes, over and over."""

    def over_and_over(ggml_id: int, blocks: Bytes, out: Floats) -> None:
        out[:] = blocks[:, np.arange(out.shape[1]) % blocks.shape[1]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(external, "provided", lambda: over_and_over)
        yield


def bits(w: Weight, raw: np.ndarray) -> np.ndarray:
    """Dequantised, as bits, because random bytes hold NaN too."""
    return w.quant.dequantise(raw, w.shape[1]).view(np.uint32)


@given(w=weights())
def test_a_weight_is_read_from_its_extents(noise: Path, w: Weight) -> None:
    content = np.fromfile(noise, np.uint8)
    rows = [content[p.offset + i * p.stride :][: p.row_bytes] for p in extents(w) for i in range(p.rows)]
    assert (stored(at(noise, w)) == np.stack(rows)).all()
    assert all(p.offset + (p.rows - 1) * p.stride + p.row_bytes == p.end for p in extents(w))


def test_a_constant_is_read_like_a_file() -> None:
    table = np.arange(24, dtype=np.float32).reshape(4, 6)
    w = Weight("c", (4, 6), by_name("F32"), (Constant(table.tobytes(), 4),))
    for part, expected in ((w, table), (w.rows(1, 3), table[1:3]), (w.cols(2, 5), table[:, 2:5])):
        out = np.empty(part.nbytes, np.uint8)
        FileReader().read(part, out)
        assert (part.quant.dequantise(out, part.shape[1]) == expected).all()
    assert constant("f", table[0]).shape == (1, 6)


@given(w=weights(), data=st.data())
def test_rows_and_columns_equal_slices_of_the_whole(
    noise: Path, unpacked: None, w: Weight, data: st.DataObject
) -> None:
    w = at(noise, w)
    expected = bits(w, stored(w))
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            a = data.draw(st.integers(0, w.shape[0] - 1))
            b = data.draw(st.integers(a + 1, w.shape[0]))
            w, expected = w.rows(a, b), expected[a:b]
        else:
            blocks, block = w.shape[1] // w.quant.block, w.quant.block
            a = data.draw(st.integers(0, blocks - 1)) * block
            b = data.draw(st.integers(a // block + 1, blocks)) * block
            w, expected = w.cols(a, b), expected[:, a:b]
        assert w.shape == expected.shape
        assert sum(p.rows for p in w.parts) == w.shape[0]
        assert (bits(w, stored(w)) == expected).all()


@given(first=weights(), counts=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_a_stack_is_its_weights_on_top_of_each_other(noise: Path, first: Weight, counts: list[int]) -> None:
    first = at(noise, first)
    pieces = [first, *(first.rows(0, min(n, first.shape[0])) for n in counts)]
    whole = stack(pieces)
    assert whole.shape == (sum(p.shape[0] for p in pieces), first.shape[1])
    assert (stored(whole) == np.concatenate([stored(p) for p in pieces])).all()


def test_a_stack_of_one_is_that_one() -> None:
    w = weight(2, 64)
    assert stack([w]) is w


def test_stacked_weights_have_one_width_and_type() -> None:
    with pytest.raises(ValueError, match=r"^b cannot be stacked on a: another type or width$"):
        stack([weight(2, 64, name="a"), weight(2, 32, name="b")])
    with pytest.raises(ValueError, match=r"^b cannot be stacked on a"):
        stack([weight(2, 64, name="a"), weight(2, 64, Q4_0, "b")])


@pytest.mark.parametrize(("a", "b"), [(-1, 2), (0, 5), (2, 2), (3, 1)])
def test_rows_that_are_not_there(a: int, b: int) -> None:
    with pytest.raises(ValueError, match=f"^w: rows {a}:{b} are not inside 0:4$"):
        weight(4, 64).rows(a, b)


def test_columns_keep_to_blocks() -> None:
    w = weight(4, 64, Q4_0)
    with pytest.raises(ValueError, match=r"^w: columns 16:64 cut a block of 32 Q4_0 weights$"):
        w.cols(16, 64)
    with pytest.raises(ValueError, match=r"^w: columns 0:96 are not inside 0:64$"):
        w.cols(0, 96)


def test_names_of_pieces_say_which() -> None:
    w = weight(4, 64, Q4_0)
    assert w.rows(1, 3).cols(32, 64).name == "w[1:3][:,32:64]"
    assert stack([w, w.rows(0, 1)]).name == "w+w[0:1]"


@pytest.mark.parametrize(
    ("scope", "prefix", "inside"),
    [
        ("blk.3.attn.q", "", True),
        ("blk.3.attn.q", "blk.3", True),
        ("blk.3.attn.q", "blk.3.attn.q", True),
        ("blk.30.attn", "blk.3", False),
        ("blk.3", "blk.3.attn", False),
    ],
)
def test_scopes_are_paths(scope: str, prefix: str, inside: bool) -> None:
    assert in_scope(scope, prefix) is inside


# --- the builder


class Shelf:
    """A source of weights for builders."""

    path = "model.gguf"

    def __init__(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        self._weights = {name: weight(*shape, name=name) for name, shape in shapes.items()}

    def find(self, name: str) -> Weight | None:
        return self._weights.get(name)


SHAPES = {"table": (10, 8), "norm": (1, 8), "q": (8, 8), "kv": (4, 8), "bias": (1, 8), "factors": (1, 2)}
ATTENTION = Attention(layer=0, n_heads=2, n_kv_heads=1, head_dim=4, scale=0.5)
ROPE = Rope(n_heads=2, head_dim=4, n_rot=4, base=10000.0, interleaved=True)


def small_graph(b: GraphBuilder) -> Graph:
    """One layer of attention."""
    w = {name: b.weight(name, *shape) for name, shape in SHAPES.items()}
    with b.scope("embed"):
        x = b.op("embed", [], [w["table"]], NONE, 8)
    with b.scope("blk.0"), b.scope("attn"):
        h = b.op("rms_norm", [x], [w["norm"]], RmsNorm(1e-5), 8, part="norm")
        k, v = (b.op("linear", [h], [w["kv"]], NONE, 4, part=part) for part in "kv")
        last = b.op("select", [h], [], NONE, 8, rows="wanted", part="norm")
        q = b.op("linear", [last], [w["q"], w["bias"]], NONE, 8, part="q")
        q = b.op("rope", [q], [w["factors"]], ROPE, 8, part="q")
        a = b.op("attention", [q, k, v], [], ATTENTION, 8, part="score")
    with b.scope("output"):
        logits = b.op("head", [a], [w["table"]], NONE, 10, part="head")
    return b.finish(a, logits)


def test_the_builder_names_scopes_and_rows() -> None:
    graph = small_graph(GraphBuilder(Shelf(SHAPES)))
    assert [(op.kind, op.scope) for op in graph.ops] == [
        ("embed", "embed"),
        ("rms_norm", "blk.0.attn.norm"),
        ("linear", "blk.0.attn.k"),
        ("linear", "blk.0.attn.v"),
        ("select", "blk.0.attn.norm"),
        ("linear", "blk.0.attn.q"),
        ("rope", "blk.0.attn.q"),
        ("attention", "blk.0.attn.score"),
        ("head", "output.head"),
    ]
    rows = [op.out.rows for op in graph.ops]
    assert rows == ["tokens"] * 4 + ["wanted"] * 5
    assert [op.rows for op in graph.ops] == [*["tokens"] * 5, *["wanted"] * 4]
    assert graph.outputs == (graph.ops[-2].out, graph.ops[-1].out)
    assert set(graph.weights()) == set(SHAPES)
    assert len({op.out.name for op in graph.ops}) == len(graph.ops)
    assert kv_shapes(graph) == {0: KvShape(1, 4)}


def test_a_scope_ends_where_an_error_leaves_it() -> None:
    b = GraphBuilder(Shelf(SHAPES))
    with pytest.raises(RuntimeError), b.scope("blk.0"):
        raise RuntimeError
    b.op("embed", [], [b.weight("table", 10, 8)], NONE, 8)
    assert b._ops[0].scope == ""


def test_weights_that_a_file_lacks_or_has_in_another_shape() -> None:
    b = GraphBuilder(Shelf({"q": (8, 4)}))
    assert b.has("q")
    assert not b.has("k")
    with pytest.raises(
        ModelFileError, match=r"^model\.gguf: the tensor k is missing: the file is incomplete$"
    ):
        b.weight("k", 8, 8)
    with pytest.raises(ModelFileError, match=r"the tensor q is 8 x 4, but the settings say 8 x 8; "):
        b.weight("q", 8, 8)


def test_settings_that_make_no_model_are_the_files_fault() -> None:
    b = GraphBuilder(Shelf(SHAPES))
    x = b.op("embed", [], [b.weight("table", 10, 8)], NONE, 8)
    with pytest.raises(ModelFileError, match=r"^model\.gguf: its settings do not make a model: the output"):
        b.finish(x, x)


# --- graphs that are refused


def changed(graph: Graph, index: int, **change: object) -> Graph:
    ops = list(graph.ops)
    ops[index] = replace(ops[index], **change)  # type: ignore[arg-type]
    return replace(graph, ops=tuple(ops))


def without(graph: Graph, index: int) -> Graph:
    return replace(graph, ops=graph.ops[:index] + graph.ops[index + 1 :])


def twice(graph: Graph, index: int, **change: object) -> Graph:
    again: Op = replace(graph.ops[index], **change)  # type: ignore[arg-type]
    return replace(graph, ops=(*graph.ops[: index + 1], again, *graph.ops[index + 1 :]))


EMBED, NORM, K, V, SELECT, Q, ROTATE, SCORE, HEAD = range(9)
ELSEWHERE = Value("elsewhere", 8, "wanted")
WRONG: list[tuple[str, Callable[[Graph], Graph], str]] = [
    ("kind", lambda g: changed(g, NORM, kind="warp"), "op 1 (warp in blk.0.attn.norm) is of no known kind"),
    ("no attributes", lambda g: changed(g, NORM, attrs=NONE), "attributes of type Attrs, not RmsNorm"),
    ("attributes", lambda g: changed(g, K, attrs=RmsNorm(0.1)), "attributes of type RmsNorm, not Attrs"),
    ("inputs", lambda g: changed(g, SCORE, inputs=()), "op 7 (attention in blk.0.attn.score) has 0 inputs"),
    ("weights", lambda g: changed(g, K, weights=()), "has 1 inputs and 0 weights"),
    ("not made", lambda g: without(g, EMBED), "op 0 (rms_norm in blk.0.attn.norm) reads embed.embed.0"),
    ("same name", lambda g: changed(g, V, out=g.ops[K].out), "makes blk.0.attn.k.linear.2 a second time"),
    ("two attentions", lambda g: twice(g, SCORE, out=ELSEWHERE), "is a second attention for layer 0"),
    (
        "a gap between heads",
        lambda g: twice(g, SCORE, out=ELSEWHERE, attrs=replace(ATTENTION, first=2)),
        "begins at KV head 2 of layer 0, not at 1",
    ),
    ("no output", lambda g: without(g, HEAD), "nothing makes the output output.head.head.8"),
    ("hidden", lambda g: replace(g, hidden=g.ops[NORM].out), "has a row for each token"),
    (
        "rows",
        lambda g: changed(g, SELECT, out=replace(ELSEWHERE, rows="tokens")),
        "from tokens to tokens rows",
    ),
    ("k", lambda g: changed(g, SCORE, inputs=(g.ops[Q].out,) * 3), "from wanted, wanted, wanted to wanted"),
    ("embed", lambda g: changed(g, EMBED, out=Value("e", 4, "tokens")), "width of the table is 8, not 4"),
    ("linear", lambda g: changed(g, K, weights=(weight(4, 4),)), "its weight is (4, 4), not (4, 8)"),
    ("bias", lambda g: changed(g, Q, weights=(weight(8, 8), weight(1, 4))), "its bias is (1, 4), not (1, 8)"),
    ("norm", lambda g: changed(g, NORM, weights=(weight(1, 4),)), "its weight is (1, 4), not (1, 8)"),
    ("heads", lambda g: changed(g, ROTATE, attrs=replace(ROPE, n_heads=3)), "its input is 8, not 12"),
    ("odd", lambda g: changed(g, ROTATE, attrs=replace(ROPE, n_rot=3)), "columns that turn is 3, not 2"),
    ("too many", lambda g: changed(g, ROTATE, attrs=replace(ROPE, n_rot=6)), "columns that turn is 6, not 4"),
    ("factors", lambda g: changed(g, ROTATE, weights=(weight(1, 4),)), "its weight is (1, 4), not (1, 2)"),
    (
        "grouping",
        lambda g: changed(g, SCORE, attrs=replace(ATTENTION, n_heads=3, n_kv_heads=2)),
        "number of query heads is 3, not 2",
    ),
    ("kv width", lambda g: changed(g, SCORE, attrs=replace(ATTENTION, n_kv_heads=2)), "its k is 4, not 8"),
]


@pytest.mark.parametrize(("wrong", "said"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_malformed_graph_is_refused(wrong: Callable[[Graph], Graph], said: str) -> None:
    graph = wrong(small_graph(GraphBuilder(Shelf(SHAPES))))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - what it says is compared below
        graph.validate()
    assert said in str(caught.value)
