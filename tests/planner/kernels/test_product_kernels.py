"""Kernels over products: work and kept memory as of fused attention, shares of masks by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.ops.compute import work_seconds
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.choices import input_specs
from autoparallel.planner.costs.prices import Prices
from autoparallel.planner.graph.graph import Block, Blocks, Graph, Node, Ref, TensorSpec
from autoparallel.planner.graph.layout import INVARIANT, Mesh, NodeLayout
from autoparallel.planner.kernels.fusion import with_fusion
from autoparallel.planner.kernels.mask_share import Masks
from autoparallel.planner.kernels.product_kernels import by_masks, with_product_kernels
from autoparallel.planner.kernels.recompute import find_replay
from autoparallel.planner.ops.work import Work

BATCH, HEADS, GROUPS, LENGTH, SIZE = 2, 8, 2, 64, 16
QUERY, KEY = (BATCH, HEADS, LENGTH, SIZE), (BATCH, GROUPS, LENGTH, SIZE)
SCORES = (BATCH, HEADS, LENGTH, LENGTH)
LEAST = -3.4e38


def spec(*shape: int, dtype: str = "bfloat16", grad: bool = True) -> TensorSpec:
    return TensorSpec(shape, dtype, requires_grad=grad)


def node(name: str, target: str, *args: Any, shape: tuple[int, ...] = SCORES) -> Node:
    return Node(name, "op", f"aten.{target}", args, outputs=(spec(*shape),))


def made(name: str, target: str, *args: Any, shape: tuple[int, ...], dtype: str = "bool") -> Node:
    """A constant."""
    outputs = (spec(*shape, dtype=dtype, grad=False),)
    return Node(name, "constant", f"aten.{target}", args, outputs=outputs)


def leaf(name: str, *shape: int, kind: Any = "input") -> Node:
    return Node(name, kind, outputs=(spec(*shape),))


def graph_of(*nodes: Node) -> tuple[Graph, Blocks]:
    """A graph of one block whose loss is its last node."""
    names = tuple(each.name for each in nodes if each.kind == "op")
    return Graph(nodes, Ref(nodes[-1].name), BATCH), Blocks((Block("b", "b", names, ()),))


def fused(*nodes: Node) -> tuple[Graph, Blocks]:
    graph, blocks = graph_of(*nodes)
    return with_fusion(with_product_kernels(graph, blocks), blocks), blocks


def total(graph: Graph, blocks: Blocks) -> dict[str, int]:
    """FLOPs, bytes, kernels, and bytes kept, of a block."""
    works: list[Work] = []
    kept: dict[Ref, int] = {}
    extra = 0
    for name in blocks.blocks[0].nodes:
        each = graph[name]
        works.append(rules.work(each, input_specs(each, graph), each.outputs))
        kept |= {ref: graph.spec(ref).num_bytes for ref in rules.saved(each, graph)}
        extra += rules.saved_extra_bytes(each, input_specs(each, graph), each.outputs)
    return {
        "flops forward": sum(work.flops_forward for work in works),
        "flops backward": sum(work.flops_backward for work in works),
        "bytes forward": sum(work.bytes_forward for work in works),
        "bytes backward": sum(work.bytes_backward for work in works),
        "kernels forward": sum(work.kernels_forward for work in works),
        "kernels backward": sum(work.kernels_backward for work in works),
        "kept": sum(kept.values()) + extra,
    }


def positions(dims: tuple[str, str] = ("rows", "columns"), length: int = LENGTH) -> list[Node]:
    rows, columns = dims
    line = {"shape": (length,), "dtype": "int64"}
    return [
        made("places", "arange.default", length, **line),
        made(rows, "unsqueeze.default", Ref("places"), 1, shape=(length, 1), dtype="int64"),
        made(columns, "unsqueeze.default", Ref("places"), 0, shape=(1, length), dtype="int64"),
    ]


def causal(length: int = LENGTH) -> list[Node]:
    """Zero where a position is not later, else the least number."""
    square = (length, length)
    return [
        *positions(length=length),
        made("le", "le.Tensor", Ref("columns"), Ref("rows"), shape=square),
        made("zero", "zeros.default", [], shape=(), dtype="bfloat16"),
        made(
            "mask",
            "where.ScalarOther",
            Ref("le"),
            Ref("zero"),
            LEAST,
            shape=square,
            dtype="bfloat16",
        ),
    ]


def window(width: int, length: int = LENGTH) -> list[Node]:
    """The same of a window: a position sees itself and the ``width - 1`` before it."""
    square, rows = (length, length), {"shape": (length, 1), "dtype": "int64"}
    return [
        *positions(length=length),
        made("first", "sub.Tensor", Ref("rows"), width, **rows),
        made("gt", "gt.Tensor", Ref("columns"), Ref("first"), shape=square),
        made("one", "full.default", [], 1, shape=()),
        made("and", "__and__.Tensor", Ref("one"), Ref("gt"), shape=square),
        made("le", "le.Tensor", Ref("columns"), Ref("rows"), shape=square),
        made("both", "__and__.Tensor", Ref("and"), Ref("le"), shape=square),
        made("wide", "expand.default", Ref("both"), [BATCH, 1, *square], shape=(BATCH, 1, *square)),
        made("zero", "zeros.default", [], shape=(), dtype="bfloat16"),
        made(
            "every",
            "where.ScalarOther",
            Ref("wide"),
            Ref("zero"),
            LEAST,
            shape=(BATCH, 1, *square),
            dtype="bfloat16",
        ),
        made(
            "mask", "slice.Tensor", Ref("every"), 0, 0, 1, shape=(1, 1, *square), dtype="bfloat16"
        ),
    ]


def repeated(name: str) -> list[Node]:
    """Heads of keys or values, each for as many heads of queries."""
    more, times = (BATCH, GROUPS, 1, LENGTH, SIZE), HEADS // GROUPS
    wide = (BATCH, GROUPS, times, LENGTH, SIZE)
    return [
        node(f"{name}_one", "unsqueeze.default", Ref(name), 2, shape=more),
        node(f"{name}_wide", "expand.default", Ref(f"{name}_one"), list(wide), shape=wide),
        node(f"{name}_all", "reshape.default", Ref(f"{name}_wide"), list(QUERY), shape=QUERY),
    ]


SWAPPED = (BATCH, HEADS, SIZE, LENGTH)


def written(mask: list[Node], keys: tuple[int, ...] = QUERY) -> list[Node]:
    """softmax(q·kᵀ·scale + mask)·v."""
    is_grouped = keys != QUERY
    own = "_all" if is_grouped else ""
    return [
        *(leaf("q", *QUERY), leaf("k", *keys), leaf("v", *keys), *mask),
        *(repeated("k") + repeated("v") if is_grouped else []),
        node("swapped", "transpose.int", Ref(f"k{own}"), 2, 3, shape=SWAPPED),
        node("scores", "matmul.default", Ref("q"), Ref("swapped")),
        node("scaled", "mul.Tensor", Ref("scores"), 0.25),
        *([node("masked", "add.Tensor", Ref("scaled"), Ref("mask"))] if mask else []),
        node("softmax", "softmax.int", Ref("masked" if mask else "scaled"), -1),
        node("dropout", "dropout.default", Ref("softmax"), 0.0, True),
        node("out", "matmul.default", Ref("dropout"), Ref(f"v{own}"), shape=QUERY),
    ]


def one_op(*, is_causal: bool, keys: tuple[int, ...] = QUERY) -> tuple[Graph, Blocks]:
    args = (Ref("q"), Ref("k"), Ref("v"), None, 0.0, is_causal)
    attention = node("out", "scaled_dot_product_attention.default", *args, shape=QUERY)
    return graph_of(leaf("q", *QUERY), leaf("k", *keys), leaf("v", *keys), attention)


def test_written_attention_costs_what_attention_as_one_op_does() -> None:
    """Five products backward for two; q, k, v, the output and a float per row are kept."""
    assert total(*fused(*written([]))) == total(*one_op(is_causal=False))


def test_causal_attention_counts_the_positions_that_are_seen() -> None:
    """Of s positions a row sees (s + 1) / 2 on average: 1 / s more than half."""
    own, other = total(*fused(*written(causal()))), total(*one_op(is_causal=True))
    for name in ("flops forward", "flops backward"):
        assert own.pop(name) == pytest.approx(other.pop(name) * (1 + 1 / LENGTH), rel=1e-6)
    assert own == other


def test_keys_that_are_repeated_are_read_once_for_each_group() -> None:
    """Its work and memory are those of attention as one op over keys that are not repeated."""
    own = total(*fused(*written([], keys=KEY)))
    other = total(*one_op(is_causal=False, keys=KEY))
    assert own == other


def test_without_kernels_over_products_nothing_else_changes() -> None:
    graph, blocks = graph_of(*written(causal()))
    plain = with_fusion(graph, blocks)
    assert plain["scores"].fused is None
    assert plain["out"].fused is None


@pytest.mark.parametrize("width", [1, 16, LENGTH])
def test_a_window_shows_its_exact_share(width: int) -> None:
    """The first w - 1 rows see 1 to w - 1 positions, the others w: w(w - 1)/2 + w(s - w + 1)."""
    graph, _ = graph_of(*written(window(width)))
    seen = width * (width - 1) / 2 + width * (LENGTH - width + 1)
    assert Masks(graph).seen_share(["masked"]) == seen / LENGTH**2


def test_blocks_whose_masks_show_different_shares_are_of_different_kinds() -> None:
    """As in models whose layers have windows in turn; what is pinned apart stays apart."""
    nodes = {}
    for which, mask in (("wide", causal()), ("near", window(8)), ("far", causal())):
        graph, _ = fused(*written(mask))
        nodes[which] = [replace(each, name=f"{which}.{each.name}") for each in graph.nodes]
    joined = Graph(tuple(each for own in nodes.values() for each in own), Ref("far.out"), BATCH)
    layers = [
        Block(which, "layers", tuple(each.name for each in own if each.kind == "op"), ())
        for which, own in nodes.items()
    ]
    found = by_masks(joined, Blocks((*layers, replace(layers[1], kind="layers@1"))))
    assert [block.kind for block in found.blocks] == ["layers", "layers@2", "layers", "layers@1"]


def test_filled_scores_and_chosen_ones_are_masked_too() -> None:
    square = (LENGTH, LENGTH)
    graph, _ = graph_of(
        leaf("x", *SCORES),
        made("ones", "ones.default", list(square), shape=square),
        made("lower", "tril.default", Ref("ones"), shape=square),
        made("upper", "bitwise_not.default", Ref("lower"), shape=square),
        node("filled", "masked_fill.Scalar", Ref("x"), Ref("upper"), float("-inf")),
        node("chosen", "where.ScalarOther", Ref("lower"), Ref("x"), -1e9),
        node("zeroed", "masked_fill.Scalar", Ref("x"), Ref("upper"), 0.0),
    )
    half = (LENGTH + 1) / 2 / LENGTH
    assert Masks(graph).seen_share(["filled"]) == Masks(graph).seen_share(["chosen"]) == half
    assert Masks(graph).seen_share(["zeroed"]) == 1.0


def test_a_mask_of_the_batch_shows_what_its_constant_part_does() -> None:
    square = (LENGTH, LENGTH)
    graph, _ = graph_of(
        *(leaf("x", *SCORES), leaf("padding", BATCH, 1, 1, LENGTH), *causal()),
        node("both", "__and__.Tensor", Ref("le"), Ref("padding"), shape=(BATCH, 1, *square)),
        node("chosen", "where.ScalarOther", Ref("both"), Ref("x"), LEAST),
    )
    assert Masks(graph).seen_share(["chosen"]) == (LENGTH + 1) / 2 / LENGTH


def with_sinks() -> list[Node]:
    """GPT-OSS: a column of sinks before the softmax, less the maximum, and cut off after it."""
    more = (BATCH, HEADS, LENGTH, LENGTH + 1)
    start = [each for each in written(causal()) if each.name not in ("softmax", "dropout", "out")]
    column = (BATCH, HEADS, LENGTH, 1)
    return [
        *(leaf("sinks", HEADS, kind="parameter"), *start),
        node("sink", "reshape.default", Ref("sinks"), [1, HEADS, 1, 1], shape=(1, HEADS, 1, 1)),
        node("column", "expand.default", Ref("sink"), list(column), shape=column),
        node("joined", "cat.default", [Ref("masked"), Ref("column")], -1, shape=more),
        node("largest", "amax.default", Ref("joined"), [-1], True, shape=column),
        node("less", "sub.Tensor", Ref("joined"), Ref("largest"), shape=more),
        node("softmax", "softmax.int", Ref("less"), -1, shape=more),
        node("cut", "slice.Tensor", Ref("softmax"), 3, 0, -1),
        node("out", "matmul.default", Ref("cut"), Ref("v"), shape=QUERY),
    ]


def test_sinks_cost_no_more_than_their_parameters() -> None:
    own, plain = total(*fused(*with_sinks())), total(*fused(*written(causal())))
    sinks = HEADS * 2
    assert own.pop("bytes forward") == plain.pop("bytes forward") + sinks
    assert own.pop("bytes backward") == plain.pop("bytes backward") + 2 * sinks
    assert own.pop("kept") == plain.pop("kept") + sinks
    assert own == plain


def test_scores_that_are_read_elsewhere_are_not_fused() -> None:
    read = node("read", "mean.default", Ref("softmax"), shape=())
    outside = node("outside", "sort.default", Ref("softmax"))
    graph, _ = fused(*written([]), outside)
    assert graph["scores"].fused is None
    assert graph["out"].fused is None
    graph, _ = fused(*written([]), read)
    assert graph["scores"].fused is None
    assert graph["out"].fused is None


def test_a_layer_between_parameters_is_no_kernel() -> None:
    """Up and down by weights: each product has an operand made of parameters alone."""
    wide = (BATCH, LENGTH, 4 * SIZE)
    graph, _ = fused(
        leaf("x", BATCH, LENGTH, SIZE),
        leaf("up", SIZE, 4 * SIZE, kind="parameter"),
        leaf("down", 4 * SIZE, SIZE, kind="parameter"),
        node("wide", "matmul.default", Ref("x"), Ref("up"), shape=wide),
        node("relu", "relu.default", Ref("wide"), shape=wide),
        node("out", "matmul.default", Ref("relu"), Ref("down"), shape=(BATCH, LENGTH, SIZE)),
    )
    assert graph["wide"].fused is None
    assert graph["out"].fused is None


def test_selective_recomputation_keeps_no_scores() -> None:
    """It keeps the output, and runs neither product again."""
    graph, blocks = fused(*written(causal()))
    found = find_replay(blocks.blocks[0], graph, rules, rules.storage_of(graph))
    assert found.kept["selective"] <= {"out"}
    assert "scores" in found.skipped["selective"]


CHUNKS, ROWS, STATE = 4, 32, 32
"""Chunks of so many rows; the size of a state. A scan has ``HEADS`` heads of ``SIZE``."""


def scan() -> list[Node]:
    """Mamba-2 within chunks: (C·Bᵀ times exp of sums of decays)·x, with B and C of few groups."""
    few, many = (BATCH, CHUNKS, ROWS, GROUPS, STATE), (BATCH, CHUNKS, ROWS, HEADS, STATE)
    rows = (BATCH, HEADS, CHUNKS, ROWS)
    pairs, moved = (*rows, ROWS), (BATCH, CHUNKS, ROWS, ROWS, HEADS)
    values = (BATCH, CHUNKS, ROWS, HEADS, SIZE)
    repeat = (HEADS // GROUPS, 3)
    return [
        *(leaf("b", *few), leaf("c", *few), leaf("x", *values), leaf("a", *rows)),
        made("lower", "ones.default", [ROWS, ROWS], shape=(ROWS, ROWS)),
        node("b_all", "repeat_interleave.self_int", Ref("b"), *repeat, shape=many),
        node("c_all", "repeat_interleave.self_int", Ref("c"), *repeat, shape=many),
        node("one", "unsqueeze.default", Ref("a"), 4, shape=(*rows, 1)),
        node("wide", "expand.default", Ref("one"), list(pairs), shape=pairs),
        node("filled", "masked_fill.Scalar", Ref("wide"), Ref("lower"), 0, shape=pairs),
        node("sums", "cumsum.default", Ref("filled"), -2, shape=pairs),
        node("decay", "exp.default", Ref("sums"), shape=pairs),
        node(
            "both",
            "einsum.default",
            "bclhn,bcshn->bclsh",
            [Ref("c_all"), Ref("b_all")],
            shape=moved,
        ),
        node("placed", "permute.default", Ref("decay"), [0, 2, 3, 4, 1], shape=moved),
        node("weights", "mul.Tensor", Ref("both"), Ref("placed"), shape=moved),
        node(
            "out", "einsum.default", "bclsh,bcshp->bclhp", [Ref("weights"), Ref("x")], shape=values
        ),
    ]


def test_a_scan_reads_its_inputs_and_writes_its_output() -> None:
    """Forward: b, c, x and a are read, the output is written. Backward: those, the output and its
    gradient are read, and four gradients written. The first product is computed three times, for
    each group of heads once."""
    graph, blocks = fused(*scan())
    own = total(graph, blocks)
    inputs = sum(graph[name].spec.num_bytes for name in "bcxa")
    output = graph["out"].spec.num_bytes
    assert own["bytes forward"] == inputs + output
    assert own["bytes backward"] == 2 * inputs + 2 * output
    assert own["kept"] == inputs + output
    assert (own["kernels forward"], own["kernels backward"]) == (1, 1)
    first = rules.work(graph["both"], input_specs(graph["both"], graph), graph["both"].outputs)
    product = 2 * BATCH * CHUNKS * ROWS * ROWS * GROUPS * STATE
    assert (first.flops_forward, first.flops_backward) == (product, 3 * product)
    assert first.family == "matmul"


@pytest.mark.parametrize(("stored", "expected"), [("bfloat16", "bfloat16"), ("float32", "float32")])
def test_a_scan_multiplies_in_the_format_of_the_values_that_are_cast_for_it(
    stored: str, expected: str
) -> None:
    nodes: list[Node] = []
    for each in scan():
        if each.name in "bcxa":
            shape = each.spec.shape
            given = replace(each, name=f"{each.name}_given", outputs=(spec(*shape, dtype=stored),))
            cast = node(each.name, "to.dtype", Ref(given.name), "float32", shape=shape)
            nodes += [given, replace(cast, outputs=(spec(*shape, dtype="float32"),))]
        else:
            kinds = [replace(own, dtype="float32") for own in each.outputs]
            nodes.append(each if each.kind == "constant" else replace(each, outputs=tuple(kinds)))
    graph, _ = fused(*nodes)
    formats = {
        name: graph[name].fused.product_dtype  # type: ignore[union-attr]
        for name in ("both", "weights", "out")
    }
    assert formats == {"both": expected, "weights": "", "out": expected}
    cluster, both = parse_cluster("1xH100"), graph["both"]
    prices = Prices(Mesh(("dp",), (1,)), cluster, (0,), "bf16", "adamw", rules)
    specs = input_specs(both, graph)
    forward, _ = prices.compute(both, specs, NodeLayout(((INVARIANT,),) * 2, ((INVARIANT,),)))
    work, device = rules.work(both, specs, both.outputs), cluster.hosts[0].device
    priced = {name: work_seconds(device, work, name)[0] for name in ("bfloat16", "float32")}
    assert priced["bfloat16"] < priced["float32"]
    assert forward == priced[expected]


def test_states_that_pass_between_chunks_are_weighted_in_one_kernel() -> None:
    """A chunk's new state is a sum of all states. Their weights are computed in the kernel."""
    states, decays = (BATCH, CHUNKS, HEADS, SIZE, STATE), (BATCH, CHUNKS, CHUNKS, HEADS)
    graph, blocks = fused(
        leaf("s", *states),
        leaf("a", BATCH, CHUNKS, HEADS),
        node("one", "unsqueeze.default", Ref("a"), 1, shape=(BATCH, 1, CHUNKS, HEADS)),
        node("wide", "expand.default", Ref("one"), list(decays), shape=decays),
        node("sums", "cumsum.default", Ref("wide"), 1, shape=decays),
        node("decay", "exp.default", Ref("sums"), shape=decays),
        node("out", "einsum.default", "bzch,bchpn->bzhpn", [Ref("decay"), Ref("s")], shape=states),
    )
    own = total(graph, blocks)
    inputs, output = (sum(graph[n].spec.num_bytes for n in names) for names in ("sa", ["out"]))
    assert own["bytes forward"] == inputs + output
    assert own["kernels forward"] == 1


def test_heads_that_two_products_repeat_are_read_by_each() -> None:
    """C·state of each chunk too: c is read by both kernels, and repeated in memory by neither."""
    states, values = (BATCH, CHUNKS, HEADS, SIZE, STATE), (BATCH, CHUNKS, ROWS, HEADS, SIZE)
    graph, blocks = fused(
        leaf("s", *states),
        *scan(),
        node(
            "from_state",
            "einsum.default",
            "bclhn,bchpn->bclhp",
            [Ref("c_all"), Ref("s")],
            shape=values,
        ),
        node("sum", "add.Tensor", Ref("out"), Ref("from_state"), shape=values),
    )
    inputs = sum(graph[name].spec.num_bytes for name in "bcxas")
    c, value = graph["c"].spec.num_bytes, graph["out"].spec.num_bytes
    own = total(graph, blocks)
    assert own["bytes forward"] == inputs + c + 5 * value
    assert own["kernels forward"] == 3
