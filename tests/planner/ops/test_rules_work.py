"""Work, saved tensors and storages of ops, against counts by hand and against autograd."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from op_cases import OpCase, cases, graph_of, spec_of
from torch.utils._python_dispatch import TorchDispatchMode

from autoparallel.planner.graph.graph import Graph, Node, OpRule, Ref, TensorSpec, map_refs
from autoparallel.planner.ops import (
    kept_extra_bytes,
    saved,
    saved_extra_bytes,
    storage_of,
    work,
)
from autoparallel.planner.ops.storage import copy_of
from autoparallel.target.register_op import register_op, registered_rules

EXACT = (
    "linear mm bmm addmm mul div add sub gelu silu relu sigmoid tanh softmax log_softmax exp rsqrt "
    "sqrt sum mean view reshape transpose cat embedding mse_loss layer_norm pow where neg "
    "index_select max_pool2d conv2d amax topk"
)


def spec(*shape: int, dtype: str = "float32", grad: bool = True) -> TensorSpec:
    return TensorSpec(shape, dtype, grad)


def node(op: str, args: tuple[Any, ...], *outputs: TensorSpec) -> Node:
    return Node("y", "op", f"aten.{op}", args, {}, outputs)


def test_a_product_costs_two_flops_per_multiply_add_and_as_much_per_gradient() -> None:
    linear = node("linear.default", (Ref("x"), Ref("w")), spec(2, 4, 6))
    both = work(linear, (spec(2, 4, 8), spec(6, 8)), linear.outputs)
    assert both.family == "matmul"
    assert both.flops_forward == 2 * 8 * 8 * 6
    assert both.flops_backward == 2 * both.flops_forward
    assert both.bytes_forward == 4 * (64 + 48 + 48)
    assert both.bytes_backward == 2 * both.bytes_forward
    first = work(linear, (spec(2, 4, 8, grad=False), spec(6, 8)), linear.outputs)
    assert first.flops_backward == first.flops_forward


def test_addmm_counts_its_factors_and_not_its_bias() -> None:
    product = node("addmm.default", (Ref("b"), Ref("x"), Ref("w")), spec(4, 6))
    found = work(product, (spec(6), spec(4, 8), spec(8, 6)), product.outputs)
    assert (found.flops_forward, found.flops_backward) == (2 * 4 * 8 * 6, 2 * 2 * 4 * 8 * 6)


def test_attention_costs_two_products_forward_and_five_backward_and_half_when_causal() -> None:
    inputs = (spec(2, 4, 16, 8),) * 3
    args = (Ref("q"), Ref("k"), Ref("v"))
    full = node("scaled_dot_product_attention.default", args, inputs[0])
    found = work(full, inputs, full.outputs)
    assert found.flops_forward == 2 * (2 * 2 * 4 * 16 * 16 * 8)
    assert found.flops_backward == found.flops_forward * 5 // 2
    causal = node("scaled_dot_product_attention.default", (*args, None, 0.0, True), inputs[0])
    assert work(causal, inputs, causal.outputs).flops_forward == found.flops_forward // 2


def test_a_convolution_costs_its_kernel_per_output_element() -> None:
    conv = node("conv2d.default", (Ref("x"), Ref("w")), spec(2, 6, 7, 7))
    found = work(conv, (spec(2, 4, 9, 9), spec(6, 4, 3, 3)), conv.outputs)
    assert found.flops_forward == 2 * (2 * 6 * 7 * 7) * (4 * 3 * 3)


def test_views_and_casts_to_the_same_dtype_are_free() -> None:
    view = node("view.default", (Ref("x"), [8]), spec(8))
    assert work(view, (spec(2, 4),), view.outputs).bytes_forward == 0
    cast = node("to.dtype", (Ref("x"), torch.float32), spec(8))
    assert work(cast, (spec(8),), cast.outputs).bytes_forward == 0
    widening = work(cast, (spec(8, dtype="bfloat16"),), cast.outputs)
    assert widening.bytes_forward == 8 * (2 + 4)


def test_a_slice_is_free_forward_and_fills_its_source_backward() -> None:
    part = node("slice.Tensor", (Ref("x"), 0, 0, 4), spec(4))
    found = work(part, (spec(8),), part.outputs)
    assert (found.bytes_forward, found.bytes_backward) == (0, 4 * (8 + 4))


def test_without_a_gradient_there_is_no_backward_and_nothing_is_saved() -> None:
    mask = node("mul.Tensor", (Ref("x"), Ref("y")), spec(4, grad=False))
    found = work(mask, (spec(4, grad=False),) * 2, mask.outputs)
    assert (found.bytes_backward, found.flops_backward) == (0, 0)
    assert saved(mask) == ()


@pytest.mark.parametrize(
    "case", [case for case in cases() if case.op.split(".")[1] in EXACT.split()], ids=str
)
def test_saved_bytes_are_what_autograd_keeps(case: OpCase) -> None:
    own = tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in case.tensors)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = case.call(own)
    graph = graph_of(case)
    found = graph["op"]
    listed: dict[int, int] = {}
    for ref in saved(found, graph):
        tensor = outputs[ref.index] if ref.name == "op" else own[int(ref.name[1:])]
        storage = tensor.untyped_storage()
        listed[storage.data_ptr()] = storage.nbytes()
    extra = saved_extra_bytes(found, [graph.spec(ref) for ref in found.inputs], found.outputs)
    assert sum(listed.values()) + extra == sum(kept.values())


def _kept_storages(run: Any) -> dict[int, torch.Tensor]:
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept[0] = run()  # so that nothing that is freed has another's address
    del kept[0]
    return kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2])
def test_attention_whose_mask_has_a_gradient_keeps_its_scores(dtype: str, rows: int) -> None:
    """Against autograd: copies of queries, keys and values, and the weights, in float32."""
    made = getattr(torch, dtype)
    q, k, v = (torch.randn(2, 5, 3, 4, dtype=made, requires_grad=True) for _ in range(3))
    mask = torch.randn(rows, 3, 5, 5, dtype=made, requires_grad=True)

    def attend() -> torch.Tensor:
        heads = (each.transpose(1, 2) * 1 for each in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads, mask)

    kept = _kept_storages(attend)
    inputs = (*(spec(2, 3, 5, 4, dtype=dtype),) * 3, spec(rows, 3, 5, 5, dtype=dtype))
    names = [Ref(name) for name in "qkvm"]
    found = node("scaled_dot_product_attention.default", tuple(names), inputs[0])
    leaves = [
        Node(ref.name, "input", "", (), {}, (own,)) for ref, own in zip(names, inputs, strict=True)
    ]
    assert saved(found, Graph((*leaves, found), Ref("y"), 2)) == ()
    own = sum(each.untyped_storage().nbytes() for each in kept.values())
    assert saved_extra_bytes(found, inputs, found.outputs) == own == 4 * (3 * 120 + 2 * 3 * 5 * 5)
    scores = 4 * 150 + (120 * 2 if dtype == "bfloat16" else 0)
    assert kept_extra_bytes(found, inputs, found.outputs) == scores, "and the result in float32"


@pytest.mark.parametrize("contiguous", [True, False])
def test_attention_lays_its_result_out_as_its_queries(contiguous: bool) -> None:
    """As PyTorch's flash attention does: joining the heads copies where heads come first."""
    first = torch.randn(2, 5, 12, requires_grad=True)
    shapes = [("view.default", (2, 5, 3, 4)), ("transpose.int", (2, 3, 5, 4))]
    shapes += [("contiguous.default", (2, 3, 5, 4))] * contiguous
    nodes = [Node("x", "input", "", (), {}, (spec(2, 5, 12),))]
    for path, shape in shapes:
        more: tuple[Any, ...] = {"view": (shape,), "transpose": (1, 2)}.get(path.split(".")[0], ())
        nodes.append(
            Node(
                f"n{len(nodes)}",
                "op",
                f"aten.{path}",
                (Ref(nodes[-1].name), *more),
                {},
                (spec(*shape),),
            )
        )
    heads = Ref(nodes[-1].name)
    nodes += [
        Node(
            "a",
            "op",
            "aten.scaled_dot_product_attention.default",
            (heads,) * 3,
            {},
            (spec(2, 3, 5, 4),),
        ),
        Node("t", "op", "aten.transpose.int", (Ref("a"), 1, 2), {}, (spec(2, 5, 3, 4),)),
        Node("y", "op", "aten.reshape.default", (Ref("t"), (2, 5, 12)), {}, (spec(2, 5, 12),)),
    ]
    own = first.view(2, 5, 3, 4).transpose(1, 2)
    own = own.contiguous() if contiguous else own
    attention = torch.nn.functional.scaled_dot_product_attention(own, own, own)
    joined = attention.transpose(1, 2).reshape(2, 5, 12)
    is_view = joined.untyped_storage().data_ptr() == attention.untyped_storage().data_ptr()
    owners = storage_of(Graph(tuple(nodes), Ref("y"), 2))
    assert (owners["y", 0] == ("a", 0)) == is_view == (not contiguous)


