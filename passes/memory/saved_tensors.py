"""Exact bytes of a stage's activations: its own program run on fake tensors.

In: one rank's ``StageProgram``, as the runtime gets it. Out: the bytes that one micro-batch keeps
from its forward to its backward, and the peak of each. The blocks run under ``FakeTensorMode`` with
invented results of collectives, so nothing is allocated or modelled: autograd itself saves tensors,
recomputed blocks are recomputed, and a storage with any number of views counts once.

Parameters, their gradients and bytes held for the whole step are counted separately. Allocations
inside of a kernel are not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ...cost_model.ops.memory import policy
from ...planner.graph.graph import Blocks, Graph
from ...planner.graph.layout import Layout, Mesh, local_shape
from ...planner.kernels.recompute import without_offload
from ...planner.plan import Plan
from ..backward.recomputing import Recomputing
from ..backward.weight_gradients import WeightGradients, defer
from ..local.stage_program import BlockProgram, StageProgram, build_stage
from ..ops.collectives import UNKNOWN, Parts, Running
from .state_traffic import GRADIENTS, Library, StateTraffic, gradient_of, set_gradient
from .storages import OTHER, SAVED, LiveBytes

PARAMETERS, BUFFERS, INPUTS, RECOMPUTED = "parameters", "buffers", "inputs", "recomputation"


@dataclass(frozen=True, slots=True)
class Moment:
    """Position of a micro-batch in a training step. ``is_first``: no gradients exist before its
    backward; ``is_last``: its backward completes the gradients."""

    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Bytes of one micro-batch on one rank. ``kept``: bytes from forward to backward, ``inputs`` of
    which are batch inputs. ``forward`` and ``backward``: bytes by category at the peak of each,
    without parameters and other micro-batches. With deferred weight gradients, ``late`` are the
    bytes kept for them, ``weights`` the peak of computing them, and ``backward`` the peak of the
    backward of inputs alone."""

    kept: int
    inputs: int
    forward: Mapping[str, int]
    backward: Mapping[str, int]
    late: int = 0
    weights: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _End:
    """Output of a stage at which its backward starts, with the shape and dtype of its gradient.
    ``held``: the output itself if it is the loss, else None."""

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    held: Tensor | None


@dataclass(frozen=True)
class FakeRanks:
    """Communicator that sends nothing: its collectives return tensors of the right shape, with the
    allocations of the runtime's collectives, to measure memory on one process."""

    mesh: Mesh
    coordinates: tuple[int, ...]
    library: Library = "gloo"

    def size(self, axis: int) -> int:
        return self.mesh.shape[axis]

    def coordinate(self, axis: int) -> int:
        return self.coordinates[axis]

    def all_reduce(self, tensor: Tensor, axis: int, op: Literal["sum", "max"] = "sum") -> Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def all_gather(self, tensor: Tensor, axis: int, dim: int) -> Tensor:
        if self.size(axis) == 1:
            return tensor.detach()
        parts = tensor.new_empty((self.size(axis), *tensor.shape))
        return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)

    def reduce_scatter(self, tensor: Tensor, axis: int, dim: int) -> Tensor:
        if self.size(axis) == 1:
            return tensor.detach()
        parts = torch.stack(tensor.detach().chunk(self.size(axis), dim))
        result = torch.empty_like(parts[0])
        if self.library == "gloo":
            parts.clone()
        return result

    def all_to_all(self, tensor: Tensor, axis: int, split_dim: int, concat_dim: int) -> Tensor:
        if self.size(axis) == 1:
            return tensor.detach()
        parts = torch.stack(tensor.detach().chunk(self.size(axis), split_dim))
        return torch.cat(torch.empty_like(parts).unbind(0), concat_dim)

    def swap(self, tensor: Tensor, axis: int) -> Tensor:
        return torch.empty_like(tensor)

    def parts(
        self, counts: Tensor, axes: tuple[int, ...], gathered: tuple[int, ...] = ()
    ) -> tuple[tuple[Parts, ...], Tensor]:
        """Return no numbers of rows: as many rows are received as are sent."""
        received = counts.repeat(prod(map(self.size, gathered)), 1, 1)
        return (UNKNOWN,) * counts.shape[1], received

    def exchange(self, rows: Tensor, parts: Parts, axes: tuple[int, ...]) -> Running:
        num_received = sum(parts.received) if parts.received else rows.shape[0]
        return Running(rows.new_empty((num_received, *rows.shape[1:])))


