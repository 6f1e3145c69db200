"""Random numbers that a script draws for tensors which are spread over ranks.

In: ``nn.init.xavier_uniform_(weight)``, ``torch.randn_like(gradient)`` and the like, of a planned
model's weights and what is made of them. Out: the numbers that one device draws for the whole
tensor, of which each rank keeps its part. torch itself draws each part alone, so that weights
began otherwise than without a plan, and alike in every part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._pytree import tree_map_only

from ...passes.ops.collectives import local_tensor
from .global_values import op_handlers, whole

_aten = torch.ops.aten
_DRAWS = (
    _aten.normal_, _aten.uniform_, _aten.bernoulli_, _aten.exponential_, _aten.log_normal_,
    _aten.cauchy_, _aten.geometric_, _aten.random_, _aten.rand_like, _aten.randn_like,
    _aten.randint_like, _aten.bernoulli, _aten.native_dropout,
)  # fmt: skip
_READING = (_aten.bernoulli.default, _aten.native_dropout.default)
"""Those that read the tensor; the others take its shape and dtype alone."""

_MESHES: set[DeviceMesh] = set()
"""The meshes of planned models: tensors of other ones are left to torch."""


def draw_whole_values(masters: Iterable[Tensor]) -> None:
    """Make random ops on tensors of these parameters' meshes draw for the whole tensor.

    Each is collective over its mesh: all ranks take what the first one draws.
    """
    handlers = op_handlers()
    if not _MESHES:
        for op in _draws():
            handlers[op] = _drawn
    _MESHES.update(master.device_mesh for master in masters if isinstance(master, DTensor))


def _draws() -> Iterator[Any]:
    for packet in _DRAWS:
        for name in packet.overloads():  # type: ignore[no-untyped-call]
            if "out" not in name:
                yield getattr(packet, name)


def _drawn(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    spread, *others = args
    if not isinstance(spread, DTensor) or spread.device_mesh not in _MESHES:
        return _left_to_torch(op, args, kwargs)
    base = whole(spread) if op in _READING else torch.empty_strided(
        spread.shape, spread.stride(), dtype=spread.dtype, device=local_tensor(spread).device
    )  # fmt: skip
    others, kwargs = tree_map_only(DTensor, whole, (others, kwargs))
    made = tree_map_only(Tensor, lambda each: _placed(each, spread), op(base, *others, **kwargs))
    if not op._schema.is_mutable:
        return made
    local_tensor(spread).copy_(local_tensor(made))
    return spread


def _placed(drawn: Tensor, like: DTensor) -> DTensor:
    """Spread what the mesh's first rank has drawn as another tensor is."""
    mesh = like.device_mesh
    for dimension in range(mesh.ndim):
        flat = drawn.view(torch.uint8) if drawn.dtype == torch.bool else drawn
        dist.broadcast(flat, group=mesh.get_group(dimension), group_src=0)
    same = DTensor.from_local(drawn, mesh, [Replicate()] * mesh.ndim, run_check=False)
    held = [Replicate() if isinstance(each, Partial) else each for each in like.placements]
    return same.redistribute(placements=held)


def _left_to_torch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handlers = op_handlers()
    del handlers[op]
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = _drawn