@pytest.mark.parametrize(
    ("op", "left", "right", "turned"),
    [
        ("linear", (2, 5, 4), (6, 4), False),
        ("linear", (2, 4, 5), (6, 4), True),
        ("linear", (1, 4, 5), (6, 4), True),
        ("matmul", (2, 5, 4), (2, 4, 6), False),
        ("matmul", (2, 3, 5, 4), (2, 3, 4, 6), False),
        ("matmul", (2, 5, 3, 4), (2, 3, 4, 6), True),
    ],
)
def test_a_product_copies_what_it_cannot_read_as_rows(
    op: str, left: tuple[int, ...], right: tuple[int, ...], turned: bool
) -> None:
    """Against autograd: what it keeps of its first factor is that one's memory, or its own."""
    dims = (1, 2)
    data = torch.randn(left, requires_grad=True) * 1
    other = torch.randn(right, requires_grad=True)
    used = data.transpose(*dims) if turned else data
    run = torch.nn.functional.linear if op == "linear" else torch.matmul
    kept = _kept_storages(lambda: run(used, other))
    nodes = [
        Node("x", "input", "", (), {}, (spec(*left),)),
        Node("w", "input", "", (), {}, (spec(*right),)),
        Node("d", "op", "aten.mul.Scalar", (Ref("x"), 1), {}, (spec(*left),)),
    ]
    if turned:
        nodes.append(
            Node("t", "op", "aten.transpose.int", (Ref("d"), *dims), {}, (spec(*used.shape),))
        )
    made = run(used, other).shape
    product = node(f"{op}.default", (Ref(nodes[-1].name if turned else "d"), Ref("w")), spec(*made))
    owners = storage_of(Graph((*nodes, product), Ref("y"), 2))
    assert (copy_of("y", 0) in owners) == (data.untyped_storage().data_ptr() not in kept)


