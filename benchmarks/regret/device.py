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
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry

SMALL_BYTES = 4096
"""Ops on no more than these are computed: what decides, counts and is compared."""
TRANSFERS = frozenset({"c10d", "_c10d_functional"})
RECEIVES = frozenset({"recv_", "recv_any_source_"})


class EmulatedDevice(TorchDispatchMode):
    """Ops take ``max(flops / flops_per_second, bytes / bytes_per_second)`` seconds."""

    def __init__(self, flops_per_second: float, bytes_per_second: float) -> None:
        super().__init__()
        self.seconds_per_flop, self.seconds_per_byte = 1 / flops_per_second, 1 / bytes_per_second
        self.busy_until = 0.0
        self.busy_seconds = 0.0
        self._shapes: dict[Any, Any] = {}

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
        if FakeTensor in types:
            return func(*args, **kwargs)
        if any(kind not in (Tensor, Parameter) for kind in types):
            return NotImplemented
        if func.namespace in TRANSFERS:
            if func._opname not in RECEIVES:
                self.synchronize()
            return func(*args, **kwargs)
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        if func.is_view or not any(_is_large(each) for each in tensors):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.synchronize()
            return func(*args, **kwargs)
        results = self._results(func, args, kwargs)
        moved = [*tensors, *(r for r in tree_flatten(results)[0] if isinstance(r, Tensor))]
        num_bytes = sum({id(each): _num_bytes(each) for each in moved}.values())
        flops = self._flops(func, args, kwargs, results)
        self.compute(max(flops * self.seconds_per_flop, num_bytes * self.seconds_per_byte))
        return results

    def _flops(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any
    ) -> float:
        count = flop_registry.get(func.overloadpacket)
        return 0.0 if count is None else float(count(*args, **kwargs, out_val=results))

    def _results(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the op writes to, or new memory of the shapes that it returns."""
        schema = func._schema
        if not schema.returns:
            return None
        if all(each.alias_info is not None for each in schema.returns):
            written = {
                frozenset(argument.alias_info.before_set): kwargs.get(argument.name)
                if argument.name in kwargs
                else args[position]
                for position, argument in enumerate(schema.arguments)
                if argument.alias_info is not None
                and (argument.name in kwargs or position < len(args))
            }
            found = [written[frozenset(r.alias_info.before_set)] for r in schema.returns]
            return found[0] if len(found) == 1 else tuple(found)
        key = (func, *_keys(args), *_keys(sorted(kwargs.items())))
        if key not in self._shapes:
            if "device" in kwargs:
                kwargs["device"] = torch.device("meta")
            self._shapes[key] = func(
                *tree_map_only(Tensor, _as_meta, tuple(args)),
                **tree_map_only(Tensor, _as_meta, kwargs),
            )
        return tree_map_only(Tensor, _memory, self._shapes[key])


def _is_large(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_floating_point() and _num_bytes(tensor) > SMALL_BYTES


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _keys(values: Any) -> list[Any]:
    def key(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (tuple(value.shape), value.stride(), value.dtype)
        return repr(value)

    leaves, structure = tree_flatten(values)
    return [repr(structure), *map(key, leaves)]


def _as_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )


def _memory(tensor: Tensor) -> Tensor:
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return found if tensor.is_floating_point() else found.zero_()


