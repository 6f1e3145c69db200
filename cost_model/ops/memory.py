"""Bytes of a training run's states: parameters, gradients, optimizer, by precision and ZeRO.

In: how many parameters a rank would hold without ZeRO, a precision policy, the ZeRO stage
and over how many ranks it shards. Out: bytes on that rank. Source: Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, figure 1,
with the states as PyTorch's fully_shard lays them out: the parameters that the optimizer
steps are the master copy, in full precision, and the copy that computes is gathered from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Precision = Literal["fp32", "bf16", "fp16", "fp8", "fp64"]

OPTIMIZER_STATES = {
    "adamw": 2,
    "adam": 2,
    "lion": 1,
    "sgd-momentum": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "sgd": 0,
}
"""Number of state tensors of a parameter's size that each optimizer keeps per parameter."""


NF4 = "nf4"
"""Format of frozen weights: 4 bits per element, scaled in blocks (``nf4_bytes``)."""

NF4_BLOCK, NF4_GROUP = 64, 64 * 256
"""Elements of a block, which has a scale of 8 bits, and of a group, whose scales have a float32
factor."""


def nf4_bytes(numel: int) -> int:
    """Return the bytes of a weight of ``numel`` elements in NF4: its elements, a scale of 8 bits
    for each block, a factor for each group of scales, and the mean of all scales. Source: Dettmers
    et al. 2023, QLoRA (arXiv:2305.14314), section 3, with the blocks of torchao's ``to_nf4``.

    >>> round(8 * nf4_bytes(4096 * 4096) / 4096**2, 3)
    4.127
    """
    return numel // 2 + numel // NF4_BLOCK + 4 * (numel // NF4_GROUP) + 4


GradientDtype = Literal["master", "compute"]
"""Format in which gradients are summed and held: the master parameters', or the compute dtype."""


Offload = Literal["none", "optimizer", "gradients", "parameters"]
"""States in host memory, each with those before it: master weights and optimizer states; gradients;
the copy of the weights that ZeRO 3 shards. Source: Rajbhandari et al. 2021, "ZeRO-Infinity"."""


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Options for training states in memory. ``gradient_dtype``: format in which gradients are
    summed and held ("master" or "compute"). ``offload``: states in host memory."""

    gradient_dtype: GradientDtype = "master"
    offload: Offload = "none"

    @property
    def moves_gradients(self) -> bool:
        """True if gradients are in host memory."""
        return self.offload in ("gradients", "parameters")

    @property
    def moves_parameters(self) -> bool:
        """True if the parameters that ZeRO 3 shards are in host memory."""
        return self.offload == "parameters"


DEFAULT = StateOptions()


class PolicyError(ValueError):
    """Error for an unknown precision or optimizer, or for a ZeRO stage that is not possible."""


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """Bytes per parameter of each training state, for one precision and one optimizer.
    ``parameter_bytes``: master weights, which the optimizer updates; ``gradient_bytes``: the
    reduced gradient; ``optimizer_bytes``: the optimizer's states; ``gathered_bytes``: the copy in
    ``compute_dtype`` that forward and backward use; ``host_bytes``: master weights and optimizer
    states that are offloaded to the host's memory. With offload ``parameter_bytes`` counts the
    device's copy of the weights, and ``optimizer_bytes`` is 0. ``moves_gradients``,
    ``moves_parameters``: summed gradients, and shards of ZeRO 3, are in the host's memory too."""

    name: str
    compute_dtype: str
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    host_bytes: int = 0
    moves_gradients: bool = False
    moves_parameters: bool = False

    @property
    def is_mixed(self) -> bool:
        """True if forward and backward use weights in another format than the master weights."""
        return self.gathered_bytes != self.parameter_bytes

    def in_host(self, zero: int, shards: int) -> int:
        """Return the bytes per parameter in the host's memory, under ZeRO stage ``zero`` over
        ``shards`` ranks."""
        gradient = self.gradient_bytes * self.moves_gradients
        return self.host_bytes + gradient + self.moved_shard(zero, shards)

    def moved_shard(self, zero: int, shards: int) -> int:
        """Return the bytes per parameter of a shard that ZeRO gathers from the host's memory, 0 if
        it is on the device."""
        return self.gathered_bytes * (self.moves_parameters and zero == 3 and shards > 1)

    @property
    def on_device(self) -> PrecisionPolicy:
        """Policy of parameters whose gradients stay on the device until all ranks' are summed."""
        return replace(self, moves_gradients=False)

    @property
    def frozen(self) -> PrecisionPolicy:
        """Policy of parameters that are not trained: bytes for the forward's copy alone."""
        return replace(
            self,
            parameter_bytes=self.gathered_bytes,
            gradient_bytes=0,
            optimizer_bytes=0,
            host_bytes=0,
            moves_gradients=False,
            moves_parameters=False,
        )


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes on one rank of the training states that it holds from step to step. ``parameters``
    counts the master weights and, if one is kept, the gathered copy for forward and backward."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def policy(
    precision: str, optimizer: str = "adamw", options: StateOptions = DEFAULT
) -> PrecisionPolicy:
    """Return the bytes per parameter for a precision ("fp32", "bf16", "fp16", "fp8", "fp64") and an
    optimizer. bf16, fp16 and fp8 are mixed: float32 master weights, gradients reduced and kept in
    float32, compute in half precision; in fp8, values are bfloat16 and matrix products cast their
    factors to 8 bits. With ``options.gradient_dtype`` "compute", gradients are summed and kept in
    half precision and cast for the optimizer's step. Raises ``PolicyError`` for unknown names.

    >>> policy("bf16", "adamw")  # doctest: +NORMALIZE_WHITESPACE
    PrecisionPolicy(name='bf16', compute_dtype='bfloat16', parameter_bytes=4,
                    gradient_bytes=4, optimizer_bytes=8, gathered_bytes=2, host_bytes=0,
                    moves_gradients=False, moves_parameters=False)
    >>> offloaded = policy("bf16", "adamw", StateOptions("compute", "optimizer"))
    >>> offloaded.parameter_bytes + offloaded.gradient_bytes, offloaded.host_bytes
    (4, 12)
    """
    if optimizer not in OPTIMIZER_STATES:
        known = ", ".join(OPTIMIZER_STATES)
        raise PolicyError(f"unknown optimizer {optimizer!r}: expected one of {known}")
    dtypes = {
        "fp32": ("float32", 4, 4),
        "bf16": ("bfloat16", 4, 2),
        "fp16": ("float16", 4, 2),
        "fp8": ("bfloat16", 4, 2),
        "fp64": ("float64", 8, 8),
    }
    if precision not in dtypes:
        raise PolicyError(
            f"unknown precision {precision!r}: expected fp32, bf16, fp16, fp8 or fp64"
        )
    compute_dtype, master, gathered = dtypes[precision]
    states = OPTIMIZER_STATES[optimizer] * master
    gradient = gathered if options.gradient_dtype == "compute" else master
    if options.offload != "none":
        moves = options.moves_gradients, options.moves_parameters
        sizes = gathered, gradient, 0, gathered, master + states
        return PrecisionPolicy(precision, compute_dtype, *sizes, *moves)
    return PrecisionPolicy(precision, compute_dtype, master, gradient, states, gathered)


