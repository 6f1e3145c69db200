"""Other training systems: the assumptions for predicting their costs, by name.

In: a system's name and a precision. Out: ``CostAssumptions`` and the kernels that its programs run.
Systems that ``simulate`` and the validation know:

- ``megatron``: Megatron-LM with TransformerEngine. One group shards a parameter's states and sums
  its gradient over all ranks that hold it; sequence parallelism gathers inputs again in the
  backward; selective recomputation runs attention's core again; products in 8 bits keep the cast
  of their inputs, as do experts' products; tokens are sent to experts.
- ``torchtitan``: FSDP2 over all ranks that hold a parameter, blocks compiled; torchao's casts to 8
  bits read and write each tensor once more; tokens are sent to experts.
- ``deepspeed``: each op is a kernel; states, gradients and tokens as in ``megatron``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ..plan import Precision
from .basis import RUNTIME, CostAssumptions

SystemName = Literal["run", "megatron", "torchtitan", "deepspeed"]
SYSTEMS: tuple[SystemName, ...] = get_args(SystemName)
Kernels = Literal["eager", "compiled", "fused"]


@dataclass(frozen=True, slots=True)
class System:
    """A training system. ``assumptions``: about its costs, in fp8; ``splits_sequences``: its tensor
    parallelism splits values between products along sequences."""

    title: str
    kernels: Kernels
    splits_sequences: bool
    assumptions: CostAssumptions


_SHARED = CostAssumptions(joint_states=True, expert_kernels="activation", dispatcher="alltoall")

_SYSTEMS: Mapping[SystemName, System] = {
    "run": System("autoparallel run", "eager", False, RUNTIME),
    "megatron": System(
        "Megatron-LM",
        "fused",
        True,
        replace(
            _SHARED,
            recomputed=("core_attn",),
            cast_bytes=4.0,
            regathers=True,
            keeps_casts=True,
            casts_experts=True,
            attention="cudnn",
        ),
    ),
    "torchtitan": System("torchtitan", "compiled", True, _SHARED),
    "deepspeed": System("DeepSpeed", "eager", False, replace(_SHARED, expert_kernels="separate")),
}


def system(name: SystemName) -> System:
    """Return the training system with this name."""
    return _SYSTEMS[name]


def assumptions_of(name: SystemName, precision: Precision) -> CostAssumptions:
    """Return the cost assumptions of a system at a precision.

    >>> [assumptions_of(name, "fp8").keeps_casts for name in SYSTEMS]
    [False, True, False, False]
    """
    own = _SYSTEMS[name].assumptions
    return own if precision == "fp8" else replace(own, keeps_casts=False, casts_experts=False)
