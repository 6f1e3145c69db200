"""An op node with the specs of its tensors, the input of rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..graph.graph import Node, Ref, TensorSpec
from .annotation import Letters, Shape, Signature, bind

Specs = Sequence[TensorSpec]


@dataclass(frozen=True, slots=True)
class Case:
    """A node with the specs of its inputs, in call order, and of its outputs."""

    node: Node
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return the node's argument at ``position`` of the op's schema, or by its name."""
        return argument(self.node, position, name, default)

    @property
    def shape(self) -> Shape:
        """Shape of the first input."""
        return self.inputs[0].shape

    @property
    def rank(self) -> int:
        return len(self.inputs[0].shape)

    def dims(self, position: int, name: str = "dim", default: Any = None) -> tuple[int, ...]:
        """Return the dimensions that an argument of the op names, with negative ones counted from
        0; None, a bool or an empty list means all dimensions of the first input."""
        found = self.argument(position, name, default)
        if (
            found is None
            or isinstance(found, bool)
            or (isinstance(found, tuple | list) and not found)
        ):
            return tuple(range(self.rank))
        listed = found if isinstance(found, tuple | list) else (found,)
        return tuple(dim % self.rank if self.rank else 0 for dim in listed)


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """Return a node's argument at ``position`` of the op's schema, or by its name."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def letters_of(rank: int, whole: tuple[int, ...] = ()) -> Letters:
    """Return a letter for each of ``rank`` dimensions; None for the dimensions ``whole`` (unsplit).

    >>> letters_of(3, (1,))
    ('d0', None, 'd2')
    """
    return tuple(None if dim in whole else f"d{dim}" for dim in range(rank))


def linear(
    inputs: tuple[Letters, ...], outputs: tuple[Letters, ...], *, is_linear: bool = True
) -> Signature:
    """Return the signature of an op that is linear in its first input."""
    return Signature(inputs, outputs, ((0,),) if is_linear else ())


def is_ref(value: Any) -> bool:
    return isinstance(value, Ref)


@lru_cache(maxsize=4096)
def packet(op: str) -> str:
    """Return an op's name without namespace and overload, and without "_" if it is in-place.

    >>> packet("aten.add_.Tensor"), packet("aten.__and__.Tensor")
    ('add', '__and__')
    """
    parts = op.split(".")
    if len(parts) < 2 or parts[0] not in ("aten", "autoparallel"):
        return ""
    name = parts[1]
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name


def annotate(case: Case, annotation: str) -> Signature | None:
    """Return the signature of an annotation for the shapes of a node."""
    return bind(
        annotation,
        [spec.shape for spec in case.inputs],
        [spec.shape for spec in case.outputs],
    )