def policy_on(kind: str, rules: PrecisionPolicy) -> PrecisionPolicy:
    """Return ``rules`` (bytes per parameter) adapted to a kind of device ("cpu", "cuda"): on a CPU,
    offloaded bytes count as the device's, because its memory is the host's."""
    if kind != "cpu" or not rules.host_bytes:
        return rules
    own = rules.host_bytes
    return replace(rules, optimizer_bytes=own, moves_gradients=False, moves_parameters=False)


def state_bytes(
    numel_local: int,
    policy: PrecisionPolicy,
    zero: int,
    shards: int,
    *,
    wrapped: bool = False,
) -> StateBytes:
    """Return the bytes that one rank holds for the training states of ``numel_local`` parameters
    (its part under tensor and pipeline parallelism) with ZeRO stage ``zero`` over ``shards`` ranks.

    Stage 1 shards the optimizer's states and the master weights, stage 2 the gradients too; in both
    (and in stage 0 with mixed precision) a gathered copy of the weights is kept. Stage 3 gathers
    one block (layer) at a time: see ``exchange_bytes``. ``wrapped``: FSDP2's fully_shard holds the
    parameters even if ``shards`` is 1; stages 1 and 2 then keep a gathered copy on a single rank
    too.

    >>> state_bytes(1000, policy("fp32"), 0, 1)
    StateBytes(parameters=4000, gradients=4000, optimizer=8000)
    >>> state_bytes(1000, policy("fp32"), 3, 4).total
    4000
    """
    if zero not in (0, 1, 2, 3) or shards < 1:
        raise PolicyError(f"ZeRO stage {zero} is not possible over {shards} ranks")
    part = -(-numel_local // shards) if zero >= 1 else numel_local
    held_by_fsdp = zero >= 1 and (wrapped or shards > 1)
    has_copy = zero < 3 and (policy.is_mixed or held_by_fsdp)
    copy = numel_local * policy.gathered_bytes if has_copy else 0
    gradients = part if zero >= 2 else numel_local
    own = 0 if policy.moved_shard(zero, shards) else policy.parameter_bytes
    return StateBytes(
        parameters=part * own + copy,
        gradients=gradients * policy.gradient_bytes * (not policy.moves_gradients),
        optimizer=part * policy.optimizer_bytes,
    )


def exchange_bytes(numel: int, policy: PrecisionPolicy, zero: int, shards: int) -> float:
    """Return half of the bytes of the buffers with which ``numel`` parameters of one block (layer)
    and their gradients are exchanged over ``shards`` ranks, in addition to the training states. It
    is half, as the buffers serve the running block and the next: the caller adds both halves.

    With ZeRO 3 the buffers hold the gathered parameters of the running and the next block; with
    ZeRO 2 and 3 the whole gradient of the running block, and with all stages the buffer in which
    the previous block's gradient is reduced. Gradients and shards on their way to and from host
    memory are one rank's part of either block. Source: FSDP2's parameter groups, and the buckets of
    ``runtime.update.gradients``.

    >>> exchange_bytes(1000, policy("fp32"), 3, 4), exchange_bytes(1000, policy("fp32"), 0, 4)
    (8000.0, 2000.0)
    """
    moved = policy.gradient_bytes * policy.moves_gradients + policy.moved_shard(zero, shards)
    moving = numel * moved / (shards if zero else 1)
    if shards < 2:
        return moving
    buffer = numel * policy.gradient_bytes / 2 + moving
    gradient = numel * policy.gathered_bytes / 2 if zero >= 2 else 0.0
    gathered = numel * policy.gathered_bytes if zero == 3 else 0
    return buffer + gradient + gathered


def sent_bytes(
    numel: int, policy: PrecisionPolicy, zero: int, shards: int, num_microbatches: int = 1
) -> float:
    """Return the bytes that one rank sends per step for data parallelism of ``numel`` parameters
    over ``shards`` ranks, with ZeRO stage ``zero``. An all-gather or reduce-scatter of S bytes over
    N ranks sends S(N - 1)/N, an all-reduce twice as much. ZeRO 0 all-reduces gradients once per
    step, ZeRO 1 reduce-scatters them once, ZeRO 2 and 3 in every micro-batch. ZeRO 1 and 2 gather
    parameters once per step, ZeRO 3 twice per micro-batch. Source: Rajbhandari 2020, section 7.

    >>> half = policy("bf16", "adamw", StateOptions("compute"))
    >>> [sent_bytes(1000, half, zero, 1000) / 1998 for zero in range(4)]
    [2.0, 2.0, 2.0, 3.0]
    """
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * num_microbatches}[zero]
    sums = {0: 2, 1: 1, 2: num_microbatches, 3: num_microbatches}[zero]
    whole = numel * (gathers * policy.gathered_bytes + sums * policy.gradient_bytes)
    return whole * (shards - 1) / shards


