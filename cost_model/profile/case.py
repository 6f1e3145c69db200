"""Cases to measure and to look up: one op on tensors of given shapes.

In: an op's path, the shapes and dtypes of its tensors, its other arguments. Out: an
``OpCase`` whose ``key`` is the same for every op of a model (or of another) that runs the
same work, and which survives JSON. The features (family, FLOPs, bytes, products) say
how much work it is; they serve interpolation and are no part of the key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from ..cluster.cluster import FigureError
from ..cluster.tf32 import TFLOAT32

Product = tuple[int, int, int, int]


class ProfileError(FigureError):
    """Error about measured times: missing, wrong, or in a form that cannot be stored."""


@dataclass(frozen=True, slots=True)
class TensorCase:
    """Tensor argument of an op: shape on one rank, name of the dtype, and whether it gets a
    gradient."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        sizes = ",".join(map(str, self.shape))
        return f"{self.dtype}[{sizes}]{'!' if self.requires_grad else ''}"


@dataclass(frozen=True, slots=True)
class OpCase:
    """Op with its tensor shapes on one rank and its arguments, as the key of a measured time.
    Equality and hash ignore the fields that only describe its cost: family, FLOPs, bytes, products.

    ``op`` is a ``torch.ops`` path (``"aten.linear.default"``); ``tensors`` its tensor arguments in
    call order (a tensor given twice is listed twice); ``arguments`` all its arguments as
    ``canonical`` writes them. ``flops`` and ``num_bytes`` are pairs (forward, backward);
    ``products`` are (batch, m, n, k) of each matrix product of the forward, for attention
    (batch·heads, queries, keys, head size). ``tf32`` are the families whose float32 products are
    computed in TF32.
    """

    op: str
    tensors: tuple[TensorCase, ...]
    arguments: str
    family: str = field(default="elementwise", compare=False)
    flops: tuple[float, float] = field(default=(0.0, 0.0), compare=False)
    num_bytes: tuple[float, float] = field(default=(0.0, 0.0), compare=False)
    products: tuple[Product, ...] = field(default=(), compare=False)
    tf32: tuple[str, ...] = ()

    def key(self) -> str:
        """Return a text that identifies the op for the database: its name, tensors, arguments, and
        the op families computed in TF32."""
        text = f"{self.op} {' '.join(map(str, self.tensors))} {self.arguments}"
        return text + (f" tf32={','.join(self.tf32)}" if self.tf32 else "")

    @property
    def dtype(self) -> str:
        """Name of the dtype that the op computes in: "tfloat32" if it uses TF32, else the dtype of
        its first floating tensor, or of its first tensor if none is floating."""
        if self.tf32:
            return TFLOAT32
        floating = [t.dtype for t in self.tensors if is_floating(t.dtype)]
        return floating[0] if floating else self.tensors[0].dtype if self.tensors else ""

    @property
    def has_backward(self) -> bool:
        return any(tensor.requires_grad for tensor in self.tensors)


def is_floating(dtype: str) -> bool:
    """Return true if a dtype of this name is floating or complex, so that it can have gradients."""
    return dtype.startswith(("float", "bfloat", "complex"))


def canonical(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return an op's arguments as one line of JSON, equal for equal calls. A tensor is written as
    ``{"tensor": i}``, its index in ``OpCase.tensors``. Values of torch's own types become
    ``{"dtype": "float32"}``, ``{"device": ""}`` (filled in when the op is run), ``{"memory_format":
    …}``, ``{"layout": …}``; infinity and NaN become ``{"float": "inf"}`` and ``{"float": "nan"}``.

    >>> canonical(({"tensor": 0}, (1, 2)), {"p": float("inf")})
    '[[{"tensor":0},[1,2]],{"p":{"float":"inf"}}]'
    """
    value = [_plain(list(args)), _plain(dict(kwargs))]
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    name = type(value).__name__
    if name == "device":
        return {"device": ""}
    if name in ("dtype", "memory_format", "layout"):
        return {name: str(value).removeprefix("torch.")}
    raise ProfileError(f"an argument of type {name} cannot be stored in a profile", repr(value))


def case_to_json(case: OpCase) -> dict[str, Any]:
    """Return ``case`` as a dict that JSON can hold; ``case_from_json`` is the inverse."""
    return {**asdict(case), "tensors": [astuple(tensor) for tensor in case.tensors]}


def case_from_json(values: Mapping[str, Any], *, on_gpu: bool = False) -> OpCase:
    """Return the op whose description ``values`` was made by ``case_to_json``. Raises
    ``ProfileError`` for invalid values. Without the key ``tf32``, it was measured with torch's
    defaults: convolutions in TF32 on a GPU (``on_gpu``), no TF32 otherwise."""
    try:
        case = OpCase(
            op=str(values["op"]),
            tensors=tuple(
                TensorCase(tuple(map(int, shape)), str(dtype), bool(requires_grad))
                for shape, dtype, requires_grad in values["tensors"]
            ),
            arguments=str(values["arguments"]),
            family=str(values["family"]),
            flops=_pair(values["flops"]),
            num_bytes=_pair(values["num_bytes"]),
            products=tuple(_product(product) for product in values["products"]),
            tf32=tuple(map(str, values.get("tf32", ()))),
        )
        unsaid = on_gpu and "tf32" not in values and case.family in ("conv", "block")
        has_float32 = any(tensor.dtype == "float32" for tensor in case.tensors)
        return replace(case, tf32=("conv",)) if unsaid and has_float32 else case
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"not an op case: {error!r}", str(values)[:200]) from error


def _pair(values: Sequence[float]) -> tuple[float, float]:
    forward, backward = values
    return float(forward), float(backward)


def _product(values: Sequence[int]) -> Product:
    batch, m, n, k = map(int, values)
    return batch, m, n, k
