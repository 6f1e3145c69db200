"""Records of matrix products, convolutions and layers of experts.

Products of M×K by K×N take 2MNK FLOPs in the forward, a multiply-add counted as two, and 2MNK in
the backward for each factor with a gradient. (batch, m, n, k) stands for m×k by k×n, as
``cost_model.ops.products`` prices it: for each factor with a gradient the backward has a product of
the same three sizes, m×n by n×k or k×m by m×n. An einsum of three operands has none, nor have
products whose rows are assigned at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from ..graph.graph import Node
from .annotation import Shape, Signature
from .case import Case, Specs, annotate, argument
from .elementwise import UNARY
from .spec import Change, Product, Products, WeightGradient, annotated, by, named

Names = tuple[str, ...]
_EXPERT_WIDTHS = 3
"""Values kept per (token, expert), in widths of the first product: its result, the activation's."""


def matmul(case: Case) -> Signature | None:
    """Split dims by the ranks of the operands, as torch's ``matmul`` does."""
    left, right = (min(len(spec.shape), 2) for spec in case.inputs)
    return annotate(
        case,
        {
            (1, 1): "k, k -> ",
            (1, 2): "k, *b k j -> *b j",
            (2, 1): "*b i k, k -> *b i",
            (2, 2): "*b i k, *b k j -> *b i j",
        }[left, right],
    )


def einsum(case: Case) -> Signature | None:
    """Split the dims of the equation, which is the annotation."""
    operands, output = parse_equation(
        _equation(case.node), [len(spec.shape) for spec in case.inputs]
    )
    left = ", ".join(" ".join(names) for names in operands)
    return annotate(case, f"{left} -> {' '.join(output)}")


def grouped_mm(case: Case) -> Signature | None:
    """Split the dims of each product, and the groups if these have equal sizes."""
    left, right = (len(spec.shape) for spec in case.inputs[:2])
    if len(case.inputs) == 2 and (left, right) == (3, 3):
        return annotate(case, "e m k, e k n -> e m n")
    if len(case.inputs) != 3:
        return None
    patterns = {
        (2, 3): "_ k, _ k n, [_] -> _ n",
        (3, 2): "_ m k, k _, [_] -> m _",
        (2, 2): "m _, _ n, [_] -> _ m n",
    }
    pattern = patterns.get((left, right))
    return None if pattern is None else annotate(case, pattern)


def convolution(case: Case) -> Signature | None:
    """Split the batch, output channels or summed input channels; with groups, between groups."""
    groups = int(case.argument(_groups_at(case.node), "groups", 1))
    is_general = case.node.op.startswith("aten.convolution")
    is_transposed = "transpose" in case.node.op or (is_general and case.argument(6, "transposed"))
    spatial = " _" * (len(case.inputs[1].shape) - 2)
    if groups == 1:
        kernel = f"i o{spatial}" if is_transposed else f"o i{spatial}"
        return annotate(case, f"n i{spatial}, {kernel} + o -> n o{spatial}")
    found = annotate(case, f"n c{spatial}, c _{spatial} + c -> n c{spatial}")
    return None if found is None else replace(found, groups={"c": groups})


def _groups_at(node: Node) -> int:
    """Return the position of ``groups`` among a convolution's arguments: after ``dilation``, and in
    transposed convolutions after ``output_padding``, with ``dilation`` behind."""
    return 8 if node.op.startswith("aten.convolution") else 6