def allocated_bytes(num_bytes: int, kind: Literal["cuda", "cpu"]) -> int:
    """Return the bytes allocated for a tensor of ``num_bytes``: a multiple of 512 (CUDA) or 64
    (CPU). Source: c10/cuda/CUDACachingAllocator.cpp (kMinBlockSize); c10/core/alignment.h.

    >>> allocated_bytes(513, "cuda"), allocated_bytes(0, "cuda")
    (1024, 0)
    """
    step = 512 if kind == "cuda" else 64
    return -(-num_bytes // step) * step


_FRAGMENTATION = {"cuda": 0.03, "cpu": 0.0}


def fragmentation_bytes(kind: Literal["cuda", "cpu"], moving_bytes: float) -> float:
    """Return the bytes that torch's allocator loses to fragmentation, given the ``moving_bytes``
    that are allocated and freed within a step. On CUDA this is 3 % of them, an estimate: the
    caching allocator takes memory in segments (2 MiB for tensors up to 1 MiB, 20 MiB up to 10 MiB,
    multiples of 2 MiB above; c10/core/AllocatorConfig.h) and cannot always use the rest of a
    segment. Training states, which are allocated once, do not count. 0 on a CPU, where malloc
    returns pages."""
    return _FRAGMENTATION[kind] * moving_bytes


_CUDA_CONTEXT_BYTES = 600_000_000
_CUDA_WORKSPACE_BYTES = 100_000_000
_NCCL_COMMUNICATOR_BYTES = 250_000_000


def reserve_bytes(kind: Literal["cuda", "cpu"], num_groups: int = 1) -> int:
    """Return the bytes of a device that are occupied beside the model's tensors, with
    ``num_groups`` process groups: on CUDA the context (0.4 to 0.6 GB from Volta to Hopper), the
    workspaces of cuBLAS (8 MiB per stream, 32 MiB on Hopper) and cuDNN, and NCCL's buffers (4 MiB
    per channel, peer and protocol; estimated). 0 on a CPU: a process's memory for torch itself (0.2
    to 0.4 GB) is not counted, nor is it part of a device's usable memory.

    >>> reserve_bytes("cuda", 2)
    1200000000
    """
    if kind == "cpu":
        return 0
    return _CUDA_CONTEXT_BYTES + _CUDA_WORKSPACE_BYTES + communicator_bytes(kind, num_groups)


def communicator_bytes(kind: Literal["cuda", "cpu"], count: int) -> int:
    """Return the bytes of a device that buffers of ``count`` NCCL communicators take; 0 on a CPU.

    >>> communicator_bytes("cuda", 4), communicator_bytes("cpu", 4)
    (1000000000, 0)
    """
    return 0 if kind == "cpu" else count * _NCCL_COMMUNICATOR_BYTES