class GroupedProducts(TorchFunctionMode):
    """Stand-in for grouped products of float32, which torch does not define for fake tensors: a
    product with the first group's matrix has the same shape and keeps as much."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch._grouped_mm and args[0].dtype == torch.float32:
            return args[0] @ args[1][0]
        return func(*args, **(kwargs or {}))


def run_microbatch(
    graph: Graph,
    blocks: Blocks,
    plan: Plan,
    stage_index: int,
    moment: Moment,
    *,
    splits: bool = False,
) -> StageActivations:
    """Measure the memory of one micro-batch on that rank of the stage which has most rows, on fake
    tensors. ``graph`` has micro-batch size; ``splits``: the backward defers weight gradients.
    Raises the failing op's error if shapes depend on values."""
    stage = plan.stages[stage_index]
    most = stage.shares.index(max(stage.shares)) if stage.shares else 0
    first = (most, *(0,) * (len(stage.mesh.shape) - 1))
    library: Library = "nccl" if plan.cluster.device(stage.devices[0]).kind == "cuda" else "gloo"
    with FakeTensorMode(allow_non_fake_inputs=True), GroupedProducts():
        program = build_stage(
            graph,
            blocks,
            plan,
            stage_index=stage_index,
            coordinates=first,
            communicator=FakeRanks(stage.mesh, first, library),
        )
        states = policy(plan.model.precision, plan.model.optimizer, plan.states)
        live = LiveBytes(step_bytes=1)
        traffic = StateTraffic(
            program, live, zero=stage.zero, policy=states, reduces=moment.is_last, library=library
        )
        return _Run(program, live, traffic, moment, splits=splits).measure()