def _own_groups(node: Node, inputs: Specs, outputs: Specs) -> tuple[Change, ...]:
    """Return the number of groups in a rank's channels."""
    position = _groups_at(node)
    groups = argument(node, position, "groups", 1)
    if groups == 1:
        return ()
    channels = len(inputs[0].shape) - len(inputs[1].shape) + 1
    parts = max(1, node.spec.shape[channels] // max(outputs[0].shape[channels], 1))
    return ((position, "groups", max(1, groups // parts)),)


def matmul_product(first: Shape, second: Shape) -> Product | None:
    """Return the matrix product (batch, rows, columns, inner) of two factors of these shapes,
    batched if both are.

    A first factor of one dimension is a row, a second factor of one dimension a column. If only the
    first factor has batch dimensions, they are rows of a larger product, as PyTorch computes it.

    >>> matmul_product((4, 8, 16), (4, 16, 8))
    (4, 8, 8, 16)
    """
    if not first or not second:
        return None
    k = first[-1]
    n = second[-1] if len(second) > 1 else 1
    if len(second) <= 2:
        return 1, prod(first[:-1]), n, k
    m = first[-2] if len(first) > 1 else 1
    batch = max(prod(first[:-2]), prod(second[:-2]), _broadcast(first[:-2], second[:-2]))
    return batch, m, n, k


def _broadcast(first: Shape, second: Shape) -> int:
    length = max(len(first), len(second))
    padded = [(1,) * (length - len(shape)) + shape for shape in (first, second)]
    return prod(max(pair) for pair in zip(*padded, strict=True))


def einsum_product(equation: str, shapes: Sequence[Shape]) -> Product | None:
    """Return the product that an einsum of two operands computes; None for more or fewer operands.

    >>> einsum_product("bqhd,bkhd->bhqk", ((2, 5, 4, 8), (2, 7, 4, 8)))
    (8, 5, 7, 8)
    """
    if len(shapes) != 2:
        return None
    (first, second), out = parse_equation(equation, [len(shape) for shape in shapes])
    sizes = _sizes((first, second), shapes)

    def count(names: set[str]) -> int:
        return prod(sizes[name] for name in names)

    both = set(first) & set(second)
    return (
        count(both & set(out)),
        count(set(first) - both),
        count(set(second) - both),
        count(both - set(out)),
    )


def _sizes(operands: Sequence[Names], shapes: Sequence[Shape]) -> dict[str, int]:
    """Return the size of each named dimension of an einsum, after broadcasting."""
    sizes: dict[str, int] = {}
    for names, shape in zip(operands, shapes, strict=True):
        for name, size in zip(names, shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    return sizes


def parse_equation(equation: str, ranks: Sequence[int]) -> tuple[tuple[Names, ...], Names]:
    """Return the names of the dimensions of each operand, and of the output.

    ``...`` stands for dimensions that align from the right; without ``->`` the output has the
    ellipsis and then, in alphabetical order, the letters that occur once.

    >>> parse_equation("...ij,jk", (3, 2))
    ((('0', 'i', 'j'), ('j', 'k')), ('0', 'i', 'k'))
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    spread = [
        rank - len(text) + 3 if "..." in text else 0
        for text, rank in zip(operands, ranks, strict=True)
    ]
    widest = max(spread)
    if not arrow:
        once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    names = tuple(_names(text, count, widest) for text, count in zip(operands, spread, strict=True))
    return names, _names(right, widest, widest)


def _names(text: str, count: int, widest: int) -> Names:
    before, dots, after = text.partition("...")
    middle = tuple(str(at) for at in range(widest - count, widest)) if dots else ()
    return (*before, *middle, *after)


def gradient_products(product: Product, *, first: bool, second: bool) -> tuple[Product, ...]:
    """Return the products that compute the gradients of the ``first`` and ``second`` factor.

    The first gradient is the output's gradient times the second factor transposed, m×n by n×k; the
    second is the first factor transposed times the output's gradient, k×m by m×n.

    >>> gradient_products((1, 16, 32, 8), first=True, second=True)
    ((1, 16, 8, 32), (1, 8, 32, 16))
    """
    batch, m, n, k = product
    of_first = ((batch, m, k, n),) if first else ()
    of_second = ((batch, k, n, m),) if second else ()
    return of_first + of_second


def _equation(node: Node) -> str:
    return str(argument(node, 0, "equation"))


def _of_linear(node: Node, shapes: Sequence[Shape]) -> Product | None:
    if not all(shapes):
        return None
    first, second = shapes[:2]
    return 1, prod(first[:-1]), second[0] if len(second) > 1 else 1, first[-1]


Forward = Callable[[Node, Specs, Specs], int]


def _flops(forward: Forward, factors: Sequence[int]) -> Callable[..., tuple[int, int]]:
    """Return a function of a product's FLOPs, given the function ``forward``: the backward takes as
    many FLOPs as the forward for each factor with a gradient."""

    def flops(node: Node, inputs: Specs, outputs: Specs, wanted: Sequence[int]) -> tuple[int, int]:
        product = forward(node, inputs, outputs)
        return product, product * sum(position in factors for position in wanted)

    return flops


def _rows_by_columns(first: int) -> Forward:
    """Return a function of the FLOPs of a product whose inner dimension is the last dimension of
    input ``first``."""
    return lambda node, inputs, outputs: 2 * outputs[0].numel * inputs[first].shape[-1]


def _einsum_flops(node: Node, inputs: Specs, outputs: Specs) -> int:
    operands, _ = parse_equation(_equation(node), [len(spec.shape) for spec in inputs])
    return 2 * prod(_sizes(operands, [spec.shape for spec in inputs]).values())


def _convolution_flops(node: Node, inputs: Specs, outputs: Specs) -> int:
    return 2 * outputs[0].numel * (inputs[1].numel // inputs[1].shape[0])


def _transposed_flops(node: Node, inputs: Specs, outputs: Specs) -> int:
    return 2 * inputs[0].numel * (inputs[1].numel // inputs[1].shape[0])


def expert_pairs(node: Node, inputs: Specs) -> int:
    """Return the number of (token, expert) pairs that an expert layer computes if evenly routed."""
    held = inputs[3].shape[0]
    return int(inputs[1].numel * held / argument(node, 8, "num_experts", held))


def _expert_flops(node: Node, inputs: Specs, outputs: Specs) -> int:
    weights = sum(2 * weight.numel // weight.shape[0] for weight in inputs[3:5])
    return expert_pairs(node, inputs) * weights


def _expert_products(node: Node, inputs: Specs, wanted: Sequence[int]) -> Products:
    """Return the products of an expert layer, forward and backward, with even routing."""
    forward: list[Product] = []
    backward: list[Product] = []
    width, experts = inputs[0].shape[-1], inputs[3].shape[0]
    rows = max(1, expert_pairs(node, inputs) // experts)
    for position in (3, 4):
        other = inputs[position].numel // experts // width
        # up-projections read tokens; down-projections write values as wide as tokens
        product = (experts, rows, *((other, width) if position == 3 else (width, other)))
        forward.append(product)
        backward += gradient_products(product, first=True, second=position in wanted)
    return tuple(forward), tuple(backward) if wanted else ()


def _expert_bytes(node: Node, inputs: Specs, outputs: Specs) -> int:
    width = inputs[0].shape[-1]
    gathered = 2 * width + _EXPERT_WIDTHS * inputs[3].numel // (inputs[3].shape[0] * width)
    return max(inputs[1].numel, expert_pairs(node, inputs)) * gathered * outputs[0].itemsize


MATMUL = replace(
    UNARY,
    name="matmul",
    rule=by(matmul),
    family="matmul",
    flops=_flops(_rows_by_columns(0), (0, 1)),
    factors=(0, 1),
    product=lambda node, shapes: matmul_product(*shapes[:2]),
    keeps="others",
    is_costly=True,
    memory="new",
    copies=2,
    autocast="lower",
    script="a @ b",
)
MM = replace(
    MATMUL,
    name="mm",
    rule=annotated("i k, k j -> i j"),
    copies=0,
    weight_gradient=WeightGradient(0, (1,)),
)
ADDED = replace(
    MM,
    name="baddbmm",
    rule=annotated("b i j + b i k, b k j -> b i j"),
    flops=_flops(_rows_by_columns(1), (1, 2)),
    factors=(1, 2),
    weight_gradient=None,
    script="",
)
UNKEPT = replace(MM, is_costly=False, weight_gradient=None, script="")
CONVOLUTION = replace(
    MM,
    name="convolution",
    rule=by(convolution),
    family="conv",
    flops=_flops(_convolution_flops, (0, 1)),
    product=None,
    weight_gradient=None,
    local=_own_groups,
    script="",
    result="conv",
    is_weighted=True,
)

SPECS = (
    MATMUL,
    replace(
        MATMUL,
        name="linear",
        rule=annotated("*b i, o i + o -> *b o"),
        product=_of_linear,
        copies=1,
        weight_gradient=WeightGradient(0, (1, 2)),
        script="F.{}()",
        is_weighted=True,
    ),
    MM,
    replace(MM, name="bmm", rule=annotated("b i k, b k j -> b i j")),
    ADDED,
    replace(
        ADDED,
        name="addmm",
        rule=annotated("i j + i k, k j -> i j"),
        weight_gradient=WeightGradient(1, (2, 0)),
        is_weighted=True,
    ),
    replace(UNKEPT, name="mv", rule=annotated("i k, k -> i")),
    replace(UNKEPT, name="dot", rule=annotated("k, k -> "), autocast="as inputs"),
    replace(
        UNKEPT,
        name="outer",
        rule=annotated("i, j -> i j"),
        flops=_flops(lambda node, inputs, outputs: 2 * outputs[0].numel, (0, 1)),
        product=lambda node, shapes: (1, shapes[0][0], shapes[1][0], 1),
        autocast="as inputs",
    ),
    replace(
        UNKEPT,
        name="einsum",
        rule=by(einsum),
        flops=_flops(_einsum_flops, range(52)),
        factors=tuple(range(52)),
        product=lambda node, shapes: einsum_product(_equation(node), shapes),
        is_costly=True,
    ),
    replace(
        UNKEPT,
        name="_grouped_mm",
        rule=by(grouped_mm),
        products=lambda node, inputs, wanted: ((), ()),
        autocast="as inputs",
    ),
    replace(
        UNKEPT,
        name="experts",
        rule=annotated("*t _, *t _, *t _, e _ _, e _ _, e _, e _ =>+ *t _"),
        flops=_flops(_expert_flops, (0, 3)),
        factors=(0, 3, 4),
        products=_expert_products,
        keeps="inputs",
        kept_bytes=_expert_bytes,
        autocast="as inputs",
    ),
    CONVOLUTION,
    *named(
        CONVOLUTION,
        "conv1d conv2d conv3d",
        weight_gradient=WeightGradient(0, (1, 2)),
        script="F.{}()",
        result="",
    ),
    *named(
        CONVOLUTION,
        "conv_transpose1d conv_transpose2d conv_transpose3d",
        flops=_flops(_transposed_flops, (0, 1)),
        result="",
        is_weighted=False,
    ),
)