def _keeps_a_mask(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0] > 0)


def _masked(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * ctx.saved_tensors[0]


def test_a_registered_op_keeps_what_it_says_instead_of_its_inputs() -> None:
    path = "autoparallel_user.masked_positive.default"
    marked = register_op(
        "* => *",
        name="masked_positive",
        backward=_masked,
        setup_context=_keeps_a_mask,
        saved_bytes=prod,
    )(positive)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        marked(torch.randn(3, 5, requires_grad=True))
    made = spec(3, 5)
    stated = Node("y", "op", path, (Ref("x"),), {}, (made,), rule=registered_rules()[path])
    assert saved(stated) == ()
    assert saved_extra_bytes(stated, (made,), (made,)) == sum(each.nbytes for each in kept) == 15
    silent = replace(stated, rule=OpRule("* => *"))
    assert saved(silent) == (Ref("x"),)
    assert saved_extra_bytes(silent, (made,), (made,)) == 0


def positive(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x)


def run(steps: list[tuple[str, str, tuple[Any, ...]]]) -> tuple[Graph, dict[tuple[str, int], Any]]:
    """Steps run for real, from ``x`` (2, 6, 24): their graph and their tensors."""
    values: dict[tuple[str, int], Any] = {("x", 0): torch.randn(2, 6, 24)}
    nodes = [Node("x", "input", outputs=(spec_of(values["x", 0]),))]
    for name, op, args in steps:
        packet, overload = op.split(".")
        target = getattr(getattr(torch.ops.aten, packet), overload)
        result = target(*map_refs(args, lambda ref: values[ref.name, ref.index]))
        outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
        values.update({(name, i): output for i, output in enumerate(outputs)})
        specs = tuple(spec_of(output) for output in outputs)
        nodes.append(Node(name, "op", f"aten.{op}", args, {}, specs))
    return Graph(tuple(nodes), Ref("x"), 2), values


def test_storages_of_an_attention_block_are_those_of_the_real_tensors() -> None:
    graph, values = run(
        [
            ("split", "split.Tensor", (Ref("x"), 8, 2)),
            ("q", "view.default", (Ref("split", 0), [2, 6, 2, 4])),
            ("k", "reshape.default", (Ref("split", 1), [2, 6, 2, 4])),
            ("v", "reshape.default", (Ref("split", 2), [2, 6, 2, 4])),
            ("qt", "transpose.int", (Ref("q"), 1, 2)),
            ("kt", "transpose.int", (Ref("k"), 1, 2)),
            ("vt", "permute.default", (Ref("v"), [0, 2, 1, 3])),
            ("neg", "neg.default", (Ref("qt"),)),
            ("negt", "transpose.int", (Ref("neg"), 1, 2)),
            ("flat", "reshape.default", (Ref("negt"), [2, 6, 8])),
            ("attn", "scaled_dot_product_attention.default", (Ref("qt"), Ref("kt"), Ref("vt"))),
            ("back", "transpose.int", (Ref("attn"), 1, 2)),
            ("whole", "contiguous.default", (Ref("back"),)),
            ("merged", "reshape.default", (Ref("whole"), [2, 6, 8])),
            ("copy", "contiguous.default", (Ref("qt"),)),
            ("moved", "reshape.default", (Ref("kt"), [2, 2, 24])),
            ("wide", "unsqueeze.default", (Ref("kt"), 2)),
            ("grown", "expand.default", (Ref("wide"), [2, 2, 3, 6, 4])),
            ("heads", "reshape.default", (Ref("grown"), [2, 6, 6, 4])),
            ("row", "select.int", (Ref("x"), 1, 0)),
            ("every", "slice.Tensor", (Ref("x"), 1, 0, 6, 2)),
            ("same", "to.dtype", (Ref("every"), torch.float32)),
            ("half", "to.dtype", (Ref("every"), torch.float16)),
            ("kept", "dropout.default", (Ref("same"), 0.0, True)),
            ("parts", "unbind.int", (Ref("kept"), 0)),
            ("tail", "squeeze.default", (Ref("parts", 1),)),
            ("sum", "add.Tensor", (Ref("tail"), Ref("tail"))),
        ]
    )
    owners = storage_of(graph)
    owner_of = {}
    for key, tensor in values.items():
        owner_of.setdefault(tensor.untyped_storage().data_ptr(), key)
    real = {key: owner_of[tensor.untyped_storage().data_ptr()] for key, tensor in values.items()}
    assert dict(owners) == real


class ProductsRun(TorchDispatchMode):
    """Records (batch, m, n, k) of each matrix product that PyTorch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, int, int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        factors = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "mv": 0, "addmv": 1, "dot": 0}
        name = func._schema.name.removeprefix("aten::")
        if name in factors:
            first, second = (args[factors[name] + at].shape for at in (0, 1))
            batch = first[0] if len(first) == 3 else 1
            m = first[-2] if len(first) > 1 else 1
            self.found.append((batch, m, second[-1] if len(second) > 1 else 1, first[-1]))
        return func(*args, **(kwargs or {}))


def either_way(products: Any) -> list[tuple[int, int, int, int]]:
    """Sorted, each as itself or transposed: PyTorch may compute (a b) as (bᵀ aᵀ)ᵀ."""
    return sorted((batch, min(m, n), max(m, n), k) for batch, m, n, k in products)


PRODUCTS: list[tuple[str, tuple[Any, ...], list[tuple[int, ...]], int]] = [
    ("linear.default", (Ref("a"), Ref("b")), [(2, 5, 8), (6, 8)], 0),
    ("linear.default", (Ref("a"), Ref("b"), Ref("c")), [(2, 5, 8), (6, 8), (6,)], 0),
    ("mm.default", (Ref("a"), Ref("b")), [(5, 8), (8, 6)], 0),
    ("bmm.default", (Ref("a"), Ref("b")), [(3, 5, 8), (3, 8, 6)], 0),
    ("addmm.default", (Ref("c"), Ref("a"), Ref("b")), [(6,), (5, 8), (8, 6)], 1),
    ("baddbmm.default", (Ref("c"), Ref("a"), Ref("b")), [(3, 5, 6), (3, 5, 8), (3, 8, 6)], 1),
    ("matmul.default", (Ref("a"), Ref("b")), [(2, 3, 5, 8), (2, 3, 8, 6)], 0),
    ("matmul.default", (Ref("a"), Ref("b")), [(2, 5, 8), (8, 6)], 0),
    (
        "einsum.default",
        ("bqhd,bkhd->bhqk", [Ref("a"), Ref("b")]),
        [(2, 5, 3, 8), (2, 6, 3, 8)],
        0,
    ),
]


@pytest.mark.parametrize(
    ("op", "args", "shapes", "first"),
    PRODUCTS,
    ids=[f"{case[0]}-{len(case[2])}" for case in PRODUCTS],
)
@pytest.mark.parametrize("frozen", [None, 0, 1], ids=["both", "first frozen", "second frozen"])
def test_products_are_those_that_pytorch_runs(
    op: str,
    args: tuple[Any, ...],
    shapes: list[tuple[int, ...]],
    first: int,
    frozen: int | None,
) -> None:
    trained = [at != (None if frozen is None else first + frozen) for at in range(len(shapes))]
    tensors = [
        torch.randn(shape).requires_grad_(own) for shape, own in zip(shapes, trained, strict=True)
    ]
    waiting = iter(tensors)
    packet, overload = op.split(".")
    call = map_refs(args, lambda _: next(waiting))
    with ProductsRun() as forward:
        out = getattr(getattr(torch.ops.aten, packet), overload)(*call)
    with ProductsRun() as backward:
        out.backward(torch.ones_like(out))
    specs = [spec(*shape, grad=own) for shape, own in zip(shapes, trained, strict=True)]
    found = work(node(op, args, spec(*out.shape)), specs, (spec(*out.shape),))
    assert either_way(found.products_forward) == either_way(forward.found)
    assert either_way(found.products_backward) == either_way(backward.found)
    assert found.flops_forward == sum(2 * b * m * n * k for b, m, n, k in found.products_forward)
    assert found.flops_backward == sum(2 * b * m * n * k for b, m, n, k in found.products_backward)


def test_attention_names_its_heads_queries_keys_and_head_size() -> None:
    query, key = spec(2, 4, 16, 8), spec(2, 4, 32, 8)
    attention = node("scaled_dot_product_attention.default", (Ref("q"), Ref("k"), Ref("v")), query)
    found = work(attention, (query, key, key), attention.outputs)
    assert found.products_forward == found.products_backward == ((8, 16, 32, 8),)


def test_kernels_are_counted_per_gradient_and_none_for_a_view() -> None:
    """A biased linear has three gradients; a norm's parameters come together; a view has none."""
    linear = node("linear.default", (Ref("x"), Ref("w"), Ref("b")), spec(4, 6))
    found = work(linear, (spec(4, 8), spec(6, 8), spec(6)), linear.outputs)
    assert (found.kernels_forward, found.kernels_backward) == (1, 3)
    norm = node("layer_norm.default", (Ref("x"), [8], Ref("w"), Ref("b")), spec(4, 8))
    found = work(norm, (spec(4, 8), spec(8), spec(8)), norm.outputs)
    assert (found.kernels_forward, found.kernels_backward) == (1, 2)
    view = node("view.default", (Ref("x"), [32]), spec(32))
    found = work(view, (spec(4, 8),), view.outputs)
    assert (found.kernels_forward, found.kernels_backward) == (0, 0)
