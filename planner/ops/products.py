"""Matrix products inside an op, from its local shapes.

In: an op's name, its two factors, its output. Out: (batch, m, n, k) for m×k by k×n, as
``cost_model.ops.products`` prices them; none if the op is not a product of two factors (an einsum
of three operands, experts whose rows are assigned at run time).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..graph.graph import Node, TensorSpec
from .case import argument
from .equation import parse_equation
from .table import packet

Product = tuple[int, int, int, int]
Shape = tuple[int, ...]


def matmul_product(name: str, first: Shape, second: Shape) -> Product | None:
    """Return the matrix product (batch, rows, columns, inner) of two factors of these shapes,
    batched if both are.

    A first factor of one dimension is a row, a second factor of one dimension a column. If only the
    first factor has batch dimensions, they are rows of a larger product, as PyTorch computes it.

    >>> matmul_product("linear", (2, 8, 16), (32, 16))
    (1, 16, 32, 16)
    >>> matmul_product("bmm", (4, 8, 16), (4, 16, 8))
    (4, 8, 8, 16)
    """
    if name == "outer":
        return 1, first[0], second[0], 1
    if not first or not second:
        return None
    k = first[-1]
    if name == "linear":
        return 1, prod(first[:-1]), second[0] if len(second) > 1 else 1, k
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
    sizes: dict[str, int] = {}
    for names, shape in zip((first, second), shapes, strict=True):
        for name, size in zip(names, shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))

    def count(names: set[str]) -> int:
        return prod(sizes[name] for name in names)

    both = set(first) & set(second)
    return (
        count(both & set(out)),
        count(set(first) - both),
        count(set(second) - both),
        count(both - set(out)),
    )


def plain_product(node: Node, shapes: Sequence[tuple[int, ...]]) -> Product | None:
    """Return an op's product for factors of these shapes; None for an einsum of other operands."""
    if packet(node.op) == "einsum":
        return einsum_product(str(argument(node, 0, "equation")), shapes)
    return matmul_product(packet(node.op), shapes[0], shapes[1])


def product_factors(node: Node, count: int) -> tuple[int, ...]:
    """Return the positions of a product's factors among its operands; other operands are added."""
    name = packet(node.op)
    if name == "experts":
        return (0, 3, 4)
    if name == "einsum":
        return tuple(range(count))
    return (1, 2) if name in ("addmm", "baddbmm") else tuple(range(min(count, 2)))


def attention_products(node: Node, query: TensorSpec, key: TensorSpec) -> tuple[Product, ...]:
    """Return (batch · heads, queries, keys, head size) for each kernel of an attention."""
    heads, length, size = prod(query.shape[:-2]), query.shape[-2], query.shape[-1]
    if packet(node.op) != "balanced_attention":
        return ((heads, length, key.shape[-2], size),)
    halves = (length - length // 2, length // 2)
    return tuple((heads, rows, end, size) for rows, end in zip(halves, node.args[3], strict=True))


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
