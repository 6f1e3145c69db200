"""Op cases as a capture makes them, written by hand."""

from __future__ import annotations

from math import prod
from typing import Any

from autoparallel.cost_model.profile.case import OpCase, TensorCase, canonical


def tensor(*shape: int, dtype: str = "float32", grad: bool = True) -> TensorCase:
    return TensorCase(shape, dtype, grad and dtype.startswith(("float", "bfloat")))


def ref(index: int) -> dict[str, int]:
    return {"tensor": index}


def call(op: str, tensors: list[TensorCase], *args: Any, **features: Any) -> OpCase:
    """A case whose arguments are its tensors in order, then ``args``."""
    refs = [ref(index) for index in range(len(tensors))]
    return OpCase(op, tuple(tensors), canonical([*refs, *args], {}), **features)


def linear(m: int, n: int, k: int, *, grad: bool = True) -> OpCase:
    flops, num_bytes = 2.0 * m * n * k, 4.0 * (m * k + n * k + m * n)
    return call(
        "aten.linear.default",
        [tensor(m, k, grad=grad), tensor(n, k, grad=grad)],
        family="matmul",
        flops=(flops, 2 * flops * grad),
        num_bytes=(num_bytes, 2 * num_bytes * grad),
        products=((1, m, n, k),),
    )


def attention(heads: int, length: int, size: int, *, is_causal: bool = False) -> OpCase:
    flops = 4.0 * heads * length * length * size / (2 if is_causal else 1)
    num_bytes = 4.0 * 4 * heads * length * size
    return call(
        "aten.scaled_dot_product_attention.default",
        [tensor(1, heads, length, size)] * 3,
        None,
        0.0,
        is_causal,
        family="attention",
        flops=(flops, 2.5 * flops),
        num_bytes=(num_bytes, 2 * num_bytes),
        products=((heads, length, length, size),),
    )


def layer_norm(rows: int, columns: int) -> OpCase:
    elements = float(rows * columns)
    tensors = [tensor(rows, columns), tensor(columns), tensor(columns)]
    return OpCase(
        "aten.layer_norm.default",
        tuple(tensors),
        canonical((ref(0), [columns], ref(1), ref(2)), {}),
        "norm",
        (8 * elements, 14 * elements),
        (8 * elements, 12 * elements),
    )


def gelu(*shape: int, dtype: str = "float32") -> OpCase:
    return elementwise("aten.gelu.default", 1, *shape, dtype=dtype)


def elementwise(op: str, inputs: int, *shape: int, dtype: str = "float32") -> OpCase:
    elements = float(prod(shape))
    num_bytes = 4 * elements * (inputs + 1)
    return call(
        op,
        [tensor(*shape, dtype=dtype)] * inputs,
        family="elementwise",
        flops=(elements, 2 * elements),
        num_bytes=(num_bytes, num_bytes),
    )


def embedding(rows: int, columns: int, batch: int, length: int) -> OpCase:
    made = 4.0 * batch * length * columns
    return call(
        "aten.embedding.default",
        [tensor(rows, columns), tensor(batch, length, dtype="int64")],
        family="embedding",
        num_bytes=(2 * made, 2 * made),
    )


def cross_entropy(rows: int, classes: int) -> OpCase:
    return call(
        "aten.cross_entropy_loss.default",
        [tensor(rows, classes), tensor(rows, dtype="int64")],
        family="reduction",
        num_bytes=(8.0 * rows * classes, 8.0 * rows * classes),
    )


def softmax(rows: int, columns: int) -> OpCase:
    elements = float(rows * columns)
    return call(
        "aten.softmax.int",
        [tensor(rows, columns)],
        -1,
        family="norm",
        flops=(8 * elements, 14 * elements),
        num_bytes=(8 * elements, 12 * elements),
    )