class _Run:
    """Measurement of the memory of one micro-batch, by executing a stage's blocks on fake tensors;
    each object measures once."""

    def __init__(
        self,
        program: StageProgram,
        live: LiveBytes,
        traffic: StateTraffic,
        moment: Moment,
        *,
        splits: bool,
    ) -> None:
        self.program, self.live, self.traffic, self.moment = program, live, traffic, moment
        self.zero, self.policy = traffic.zero, traffic.policy
        self.shared: dict[str, Tensor] = {}
        self.buffers: list[Tensor] = []
        self.parameters = self._make_parameters()
        self._make_buffers()
        self.put_off = WeightGradients() if splits else None
        self.puts_off = [self._put_off(position) for position in range(len(program.blocks))]
        traffic.watch(self.parameters)
        self.is_backward = False
        self._watch_gradients()

    def _put_off(self, position: int) -> bool:
        """Make the block at ``position`` defer its weight gradients if the stage does so; return
        whether it has any to defer."""
        if self.put_off is None:
            return False
        block, declared = self.program.blocks[position], self.program.parameters
        shared = {name for name, held in declared.items() if held.shared and self.zero == 0}
        places = [node for node in block.module.graph.nodes if node.op == "placeholder"]
        names = zip(places, block.inputs, strict=True)
        weights = frozenset(str(node.target) for node, key in names if key in shared)
        return bool(defer(block.module, self.put_off, position, weights))

    @property
    def _sums_apart(self) -> bool:
        """True if gradients are summed in another dtype than the compute dtype of parameters."""
        return self.policy.gradient_bytes != self.policy.gathered_bytes

    def _watch_gradients(self) -> None:
        """Make parameters' gradients be allocated and accumulated as in the runtime, where they
        exist from the first micro-batch's backward on."""
        for name, parameter in self.parameters.items():
            sharded = bool(self.program.shard_axes(name, self.zero))
            is_reduced_now = sharded and (self.zero >= 2 or self.moment.is_last)
            if not parameter.requires_grad:
                continue
            if not self.moment.is_first and not (sharded and self.zero >= 2):
                dtype = torch.float32 if self._sums_apart else parameter.dtype
                set_gradient(parameter, torch.empty_like(parameter, dtype=dtype))
            casts = self._sums_apart and not is_reduced_now
            hook = partial(self._gradient_came, casts)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _gradient_came(self, casts: bool, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if casts:
            whole, parameter.grad = gradient.float(), None
            before = gradient_of(parameter)
            if before is None:
                set_gradient(parameter, whole)
                self.live.mark((whole,), GRADIENTS)
            else:
                before += whole
        else:
            self.live.mark((gradient,), GRADIENTS)

    def _make_parameters(self) -> dict[str, nn.Parameter]:
        made = {}
        for name, declared in self.program.parameters.items():
            tensor = _empty(self.program.mesh, declared.layout, declared.spec)
            parameter = nn.Parameter(tensor, requires_grad=declared.spec.requires_grad)
            made[name] = parameter
            if declared.shared:
                self.shared[name] = parameter
            for block in self.program.blocks:
                if name in block.parameters and not declared.shared:
                    holder, attribute = _place(block.module, name)
                    setattr(holder, attribute, parameter)
        return made

    def _make_buffers(self) -> None:
        for name, declared in self.program.buffers.items():
            buffer = _empty(self.program.mesh, declared.layout, declared.spec)
            self.buffers.append(buffer)
            owners = [block for block in self.program.blocks if name in block.buffers]
            if not owners:
                self.shared[name] = buffer
            for block in owners:
                holder, attribute = _place(block.module, name)
                setattr(holder, attribute, buffer)

    def _leaves(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return, by name, the tensors that stay on the rank (shared parameters, buffers,
        constants), and the tensors of one micro-batch (inputs, values from other stages)."""
        mesh = self.program.mesh
        stays = dict(self.shared)
        for name, held in self.program.constants.items():
            stays[name] = _empty(mesh, held.layout, held.spec)
        brought = {
            name: _empty(mesh, held.layout, held.spec) for name, held in self.program.inputs.items()
        }
        for boundary in self.program.receives:
            value = _empty(mesh, boundary.target_layout, boundary.spec)
            brought[boundary.key] = value.requires_grad_(boundary.spec.requires_grad)
        return stays, brought

    def measure(self) -> StageActivations:
        stays, brought = self._leaves()
        resident = [value for name, value in stays.items() if name not in self.parameters]
        inputs = [value for key, value in brought.items() if key in self.program.inputs]
        live = self.live
        with live, live.saving():
            live.mark(self.parameters.values(), PARAMETERS)
            held = map(gradient_of, self.parameters.values())
            live.mark([gradient for gradient in held if gradient is not None], GRADIENTS)
            live.mark([*resident, *self.buffers], BUFFERS)
            live.mark(brought.values(), SAVED)
            live.mark(inputs, INPUTS)
            input_bytes = live.by_category.get(INPUTS, 0)
            del inputs
            self.traffic.begin(is_first=self.moment.is_first)
            live.begin_peak()
            outputs = self._forward(stays, brought)
            forward = self._peak()
            ends = self._ends(outputs)
            del outputs
            kept = live.by_category.get(SAVED, 0) + live.by_category.get(INPUTS, 0)
            del brought
            live.begin_peak()
            self._backward(ends)
            backward, late, weights = self._peak(), self._num_kept(), dict[str, int]()
            if self.put_off is not None:
                live.begin_peak()
                self.put_off.run(0)
                self.traffic.stage_backward_ends()
                weights = self._peak()
        return StageActivations(kept, input_bytes, forward, backward, late, weights)

    def _num_kept(self) -> int:
        """Return the bytes that the micro-batch still holds after its input gradients are computed,
        without batch inputs."""
        names = (SAVED, OTHER, RECOMPUTED)
        return sum(self.live.by_category.get(name, 0) for name in names)

    def _peak(self) -> dict[str, int]:
        found = self.live.peak_by_category
        return {name: size for name, size in found.items() if size and name != PARAMETERS}

    def _forward(
        self, stays: Mapping[str, Tensor], brought: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        program = self.program
        known = {**stays, **brought}
        leaving = [boundary.key for boundary in program.sends]
        leaving += [program.loss] if program.loss is not None else []
        last = _last_uses(program, {*leaving, *program.updates.values()})
        for position, block in enumerate(program.blocks):
            inputs = tuple(self._value(known, key) for key in block.inputs)
            self.traffic.forward_begins(position)
            outputs = self._run_block(block, inputs, puts_off=self.puts_off[position])
            self.traffic.forward_ends(position)
            for value in outputs:
                if value.requires_grad:
                    reached = partial(self._backward_reached, position)
                    value.register_hook(reached)  # type: ignore[no-untyped-call]
            known.update(zip(block.outputs, outputs, strict=True))
            del inputs, outputs
            for key in last.get(position, ()):
                known.pop(key, None)
        self.traffic.stage_forward_ends()
        return {key: known[key] for key in leaving}

    def _backward_reached(self, position: int, _: Tensor) -> None:
        self.traffic.backward_begins(position)

    def _run_block(
        self, block: BlockProgram, inputs: tuple[Tensor, ...], *, puts_off: bool
    ) -> tuple[Tensor, ...]:
        if without_offload(block.recompute) == "none":
            return tuple(block.module(*inputs))

        def run(*values: Tensor) -> tuple[Tensor, ...]:
            if not self.is_backward:
                return tuple(block.module(*values))
            with self.live.making(RECOMPUTED):
                return tuple(block.module(*values))

        checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        if block.recompute == "full" and not puts_off:
            return tuple(checkpointed(run, *inputs))
        recomputing = Recomputing.of(block.recompute)
        recomputing.mark(block.module)
        forward, again = recomputing.contexts()
        outputs = checkpointed(run, *inputs, context_fn=lambda: (forward, again))
        self.live.mark(forward.kept, SAVED, over=False)
        return tuple(outputs)

    def _value(self, known: Mapping[str, Tensor], key: str) -> Tensor:
        """Return the block input with this key; a count over all micro-batches, which is not known
        here, is replaced by the scalar 1."""
        found = known.get(key)
        return torch.ones(()) if found is None else found

    def _ends(self, outputs: Mapping[str, Tensor]) -> list[_End]:
        """Return the outputs at which the backward starts. Of values sent to other stages only the
        autograd node is kept, not the tensor, as in ``runtime.step.executor``."""
        self.live.mark(
            (value for key, value in outputs.items() if key == self.program.loss), SAVED, over=False
        )
        return [
            _End(
                get_gradient_edge(value),
                value.shape,
                value.dtype,
                value if key == self.program.loss else None,
            )
            for key, value in outputs.items()
            if value.requires_grad
        ]

    def _backward(self, ends: list[_End]) -> None:
        self.is_backward = True
        self.traffic.stage_backward_begins()
        if ends:
            gradients = [torch.empty(end.shape, dtype=end.dtype) for end in ends]
            edges = [end.edge for end in ends]
            ends.clear()
            with nullcontext() if self.put_off is None else self.put_off.collecting(0):
                torch.autograd.backward(edges, gradients)
        if self.put_off is None:
            self.traffic.stage_backward_ends()


def _last_uses(program: StageProgram, kept: set[str]) -> dict[int, list[str]]:
    """Return for each block's position the keys of the values that no later block uses, without the
    keys in ``kept``."""
    last = {
        key: position
        for position, block in enumerate(program.blocks)
        for key in (*block.inputs, *block.outputs)
    }
    uses: dict[int, list[str]] = {}
    for key, position in last.items():
        if key not in kept:
            uses.setdefault(position, []).append(key)
    return uses


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    prefix, _, attribute = name.rpartition(".")
    return module.get_submodule(prefix), attribute


def _empty(mesh: Mesh, layout: Layout, spec: Any) -> Tensor:
    if spec.stored:
        return torch.empty(spec.stored_bytes, dtype=torch.uint8)
    shape = local_shape(spec.shape, layout, mesh.shape)
    return torch.empty(shape, dtype=getattr(torch, spec.dtype))
