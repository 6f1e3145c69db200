"""Ops with random tensors: the table that rules and local execution are proven on.

A case is an op called on tensors; ``graph_of`` makes it a one-op graph whose inputs are
themselves results of ops, so that every strategy is offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from op_cases_of_shapes import shape_cases
from op_tensors import below, distinct, f, fixed, labels, mask, positive, single, unit
from torch import Tensor

from autoparallel.passes.ops.torch_ops import resolve
from autoparallel.planner.graph.graph import Graph, Node, Ref, TensorSpec


@dataclass(frozen=True)
class OpCase:
    """``args`` and ``kwargs`` hold tensors where the op takes them, lists of them included.

    Floating tensors that require a gradient are differentiated, others are not.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        tensors = " ".join("x".join(map(str, t.shape)) or "()" for t in self.tensors)
        rest = [a for a in self.args if not isinstance(a, Tensor | list)]
        return f"{self.op.split('.', 1)[1]}[{tensors}]{rest or ''}{dict(self.kwargs) or ''}"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor argument in call order, as a node's ``inputs`` lists them."""
        found: list[Tensor] = []
        _map((self.args, tuple(self.kwargs.values())), found.append)
        return tuple(found)

    def call(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The op's outputs on other tensors."""
        feed = iter(tensors)
        args, kwargs = _map((self.args, dict(self.kwargs)), lambda _: next(feed))
        result = resolve(self.op)(*args, **kwargs)
        return tuple(result) if isinstance(result, tuple | list) else (result,)


def _map(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(_map(item, function) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    return value


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(
        tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad
    )


def graph_of(case: OpCase) -> Graph:
    """``x0, x1, …`` (results of ops) and the node ``op`` that takes them."""
    nodes: list[Node] = []
    for index, tensor in enumerate(case.tensors):
        spec = spec_of(tensor)
        leaf = "parameter" if spec.requires_grad else "input"
        nodes.append(Node(f"leaf{index}", leaf, outputs=(spec,)))  # type: ignore[arg-type]
        nodes.append(
            Node(f"x{index}", "op", "aten.clone.default", (Ref(f"leaf{index}"),), {}, (spec,))
        )
    names = iter(range(len(case.tensors)))
    args, kwargs = _map((case.args, dict(case.kwargs)), lambda _: Ref(f"x{next(names)}"))
    outputs = tuple(spec_of(output) for output in case.call(case.tensors))
    nodes.append(Node("op", "op", case.op, args, kwargs, outputs))
    return Graph(tuple(nodes), Ref("op"), 0)


_GATE = (
    '[["method.chunk", [{"at": 0}, 2], {"dim": -1}], ["operator.getitem", [{"at": 1}, 0], {}], '
    '["operator.getitem", [{"at": 1}, 1], {}], ["functional.silu", [{"at": 2}], {}], '
    '["operator.mul", [{"at": 4}, {"at": 3}], {}]]'
)


def _experts() -> list[OpCase]:
    """Experts of 12 tokens, each to 2 of 6, with and without biases."""
    options = {"activation": _GATE, "num_experts": 6}
    routing = (distinct(6, 12, 2, dim=1), unit(12, 2))
    plain = (f(12, 4), *routing, f(6, 10, 4), f(6, 4, 5))
    biased = (f(12, 4), *routing, f(6, 4, 10), f(6, 5, 4), f(6, 10), f(6, 4))
    return [
        OpCase("autoparallel.experts.default", plain, options),
        OpCase("autoparallel.experts.default", biased, {**options, "transposed": True}),
    ]


def _within_documents() -> list[OpCase]:
    """Attention in sequences of documents: 1, 6 and 5 positions, 12, 4 and 8; ids that repeat."""
    op = "autoparallel.scaled_dot_product_attention.default"
    q, k, v = f(2, 4, 12, 8), f(2, 2, 12, 8), f(2, 2, 12, 4)
    ids = torch.tensor([[[[0] * 1 + [1] * 6 + [2] * 5]], [[[3] * 12]]])
    again = torch.tensor([[[[0] * 4 + [1] * 5 + [0] * 3]]])
    plain = (q, k, v, None, 0.0, True)
    return [
        OpCase(op, plain, {"enable_gqa": True, "documents": ids}),
        OpCase(op, (q, q, f(2, 4, 12, 8), None, 0.0, True), {"documents": ids, "window": 4}),
        OpCase(op, plain, {"enable_gqa": True, "documents": again, "scale": 0.3}),
    ]


def cases(seed: int = 0) -> list[OpCase]:
    """The whole table, with random values and sizes that axes of 2, 3 and 4 ranks divide."""
    torch.manual_seed(seed)
    made = [*_elementwise(), *_products(), *shape_cases(), *_reductions(), *_losses(), *_networks()]
    return [
        *(OpCase(f"aten.{op}", args, kwargs) for op, args, kwargs in map(_normal, made)),
        *_experts(),
        *_within_documents(),
        *_random(),
    ]


def _random() -> list[OpCase]:
    """Counted random ops; their numbers are those of the first step."""
    dropout, uniform = (f"autoparallel.counter_{name}.default" for name in ("dropout", "uniform"))
    return [
        OpCase(dropout, (f(4, 6, 12), 0.3), {"number": 2}),
        OpCase(dropout, (f(12), 0.5), {"number": 0}),
        OpCase(dropout, (f(), 0.5), {"number": 0}),
        OpCase(uniform, (fixed(4, 12),), {"number": 5}),
    ]


def _normal(entry: tuple[Any, ...]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    op, *args = entry
    kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
    return op, tuple(args), kwargs


def _elementwise() -> list[tuple[Any, ...]]:
    x, y, row, scalar = f(4, 12), f(4, 12), f(12), f()
    unary = (
        "relu gelu silu tanh sigmoid exp sin cos neg abs square erf clone leaky_relu elu "
        "softplus hardswish mish"
    )
    roots = "sqrt rsqrt log log1p reciprocal"
    return [
        *((f"{name}.default", x) for name in unary.split()),
        *((f"{name}.default", positive(4, 12)) for name in roots.split()),
        ("contiguous.default", x),
        ("detach.default", x),
        ("alias.default", x),
        ("to.dtype", x, torch.float64),
        ("to.dtype", x, torch.float32),
        ("_to_copy.default", x, {"dtype": torch.float64}),
        ("to.dtype", below(5, 4, 12), torch.float64),
        ("add.Tensor", x, y),
        ("add.Tensor", x, row),
        ("add.Tensor", x, x),
        ("add.Tensor", x, y, {"alpha": 2.5}),
        ("add.Tensor", f(4, 1, 12), f(6, 1)),
        ("add.Tensor", x, 3.0),
        ("add.Scalar", x, 3.0),
        ("add.Tensor", x, scalar),
        ("add.Tensor", x, fixed(4, 12)),
        ("add.Tensor", below(5, 4, 12), below(5, 12)),
        ("sub.Tensor", x, y),
        ("sub.Tensor", x, row),
        ("rsub.Scalar", x, 1.0),
        ("rsub.Tensor", x, y),
        ("mul.Tensor", x, y),
        ("mul.Tensor", x, x),
        ("mul.Tensor", x, row),
        ("mul.Tensor", x, 2.0),
        ("mul.Scalar", x, 2.0),
        ("mul.Tensor", x, fixed(4, 1)),
        ("mul.Tensor", x, mask(4, 12)),
        ("mul.Tensor", x, scalar),
        ("div.Tensor", x, positive(4, 12)),
        ("div.Tensor", x, positive(4, 1)),
        ("div.Tensor", x, 2.0),
        ("div.Scalar", x, 2.0),
        ("div.Tensor_mode", x, positive(4, 12), {"rounding_mode": "floor"}),
        ("pow.Tensor_Scalar", x, 2),
        ("pow.Tensor_Tensor", positive(4, 12), y),
        ("pow.Scalar", 2.0, x),
        ("maximum.default", x, y),
        ("minimum.default", x, row),
        ("max.other", x, y),
        ("clamp.default", x, -0.5, 0.5),
        ("clamp_min.default", x, 0.0),
        ("clamp.Tensor", x, fixed(12), None),
        ("where.self", mask(4, 12), x, y),
        ("where.self", mask(4, 1), x, row),
        ("where.self", mask(4, 12), x, fixed()),
        ("where.ScalarOther", mask(4, 12), x, 0.0),
        ("where.ScalarOther", mask(4, 12), x, 1.0),
        ("masked_fill.Scalar", x, mask(4, 12), 0.0),
        ("masked_fill.Scalar", x, mask(12), -9.0),
        ("masked_fill.Tensor", x, mask(4, 12), fixed()),
        ("addcmul.default", x, y, row),
        ("lerp.Scalar", x, y, 0.3),
        ("lerp.Tensor", x, y, fixed(4, 12)),
        ("addcdiv.default", x, y, positive(4, 12)),
        ("eq.Tensor", below(3, 4, 12), below(3, 4, 12)),
        ("gt.Scalar", x, 0.0),
        ("logical_and.default", mask(4, 12), mask(12)),
        ("bitwise_not.default", mask(4, 12)),
        ("zeros_like.default", x),
        ("ones_like.default", x),
        ("full_like.default", x, 2.0),
        ("dropout.default", x, 0.0, True),
        ("dropout.default", x, 0.5, False),
        ("tril.default", f(4, 6, 6)),
        ("triu.default", f(4, 6, 6), 1),
    ]


def _products() -> list[tuple[Any, ...]]:
    return [
        ("linear.default", f(4, 6, 8), f(12, 8)),
        ("linear.default", f(4, 6, 8), f(12, 8), f(12)),
        ("linear.default", f(4, 8), f(12, 8), f(12)),
        ("linear.default", f(8), f(12, 8), f(12)),
        ("linear.default", f(4, 8), f(12, 8), fixed(12)),
        ("linear.default", fixed(4, 8), f(12, 8)),
        ("matmul.default", f(4, 6, 8), f(8, 12)),
        ("matmul.default", f(4, 6, 8), f(4, 8, 12)),
        ("matmul.default", f(4, 2, 6, 8), f(4, 2, 8, 6)),
        ("matmul.default", f(4, 8), f(8, 12)),
        ("matmul.default", f(4, 1, 6, 8), f(2, 8, 6)),
        ("matmul.default", f(4, 6, 8), f(8)),
        ("matmul.default", f(8), f(4, 8, 6)),
        ("matmul.default", f(8), f(8)),
        ("matmul.default", f(1, 8, 1), fixed(4, 1, 6)),
        ("mm.default", f(4, 8), f(8, 12)),
        ("bmm.default", f(4, 6, 8), f(4, 8, 12)),
        ("mv.default", f(4, 8), f(8)),
        ("dot.default", f(8), f(8)),
        ("outer.default", f(4), f(8)),
        ("addmm.default", f(12), f(4, 8), f(8, 12)),
        ("addmm.default", f(4, 12), f(4, 8), f(8, 12)),
        ("addmm.default", f(4, 12), f(4, 8), f(8, 12), {"beta": 0.5, "alpha": 2.0}),
        ("baddbmm.default", f(4, 6, 12), f(4, 6, 8), f(4, 8, 12)),
        ("einsum.default", "bij,bjk->bik", [f(4, 6, 8), f(4, 8, 12)]),
        ("einsum.default", "bthd,hde->bte", [f(2, 6, 4, 8), f(4, 8, 12)]),
        ("einsum.default", "i,j->ij", [f(4), f(6)]),
        ("einsum.default", "...ij,jk", [f(4, 2, 6, 8), f(8, 12)]),
        ("einsum.default", "...i,b...i->...b", [f(6, 8), f(4, 1, 8)]),
        ("einsum.default", "gsec,gsm->egcm", [f(2, 6, 4, 3), f(2, 6, 8)]),
        ("einsum.default", "egcm,emh->egch", [f(4, 2, 3, 6), f(4, 6, 8)]),
        ("_grouped_mm.default", single(12, 48, 48), single(12, 48, 48)),
        (
            "_grouped_mm.default",
            single(12, 48),
            single(4, 48, 48),
            torch.tensor([3, 3, 8, 12]).int(),
        ),
    ]


def _reductions() -> list[tuple[Any, ...]]:
    x = f(4, 6, 8)
    return [
        ("sum.default", x),
        ("sum.dim_IntList", x, [1]),
        ("sum.dim_IntList", x, [0, -1], True),
        ("mean.default", x),
        ("mean.dim", x, [-1]),
        ("mean.dim", x, [0, 1], True),
        ("mean.dim", x, [-1], True),
        ("mean.dim", x, None),
        ("amax.default", x, [1]),
        ("amin.default", x, [-1], True),
        ("max.dim", x, 1),
        ("max.default", x),
        ("argmax.default", x, -1),
        ("any.dim", mask(4, 6), 1),
        ("all.default", mask(4, 6)),
        ("logsumexp.default", x, [-1]),
        ("var.correction", x, [1]),
        ("std.correction", x, [-1], {"correction": 0, "keepdim": True}),
        ("var_mean.correction", x, [2]),
        ("prod.dim_int", x, 1),
        ("linalg_vector_norm.default", x, 2, [1]),
        ("linalg_vector_norm.default", x),
        ("sum.default", mask(4, 6)),
        ("norm.ScalarOpt_dim", x, 2, [1]),
        ("softmax.int", x, -1),
        ("softmax.int", x, 1),
        ("_softmax.default", x, 0, False),
        ("log_softmax.int", x, -1),
        ("logcumsumexp.default", x, 1),
    ]


def _losses() -> list[tuple[Any, ...]]:
    x, rows, classes = f(12, 8), labels(8, 12), below(8, 12)
    weight = fixed(8).abs() + 0.1
    spatial, spots = f(4, 8, 6), labels(8, 4, 6)
    entropy = "cross_entropy_loss.default"
    log = torch.log_softmax(torch.randn(12, 8, dtype=torch.float64), -1).requires_grad_()
    return [
        (entropy, x, classes),
        (entropy, x, rows),
        (entropy, x, rows, None, 2),
        (entropy, x, rows, None, 0),
        (entropy, x, rows, None, 1, -100, 0.1),
        (entropy, x, rows, None, 2, -100, 0.1),
        (entropy, x, rows, None, 0, -100, 0.1),
        (entropy, x, classes, None, 1, 3),
        (entropy, x, rows, weight),
        (entropy, x, rows, weight, 1, -100, 0.1),
        (entropy, x, rows, weight, 2),
        (entropy, spatial, spots),
        (entropy, spatial, spots, None, 0),
        (entropy, f(8), below(8)),
        (entropy, x, torch.softmax(fixed(12, 8), -1)),
        (entropy, x, torch.softmax(fixed(12, 8), -1), None, 1, -100, 0.1),
        ("nll_loss.default", log, rows),
        ("nll_loss_nd.default", log, rows),
        ("nll_loss_nd.default", log, rows, weight),
        ("nll_loss_nd.default", spatial, spots),
        ("nll_loss_nd.default", log, rows, None, 2),
        ("nll_loss_nd.default", log, rows, None, 0),
        ("mse_loss.default", x, f(12, 8)),
        ("mse_loss.default", x, fixed(12, 8), 2),
        ("mse_loss.default", x, fixed(12, 8), 0),
        ("l1_loss.default", x, fixed(12, 8)),
        ("smooth_l1_loss.default", x, fixed(12, 8)),
        ("huber_loss.default", x, fixed(12, 8)),
        ("binary_cross_entropy.default", unit(12, 8), unit(12, 8).detach()),
        ("binary_cross_entropy_with_logits.default", x, unit(12, 8).detach()),
        ("binary_cross_entropy_with_logits.default", x, unit(12, 8).detach(), None, weight),
        ("kl_div.default", log, unit(12, 8).detach()),
        ("kl_div.default", log, unit(12, 8).detach(), 2),
        ("soft_margin_loss.default", x, fixed(12, 8).sign()),
    ]


def _networks() -> list[tuple[Any, ...]]:
    q, k, v = f(2, 4, 12, 8), f(2, 4, 12, 8), f(2, 4, 12, 8)
    sdpa = "scaled_dot_product_attention.default"
    table = f(12, 8)
    image, kernel = f(4, 6, 8, 8), f(12, 6, 3, 3)
    return [
        (sdpa, q, k, v),
        (sdpa, q, k, v, None, 0.0, True),
        (sdpa, q, k, v, fixed(2, 1, 12, 12)),
        (sdpa, q, k, v, fixed(12, 12)),
        (sdpa, q, k, v, mask(2, 4, 12, 12) | (torch.eye(12) > 0)),
        (sdpa, q, k, v, f(1, 4, 12, 12)),
        (sdpa, q, k, v, None, 0.0, True, {"scale": 0.3}),
        (sdpa, q, f(2, 2, 12, 8), f(2, 2, 12, 8), None, 0.0, True, {"enable_gqa": True}),
        (sdpa, q, f(2, 4, 6, 8), f(2, 4, 6, 8)),
        (sdpa, f(4, 12, 8), f(4, 12, 8), f(4, 12, 8)),
        (sdpa, f(2, 6, 12, 8), f(2, 2, 12, 8), f(2, 2, 12, 8), {"enable_gqa": True}),
        ("embedding.default", table, below(12, 4, 6)),
        ("embedding.default", table, below(12, 4)),
        ("embedding.default", table, below(12, 4, 6), 3),
        ("embedding.default", table, below(12, 4), 11),
        ("layer_norm.default", f(4, 6, 8), [8], f(8), f(8)),
        ("layer_norm.default", f(4, 6, 8), [8]),
        ("layer_norm.default", f(4, 6, 8), [6, 8], f(6, 8), f(6, 8)),
        ("layer_norm.default", f(4, 6, 8), [8], f(8)),
        ("rms_norm.default", f(4, 6, 8), [8], f(8), 1e-6),
        ("rms_norm.default", f(4, 6, 8), [8]),
        ("group_norm.default", image, 2, f(6), f(6)),
        ("group_norm.default", f(4, 12, 4), 6),
        ("batch_norm.default", image, f(6), f(6), None, None, True, 0.1, 1e-5, False),
        (
            "batch_norm.default",
            image,
            f(6),
            f(6),
            fixed(6),
            positive(6).detach(),
            False,
            0.1,
            1e-5,
            False,
        ),
        ("conv2d.default", image, kernel, f(12), [1, 1], [1, 1]),
        ("conv2d.default", image, kernel),
        ("conv2d.padding", image, kernel, f(12), [1, 1], "same"),
        ("conv2d.default", image, f(6, 1, 3, 3), f(6), [1, 1], [1, 1], [1, 1], 6),
        ("conv2d.default", image, f(12, 3, 3, 3), None, [2, 2], [0, 0], [1, 1], 2),
        ("conv2d.default", image, f(12, 2, 3, 3), f(12), [1, 1], [1, 1], [1, 1], 3),
        ("conv2d.default", image, f(12, 1, 3, 3), f(12), [1, 1], [1, 1], [1, 1], 6),
        ("conv1d.default", f(4, 6, 8), f(12, 6, 3), f(12)),
        ("conv1d.default", f(4, 12, 8), f(12, 3, 3), None, [1], [0], [1], 4),
        ("conv_transpose1d.default", f(4, 6, 8), f(6, 12, 3), f(12)),
        ("conv_transpose2d.input", image, f(6, 12, 2, 2), f(12), [2, 2]),
        ("conv_transpose2d.input", image, f(6, 2, 2, 2), f(12), [2, 2], [0, 0], [0, 0], 6),
        ("conv_transpose2d.input", image, f(6, 4, 2, 2), None, [2, 2], [0, 0], [0, 0], 3),
        ("conv_transpose3d.input", f(2, 6, 4, 4, 2), f(6, 4, 2, 2, 2)),
        ("convolution.default", image, kernel, f(12), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        (
            "convolution.default",
            image,
            f(6, 4, 2, 2),
            None,
            [2, 2],
            [0, 0],
            [1, 1],
            True,
            [0, 0],
            2,
        ),
        ("instance_norm.default", image, f(6), f(6), None, None, True, 0.1, 1e-5, False),
        ("group_norm.default", image, 6, f(6), f(6)),
        ("group_norm.default", image, 3),
        ("batch_norm.default", f(12, 6), f(6), f(6), None, None, True, 0.1, 1e-5, False),
        ("batch_norm.default", f(4, 6, 8), None, None, None, None, True, 0.1, 1e-5, False),
        (
            "_native_batch_norm_legit_functional.default",
            image,
            f(6),
            f(6),
            fixed(6),
            positive(6).detach(),
            True,
            0.1,
            1e-5,
        ),
        ("avg_pool1d.default", f(4, 6, 8), [2]),
        ("max_pool1d.default", f(4, 6, 8), [2]),
        ("avg_pool3d.default", f(2, 6, 4, 4, 4), [2, 2, 2]),
        ("max_pool3d.default", f(2, 6, 4, 4, 4), [2, 2, 2]),
        ("adaptive_avg_pool1d.default", f(4, 6, 8), [2]),
        ("adaptive_avg_pool3d.default", f(2, 6, 4, 4, 4), [2, 2, 2]),
        ("adaptive_max_pool2d.default", image, [4, 4]),
        ("upsample_bicubic2d.vec", image, [16, 16], False, None),
        ("_upsample_bilinear2d_aa.vec", image, [4, 4], False, None),
        ("_upsample_nearest_exact2d.vec", image, [16, 16], None),
        ("upsample_linear1d.vec", f(4, 6, 8), [16], False, None),
        ("upsample_trilinear3d.vec", f(2, 6, 4, 4, 4), [8, 8, 8], False, None),
        ("upsample_nearest3d.vec", f(2, 6, 4, 4, 4), None, [2.0, 2.0, 2.0]),
        ("reflection_pad2d.default", image, [1, 1, 2, 2]),
        ("replication_pad2d.default", image, [1, 1, 2, 2]),
        ("pixel_unshuffle.default", image, 2),
        ("grid_sampler.default", image, unit(4, 5, 5, 2).detach(), 0, 0, False),
        ("im2col.default", image, [3, 3], [1, 1], [0, 0], [1, 1]),
        ("col2im.default", f(4, 54, 36), [8, 8], [3, 3], [1, 1], [0, 0], [1, 1]),
        ("conv3d.default", f(4, 2, 4, 4, 4), f(6, 2, 2, 2, 2)),
        ("max_pool2d.default", image, [2, 2]),
        ("avg_pool2d.default", image, [2, 2]),
        ("adaptive_avg_pool2d.default", image, [1, 1]),
        ("max_pool2d_with_indices.default", image, [2, 2]),
        ("upsample_nearest2d.vec", image, [16, 16], None),
        ("pixel_shuffle.default", f(4, 12, 4, 4), 2),
        ("upsample_bilinear2d.vec", image, [16, 16], False, None),
    ]
