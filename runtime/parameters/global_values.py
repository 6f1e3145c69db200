"""DTensors as a script sees them: reads, random ops and state dicts are of whole tensors.

Once a model is adopted,

- numbers, lists and texts made of a DTensor are made of the whole tensor, which every rank
  gathers. ``parameter.grad.norm().item()`` would else be this rank's part of the norm, and branches
  on it would differ between ranks;
- random ops (``nn.init.xavier_uniform_(weight)``, ``torch.randn_like(gradient)``) draw the numbers
  that one device draws for the whole tensor, of which each rank keeps its part. torch itself draws
  each part alone, and the same numbers for every part;
- inside of ``one_process()``, state dicts of optimizers have whole tensors, as a trainer of one
  process writes them, and each rank loads its part of such a state dict. So these checkpoints load
  under every plan and without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ...passes.ops.collectives import local_tensor
from .parameters import like_tensor

_READS = (
    "item",
    "tolist",
    "numpy",
    "__array__",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__complex__",
    "__format__",
)


def read_whole_values() -> None:
    """Patch the DTensor methods that read values on the host, such as ``item``, so that they read
    the whole tensor. They are then collective over its ranks where it is sharded or a partial
    sum."""
    for name in _READS:
        if name not in DTensor.__dict__:
            setattr(DTensor, name, _of_whole(name))


def whole(tensor: Tensor) -> Tensor:
    """Return a DTensor's whole tensor; return any other tensor unchanged. Gradients pass through.
    Collective over the ranks that hold the tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _of_whole(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    @wraps(method)
    def read(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        return method(self.full_tensor(), *args, **kwargs)

    return read


def take_lists_of_shards(parameters: Iterable[Tensor]) -> None:
    """Make torch's multi-tensor ops, such as those of ``clip_grad_norm_``, take lists of DTensors
    on several meshes, or with shards that have no element. torch refuses the former, and the
    maximum of an empty tensor."""
    spread = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if len({each.device_mesh for each in spread}) < 2 and not any(map(_has_empty_shards, spread)):
        return
    handlers = op_handlers()
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if packet.startswith("_foreach_") and packet not in _REDUCTIONS and "out" not in overload:
            handlers[getattr(getattr(_aten, packet), overload or "default")] = _run_on_shards
    handlers[_aten._foreach_norm.Scalar] = _foreach_norm
    handlers[_aten._amp_foreach_non_finite_check_and_unscale_.default] = _unscale


def op_handlers() -> dict[Any, Any]:
    """Return DTensor's table of handlers for single ops, which has no public name."""
    dispatcher: Any = DTensor._op_dispatcher
    return getattr(dispatcher, "_custom_op_handlers", {})


def _has_empty_shards(parameter: DTensor) -> bool:
    for axis, placement in enumerate(parameter.placements):
        count = parameter.device_mesh.size(axis)
        if isinstance(placement, Shard):
            size = parameter.shape[placement.dim]
            if (count - 1) * -(-size // count) >= size:
                return True
    return False


_aten = torch.ops.aten
_REDUCTIONS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")
"""Multi-tensor ops that are not elementwise."""


def _run_on_shards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise multi-tensor op on this rank's shards, in the layouts of its first
    list."""
    first, *others = [each for each in args if isinstance(each, list | tuple)]
    pairs = [pair for other in others for pair in zip(other, first, strict=True)]
    if _are_partial(first) or any(_is_mixed(*pair) for pair in pairs):
        return _left_to_torch(op, args, kwargs)

    def part(value: Any, like: Any) -> Any:
        if isinstance(value, DTensor) and value.dim() and value.placements != like.placements:
            value = value.redistribute(placements=like.placements)
        return local_tensor(value) if isinstance(value, Tensor) else value

    def own(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [part(each, like) for each, like in zip(value, first, strict=True)]
        return whole(value) if isinstance(value, Tensor) else value

    made = op(*map(own, args), **{name: own(value) for name, value in kwargs.items()})
    return made and [like_tensor(like, local) for local, like in zip(made, first, strict=True)]


def _is_mixed(value: Any, like: Tensor) -> bool:
    """Tell whether only one of two tensors is a DTensor, which torch refuses."""
    is_tensor = isinstance(value, Tensor) and value.dim() > 0
    return is_tensor and isinstance(value, DTensor) != isinstance(like, DTensor)


def _are_partial(tensors: Iterable[Tensor]) -> bool:
    spread = (each for each in tensors if isinstance(each, DTensor))
    return any(placement.is_partial() for each in spread for placement in each.placements)


def _foreach_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the norms of whole tensors, the same on every rank, as ordinary tensors. The shards'
    norms are summed, or their maximum is taken, for all tensors of a mesh and layout at once."""
    if _are_partial(args[0]):
        found_by_torch: list[Tensor] = _left_to_torch(op, args, kwargs)
        return found_by_torch
    order = float(args[1] if len(args) > 1 else 2.0)
    tensors: Sequence[Tensor] = args[0]
    alike: dict[Any, list[int]] = {}
    for index, each in enumerate(tensors):
        key = (each.device_mesh, each.placements) if isinstance(each, DTensor) else ()
        alike.setdefault(key, []).append(index)
    is_largest = order == math.inf
    power = 1.0 if is_largest or not order else order
    found: dict[int, Tensor] = {}
    for key, members in alike.items():
        parts = (local_tensor(tensors[index]) for index in members)
        filled = [part if part.numel() else part.new_zeros(1) for part in parts]
        norms = torch.stack([torch.linalg.vector_norm(p, order, **kwargs) ** power for p in filled])
        for dim, placement in enumerate(key[1] if key else ()):
            if not placement.is_replicate():
                how = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
                dist.all_reduce(norms, how, group=key[0].get_group(dim))
        found |= dict(zip(members, (norms ** (1 / power)).unbind(), strict=True))
    return [found[index] for index in range(len(tensors))]


def _unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale the shards of gradients in place, and tell every rank whether a value is infinite."""
    gradients, found, inverse = args
    op([local_tensor(each) for each in gradients], local_tensor(found), whole(inverse))
    meshes = (each.device_mesh for each in gradients if isinstance(each, DTensor))
    for mesh in dict.fromkeys(meshes):
        for dim in range(mesh.ndim):
            dist.all_reduce(local_tensor(found), dist.ReduceOp.MAX, group=mesh.get_group(dim))


_DRAWS = (
    _aten.normal_,
    _aten.uniform_,
    _aten.bernoulli_,
    _aten.exponential_,
    _aten.log_normal_,
    _aten.cauchy_,
    _aten.geometric_,
    _aten.random_,
    _aten.rand_like,
    _aten.randn_like,
    _aten.randint_like,
    _aten.bernoulli,
    _aten.native_dropout,
)
_READING = (_aten.bernoulli.default, _aten.native_dropout.default)
"""Random ops that read their tensor's values; the other random ops use only its shape and dtype."""

_MESHES: set[DeviceMesh] = set()
"""Meshes of planned models. Random ops on DTensors of other meshes are left to torch."""


def draw_whole_values(masters: Iterable[Tensor]) -> None:
    """Make random ops on DTensors draw the numbers of the whole tensor, of which each rank keeps
    its shard. This concerns DTensors on the meshes of ``masters``, a model's parameters. Each op is
    then collective over its mesh: all ranks take the numbers that the first rank draws."""
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
    base = (
        whole(spread)
        if op in _READING
        else torch.empty_strided(
            spread.shape, spread.stride(), dtype=spread.dtype, device=local_tensor(spread).device
        )
    )
    others, kwargs = tree_map_only(DTensor, whole, (others, kwargs))
    made = tree_map_only(Tensor, lambda each: _placed(each, spread), op(base, *others, **kwargs))
    if not op._schema.is_mutable:
        return made
    local_tensor(spread).copy_(local_tensor(made))
    return spread


def _placed(drawn: Tensor, like: DTensor) -> DTensor:
    """Broadcast the whole tensor ``drawn`` from the mesh's first rank; shard it as ``like`` is."""
    mesh = like.device_mesh
    for dimension in range(mesh.ndim):
        flat = drawn.view(torch.uint8) if drawn.dtype == torch.bool else drawn
        dist.broadcast(flat, group=mesh.get_group(dimension), group_src=0)
    same = DTensor.from_local(drawn, mesh, [Replicate()] * mesh.ndim, run_check=False)
    held = [Replicate() if isinstance(each, Partial) else each for each in like.placements]
    return same.redistribute(placements=held)


def _left_to_torch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handlers = op_handlers()
    handler = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


_depth = 0


def are_whole() -> bool:
    """Return whether the process is inside ``whole_states()``: state dicts hold whole tensors."""
    return _depth > 0


@contextmanager
def whole_states() -> Iterator[None]:
    """Make optimizers' ``state_dict`` return, and ``load_state_dict`` take, whole tensors in the
    context. Collective over all ranks."""
    global _depth
    get, put = Optimizer.state_dict, Optimizer.load_state_dict

    def state_dict(self: Optimizer) -> dict[str, Any]:
        found: dict[str, Any] = tree_map_only(DTensor, lambda part: part.full_tensor(), get(self))
        return found

    def load_state_dict(self: Optimizer, state_dict: Mapping[str, Any]) -> None:
        put(self, _parts(self, state_dict))

    Optimizer.state_dict = state_dict  # type: ignore[method-assign]
    Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        Optimizer.state_dict = get  # type: ignore[method-assign]
        Optimizer.load_state_dict = put  # type: ignore[method-assign]


def _parts(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with each whole tensor replaced by this rank's part."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [each for group in state["param_groups"] for each in group["params"]]
    own = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=False):
        if isinstance(parameter, DTensor) and number in own:
            own[number] = {key: _part(value, parameter) for key, value in own[number].items()}
    return {**state, "state": own}


def _part(value: Any, parameter: DTensor) -> Any:
    """Distribute a whole tensor of a parameter's optimizer state: like the parameter if shapes
    agree, else replicated."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not value.dim():
        return value
    mesh = parameter.device_mesh
    value = value.to(parameter.to_local().device)
    is_alike = value.shape == parameter.shape
    placements = parameter.placements if is_alike else [Replicate()] * mesh.ndim
    with torch.no_grad():
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
