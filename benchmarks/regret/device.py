"""An accelerator that computes nothing and takes its time.

In: a rate of products and one of memory. While an ``EmulatedDevice`` is active, an op on large
tensors of floats gives uninitialized results of the right shapes, and moves the device's clock by
what the op takes at these rates. The clock runs ahead of the host, as a GPU's stream does: the
host waits for it before it begins to send, and at the end of a step. So what the interpreter
takes is hidden behind compute, and messages leave when what they carry would be ready.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry


def grouped_flops(
    first: Tensor, second: Tensor, offs: Tensor, *_: Any, out_val: Any = None, **__: Any
) -> int:
    """FLOPs of a product in groups, of rows by expert or of gradients of experts' weights: rows
    after the last group are not computed."""
    rows = int(offs[-1])
    others = first.shape[0] if second.dim() == first.dim() else first.shape[-1]
    return 2 * rows * others * second.shape[-1]


SMALL_BYTES = 4096
"""Ops on no more than these are computed: what decides, counts and is compared."""
ZEROED_BYTES = 1 << 20
FLOPS: dict[Any, Any] = {**flop_registry, torch.ops.aten._grouped_mm: grouped_flops}
"""Functions that count an op's FLOPs."""
TRANSFERS = frozenset({"c10d", "_c10d_functional"})
RECEIVES = frozenset({"recv_", "recv_any_source_"})


class EmulatedDevice(TorchDispatchMode):
    """Ops take ``max(flops / flops_per_second, bytes / bytes_per_second)`` seconds."""

    def __init__(self, flops_per_second: float, bytes_per_second: float) -> None:
        super().__init__()
        self.seconds_per_flop, self.seconds_per_byte = 1 / flops_per_second, 1 / bytes_per_second
        self.busy_until = 0.0
        self.busy_seconds = 0.0
        self.num_kernels = 0
        self._known: dict[Any, _Work | None] = {}

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        left = self.busy_until - time.monotonic()
        if left > 0:
            time.sleep(left)

    def compute(self, seconds: float) -> None:
        """Give the device work, which begins when the work before it has ended."""
        self.busy_until = max(self.busy_until, time.monotonic()) + seconds
        self.busy_seconds += seconds

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace in TRANSFERS or func is torch.ops.aten._local_scalar_dense.default:
            if func._opname not in RECEIVES:
                self.synchronize()
            return func(*args, **kwargs)
        if FakeTensor in types:
            return func(*args, **kwargs)
        if any(kind is not Tensor and kind is not Parameter for kind in types):
            return NotImplemented
        if func.is_view:
            return func(*args, **kwargs)
        key = (func, _key(args), _key(kwargs), _num_rows(func, args, kwargs))
        if key not in self._known:
            self._known[key] = self._work(func, args, kwargs)
        work = self._known[key]
        is_choice = func is torch.ops.aten.topk.default
        if work is None:
            made = func(*args, **kwargs)
            return _balanced(args[0], made) if is_choice else made
        self.compute(work.seconds)
        self.num_kernels += 1
        if is_choice:
            return _balanced(args[0], tree_map_only(Tensor, _memory, work.results))
        if work.written is None:
            return tree_map_only(Tensor, _memory, work.results)
        found = [kwargs[each] if isinstance(each, str) else args[each] for each in work.written]
        return found[0] if len(found) == 1 else tuple(found) or None

    def _work(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Work | None:
        """What an op does on large tensors; None where it is really computed."""
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        if not any(_is_large(each) for each in tensors):
            return None
        on_meta = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
        made_by = _grouped if func.overloadpacket is torch.ops.aten._grouped_mm else func
        results = made_by(
            *tree_map_only(Tensor, _as_meta, tuple(args)),
            **tree_map_only(Tensor, _as_meta, on_meta),
        )
        written = _written(func, args, kwargs)
        made = tree_flatten(results)[0] if written is None else []
        num_bytes = sum(_num_bytes(each) for each in [*tensors, *made] if isinstance(each, Tensor))
        count = FLOPS.get(func.overloadpacket)
        flops = 0.0 if count is None else float(count(*args, **kwargs, out_val=results))
        seconds = max(flops * self.seconds_per_flop, num_bytes * self.seconds_per_byte)
        return _Work(seconds, results, written)


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds of an op, its results on ``meta``, and which arguments it returns, if it does."""

    seconds: float
    results: Any
    written: tuple[int | str, ...] | None


def _written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int | str, ...] | None:
    """The arguments that an op writes to and returns; None where it returns new memory."""
    schema = func._schema
    if any(each.alias_info is None for each in schema.returns):
        return None
    places: dict[frozenset[str], int | str] = {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and (argument.name in kwargs or position < len(args)):
            place = argument.name if argument.name in kwargs else position
            places[frozenset(argument.alias_info.before_set)] = place
    return tuple(places[frozenset(each.alias_info.before_set)] for each in schema.returns)


def _is_large(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.is_floating_point()
        and _num_bytes(tensor) > SMALL_BYTES
    )


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _key(value: Any) -> Any:
    """A hashable value, equal for arguments of equal shapes and dtypes."""
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in value.items())
    return value


def _as_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )


def _grouped(first: Tensor, second: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """The result of a grouped product on ``meta``, whose own function takes bfloat16 alone."""
    groups = (len(offs),) if second.dim() == first.dim() else ()
    return first.new_empty(*groups, first.shape[0], second.shape[-1])


def _num_rows(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The rows that a grouped product computes; 0 for other ops."""
    if func.overloadpacket is not torch.ops.aten._grouped_mm:
        return 0
    return int((kwargs["offs"] if "offs" in kwargs else args[2])[-1])


def _balanced(scores: Tensor, results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Memory for the values of ``topk``, and indices in turn: as many rows choose each."""
    values, indices = map(_memory, results)
    every = torch.arange(indices.numel()).remainder_(scores.shape[-1])
    return values, indices.copy_(every.view(indices.shape))


def _memory(tensor: Tensor) -> Tensor:
    """Zeros, so that indices made of them are valid; of a large tensor of floats anything."""
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    is_free = tensor.is_floating_point() and _num_bytes(tensor) > ZEROED_BYTES
    return found if is_free else found.zero_()
