"""A pipeline stage as a module: its blocks in order on local tensors.

In: a ``StageProgram`` (this rank's blocks and the parameters they hold) and the stage's
device mesh. Out: a module whose forward takes local values by key and returns the values
that leave the stage, and the loss. Its parameters go by the model's own names
(``StageModule.by_name``).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ...cost_model.ops.memory import DEFAULT, StateOptions
from ...passes.backward.recomputing import Recomputing
from ...passes.backward.replayed import is_tiled
from ...passes.backward.weight_gradients import WeightGradients, defer
from ...passes.local.localize import held_path
from ...passes.ops.collectives import local_tensor
from ...planner.graph.layout import Region, local_region, region_shape
from ...planner.kernels.recompute import is_offloaded, without_offload
from ...planner.plan import Precision, Recompute
from ..messages.communicator import BackwardPosition
from ..messages.device_queue import queue_of
from .offloading import HostSums, OffloadedValues, Offloader
from .parameters import Formats, StageParameter, dtensor_placements, get_by_path, make_parameter
from .zero import apply_zero

if TYPE_CHECKING:
    from ...passes.local.stage_program import BlockProgram, StageProgram
    from ...passes.ops.random_ops import Draws
    from .compiling import BlockCompiler

aten = torch.ops.aten


class StageBlock(nn.Module):
    """Module of one block of a stage: runs its graph, recomputed in the backward if the plan says
    so. ``deferring`` is None, or a store of weight gradients and the block's position: the backward
    then leaves gradients of weights to that store. ``deferred`` names these weights within the
    block."""

    def __init__(
        self,
        program: BlockProgram,
        draws: Draws,
        deferring: tuple[WeightGradients, int] | None = None,
        shared: Container[str] = (),
        compiler: BlockCompiler | None = None,
        position: BackwardPosition | None = None,
        offloader: Offloader | None = None,
    ) -> None:
        super().__init__()
        self._offloader = offloader
        self.name = self.block_name = program.name
        self.inputs = program.inputs
        self.outputs = program.outputs
        self.recompute: Recompute = program.recompute
        self.is_kept = without_offload(program.recompute) == "none"
        self.graph = program.module
        self.graphs: list[fx.GraphModule] = [program.module]
        self.part = 0
        self.draws = draws
        self.is_random = _is_random(program.module)
        self._deferring, self._shared_inputs = deferring, shared
        self._compiler = compiler
        self._position = position or BackwardPosition()
        self.deferred = self._defer(program)
        self._recomputing = self._find_recomputing()
        self._compile(program.module)

    def _find_recomputing(self) -> Recomputing | None:
        """Return the object that lets a backward recompute only a part of the block's ops; None if
        plain ``checkpoint`` serves or nothing is recomputed.

        Plain ``checkpoint`` does not serve a block with deferred weight gradients: an op that
        defers them keeps its inputs after it has run, and the recomputation would not end with that
        op.
        """
        is_plain = self.recompute == "full" and not self.deferred and not is_tiled(self.graph)
        if self.is_kept or is_plain:
            return None
        found = Recomputing.of(self.recompute)
        found.mark(self.graph)
        return found

    def _compile(self, graph: fx.GraphModule) -> None:
        if self._compiler is not None:
            in_parts = self._recomputing is not None
            self._compiler.compile(graph, self.name, in_parts=in_parts)

    def _defer(self, program: BlockProgram) -> frozenset[str]:
        """Change ``program``'s graph so that its backward defers weight gradients; return these
        weights' names."""
        if self._deferring is None:
            return frozenset()
        nodes = [node for node in program.module.graph.nodes if node.op == "placeholder"]
        names = zip(nodes, program.inputs, strict=True)
        weights = frozenset(str(node.target) for node, key in names if key in self._shared_inputs)
        return defer(program.module, *self._deferring, weights)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the block's graph number ``part`` (there is one for each slice of sequences or shape
        of batches); return its outputs in the order of ``outputs``."""
        graph = self.graphs[self.part]
        if not torch.is_grad_enabled():
            return tuple(graph(*inputs))
        before = None if self._offloader is None else self._offloader.last
        offloader = self._offloader if is_offloaded(self.recompute) else None
        values = None if offloader is None else offloader.begin(graph, self.inputs, inputs)
        with nullcontext() if values is None else saved_tensors_hooks(*values.hooks):
            if self.is_kept:
                outputs = tuple(graph(*inputs))
            else:
                outputs = self._recomputed(graph, values, *inputs)
        if values is not None:
            values.owner.send(values)
        # fully_shard hooks a block's outputs and warns of views, which may be written to.
        outputs = tuple(_own(o) if o._base is not None and o.requires_grad else o for o in outputs)
        for output in outputs:
            if output.requires_grad:
                output.register_hook(partial(self._begin_backward, values, before))
                break
        return outputs

    def _begin_backward(
        self, values: OffloadedValues | None, before: OffloadedValues | None, _gradient: Tensor
    ) -> None:
        """Note which block's backward begins; fetch the block's offloaded ``values``, if they are
        not yet there, and those of the offloaded block ``before`` it."""
        self._position.block = self.block_name
        for each in (values, before):
            if each is not None:
                each.fetch()

    def add_program(self, program: BlockProgram) -> None:
        """Add another graph over this block's parameters, for another slice of sequences or another
        shape of batches. It runs when ``part`` is set to its number."""
        graph, deferred = program.module, self._defer(program)
        assert deferred == self.deferred, self.name
        for name, op in graph.named_children():
            if name not in self.graph._modules:  # equal names mean the same op
                self.graph.add_module(name, op)
        for held in ("_parameters", "_buffers", "_modules"):
            graph.__dict__[held] = self.graph.__dict__[held]
        if self._recomputing is not None:
            self._recomputing.mark(graph)
        self._compile(graph)
        self.graphs.append(graph)

    def _recomputed(
        self, graph: fx.GraphModule, values: OffloadedValues | None, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        contexts: dict[str, Any] = {}
        if self._recomputing is not None:
            hooks = None if values is None else values.hooks
            contexts["context_fn"] = partial(self._recomputing.contexts, hooks)
        key, microbatch = self.draws.key, self.draws.microbatch

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            with self.draws.repeated(key, microbatch):
                return tuple(graph(*inputs))

        outputs: tuple[Tensor, ...] = checkpoint(
            run,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=self.is_random,
            **contexts,
        )
        return outputs


class _Own(torch.autograd.Function):
    """Identity whose result shares its input's memory without being a view for autograd."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _own(tensor: Tensor) -> Tensor:
    result: Tensor = _Own.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def _is_random(module: nn.Module) -> bool:
    """Tell whether a block's graph draws numbers from the global random generator."""
    if not isinstance(module, fx.GraphModule):
        return True
    return any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        or node.target in (aten.dropout.default, aten.native_dropout.default)
        for node in module.graph.nodes
    )


class StageModule(nn.Module):
    """Module of the part of a stage that one rank holds: its blocks, run in order.

    ``forward(values)`` takes this rank's local inputs, constants and received values by key;
    it returns the values that the stage sends, and the loss where the stage computes it. Parameters
    used by several blocks are held here and passed to the blocks as values.
    """

    def __init__(
        self,
        program: StageProgram,
        device_mesh: DeviceMesh,
        *,
        zero: int,
        precision: Precision,
        states: StateOptions = DEFAULT,
        device: torch.device | None = None,
        splits_backward: bool = False,
        compiler: BlockCompiler | None = None,
    ) -> None:
        """Make the stage. If ``splits_backward``, its backward computes the weights' gradients
        separately, later. A ``compiler``, if given, compiles the blocks' ops."""
        super().__init__()
        formats = Formats.of(precision, states)
        self.program = program
        self.programs = [program]
        self.device_mesh = device_mesh
        self.zero = zero
        self.device = device if device is not None else torch.device(device_mesh.device_type)
        self.weight_gradients = WeightGradients() if splits_backward else None
        self.backward_position = BackwardPosition()
        is_offloading = any(is_offloaded(block.recompute) for block in program.blocks)
        self.offloader = Offloader.of(program, queue_of(self.device)) if is_offloading else None
        self.blocks = nn.ModuleList(self._make_blocks(compiler))
        self.calls = nn.ModuleList(self.blocks)
        """The modules that run the blocks: each block, or its wrapper (``zero.GatheredBlock``)."""
        self.by_name: dict[str, StageParameter] = {}
        self._is_plain = zero == 0 and not _is_split(program)
        self._shared: dict[str, str] = {}
        make = partial(
            make_parameter,
            program=program,
            device_mesh=device_mesh,
            zero=zero,
            formats=formats,
            device=self.device,
            is_plain=self._is_plain,
        )
        self._register_parameters(make)
        self.sums = HostSums(queue_of(self.device)) if states.moves_gradients else None
        for each in self.by_name.values():  # others are still to be summed over ranks
            each.sums = None if each.reduce_axes or not each.spec.requires_grad else self.sums
        self.buffer_regions = self._register_buffers()
        self.reductions = apply_zero(self, formats)
        self.with_gradient: set[int] = set()
        """Ids of the shards with a gradient from split backwards, since gradients were dropped."""
        self._changed: dict[str, Tensor] = {}
        self._changes: dict[str, Tensor] = {}
        self.before_block: Callable[[int], None] = lambda block: None
        """Callback in the forward before each block, which then reads its parameters."""
        self._leaving = [_leaving(program)]
        self._last_use = [_last_uses(program)]

    def _make_blocks(self, compiler: BlockCompiler | None) -> Iterator[StageBlock]:
        program, store = self.program, self.weight_gradients
        # fully_shard ties the gradients of a block's inputs together: none may come alone.
        shared = {n for n, p in program.parameters.items() if p.shared and self.zero == 0}
        for position, block in enumerate(program.blocks):
            deferring = None if store is None else (store, position)
            yield StageBlock(
                block,
                program.draws,
                deferring,
                shared,
                compiler,
                self.backward_position,
                self.offloader,
            )

    @property
    def is_fully_sharded(self) -> bool:
        """Tell whether ``fully_shard`` holds parameters of the stage (ZeRO 1 to 3)."""
        return self.reductions is not None

    @property
    def deferred(self) -> frozenset[str]:
        """The names of the parameters whose gradients the backward leaves to be computed later."""
        names = {held_path(name): name for name in self.by_name}
        return frozenset(
            names.get(name, name)
            for block in self.blocks
            if isinstance(block, StageBlock)
            for name in block.deferred
        )

    def _register_parameters(self, make: Callable[..., StageParameter]) -> None:
        for position, block in enumerate(self.program.blocks):
            for name in block.parameters:
                declared = self.program.parameters[name]
                if declared.shared:
                    continue
                parameter = make(name, declared)
                parameter.block = position
                holder, attribute = get_by_path(block.module, held_path(name))
                holder.register_parameter(attribute, _registered(parameter))
                self.by_name[name] = parameter
        for index, (name, declared) in enumerate(self.program.parameters.items()):
            if declared.shared:
                parameter = make(name, declared)
                self._shared[name] = f"shared_{index}"
                self.register_parameter(self._shared[name], _registered(parameter))
                self.by_name[name] = parameter

    def _register_buffers(self) -> dict[str, Region]:
        """Allocate this rank's part of every buffer of the stage; return the parts' index ranges by
        name."""
        regions = {}
        owners = {name: block for block in self.program.blocks for name in block.buffers}
        for index, (name, held) in enumerate(self.program.buffers.items()):
            region = local_region(
                held.spec.shape, held.layout, self.program.mesh, self.program.coordinates
            )
            dtype = getattr(torch, held.spec.dtype)
            memory = torch.zeros(region_shape(region), dtype=dtype, device=self.device)
            if name in owners:
                holder, attribute = get_by_path(owners[name].module, held_path(name))
                holder.register_buffer(attribute, memory)
            else:
                self._shared[name] = f"shared_buffer_{index}"
                self.register_buffer(self._shared[name], memory)
            regions[name] = region
        return regions

    def buffer(self, name: str) -> Tensor:
        """Return this rank's part of buffer ``name``."""
        if name in self._shared:
            return self.get_buffer(self._shared[name])
        owner = next(block for block in self.program.blocks if name in block.buffers)
        return owner.module.get_buffer(held_path(name))

    def region_of(self, name: str) -> Region:
        """Return the index ranges of a parameter or buffer that this rank holds."""
        parameter = self.by_name.get(name)
        return self.buffer_regions[name] if parameter is None else parameter.region

    def held_names(self) -> tuple[str, ...]:
        """Return the names of all parameters and buffers of the stage."""
        return (*self.by_name, *self.buffer_regions)

    def fill(self, name: str, part: Tensor) -> None:
        """Copy ``part``, this rank's part of parameter or buffer ``name``, into its memory, cast to
        its dtype."""
        parameter = self.by_name.get(name)
        with torch.no_grad():
            if parameter is None:
                self.buffer(name).copy_(part)
            else:
                parameter.fill(part)

    def keep_buffers(self) -> None:
        """Copy the new values that forwards have computed for buffers into the buffers; to be
        called when no backward needs their old values."""
        with torch.no_grad():
            for name, value in self._changed.items():
                self.buffer(name).copy_(value)
        self.forget_buffers()

    def next_buffer(self, name: str) -> Tensor:
        """Return this rank's part of a buffer with the value that the last forward has computed for
        it."""
        return self._changed.get(name, self.buffer(name))

    def forget_buffers(self) -> None:
        """Drop the new values that forwards have computed for buffers."""
        self._changed.clear()
        self._changes.clear()

    def changing_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that forwards in training change, by name, each in this rank's own
        memory. One that no rank splits is a plain tensor, as all other buffers of a model are: a
        script's own updates (of an expert's bias, from counts of tokens) compute with both."""
        held, names = self.program.buffers, self.program.updates
        split = [n for n in names if any(each.is_shard for each in held[n].layout)]
        return {n: self.buffer(n) for n in names} | self.distributed_buffers(split)

    def distributed_buffers(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the buffers ``names``, sharing memory with this rank's parts: as plain tensors in
        a stage without sharding, else as DTensors."""
        held = self.program.buffers
        return {
            name: self.buffer(name)
            if self._is_plain
            else DTensor.from_local(
                self.buffer(name),
                self.device_mesh,
                dtensor_placements(held[name].layout),
                run_check=False,
            )
            for name in names
        }

    def owner(self, name: str) -> tuple[nn.Module, str]:
        """Return the module that holds parameter ``name``, and the name of its attribute there."""
        parameter = self.by_name[name]
        if parameter.block is None:
            return self, self._shared[name]
        return get_by_path(self.program.blocks[parameter.block].module, held_path(name))

    def add_program(self, program: StageProgram) -> int:
        """Add another program over the same parameters and blocks, for another slice of sequences
        or another shape of batches. Return its number, which ``forward`` takes as ``part``."""
        for block, own in zip(self.blocks, program.blocks, strict=True):
            assert isinstance(block, StageBlock)
            block.add_program(own)
        self.programs.append(program)
        self._leaving.append(_leaving(program))
        self._last_use.append(_last_uses(program))
        return len(self.programs) - 1

    def forward(self, values: Mapping[str, Tensor], part: int = 0) -> dict[str, Tensor]:
        """Run the stage's program number ``part`` on this rank's values, by key; return the values
        that it sends, outputs and the loss, by key. New values of buffers are stored until
        ``keep_buffers``."""
        known, program = dict(values), self.programs[part]
        if self.offloader is not None:
            self.offloader.last = None
        last_use = self._last_use[part]
        self.before_block(0)
        for name, attribute in self._shared.items():
            known[name] = local_tensor(getattr(self, attribute))
            if name in self.program.updates:  # may be written before the backward
                known[name] = known[name].clone()
        if not self.program.updates_once:
            known |= {n: v for n, v in self._changed.items() if n not in self.program.means}
        for position, block in enumerate(self.blocks):
            block.part = part  # type: ignore[assignment]
            self.before_block(position)
            own = program.blocks[position]
            outputs = self.calls[position](*(known[key] for key in own.inputs))
            known.update(zip(own.outputs, outputs, strict=True))
            for key in last_use.get(position, ()):
                known.pop(key, None)
        if self.offloader is not None:
            self.offloader.last = None
        for name, key in program.updates.items():
            self._changed[name] = self._updated(program, name, known[key].detach())
        return {key: known[key] for key in self._leaving[part]}

    def _updated(self, program: StageProgram, name: str, new: Tensor) -> Tensor:
        """Return a buffer's value after this micro-batch and the step's earlier ones. ``new``: the
        value that the micro-batch makes of the one that it reads."""
        count = program.num_microbatches
        if count == 1 or name not in program.means or new.dtype == torch.bool:
            return new
        old = self.buffer(name)
        total = self._changes.get(name, 0) + (new - old)
        self._changes[name] = total
        return old + (total / count if new.is_floating_point() else total // count)


def _registered(parameter: StageParameter) -> nn.Parameter:
    return parameter.master if parameter.leaf is None else parameter.leaf


def _is_split(program: StageProgram) -> bool:
    """Tell whether a layout of the stage splits any parameter or buffer over ranks."""
    held = (*program.parameters.values(), *program.buffers.values())
    return any(placement.is_shard for each in held for placement in each.layout)


def _leaving(program: StageProgram) -> tuple[str, ...]:
    """Return the keys of the values that a stage returns: outputs, values sent to other stages, the
    loss."""
    sent = [*program.kept, *(boundary.key for boundary in program.sends)]
    return tuple(dict.fromkeys([*sent, *([] if program.loss is None else [program.loss])]))


def _last_uses(program: StageProgram) -> dict[int, list[str]]:
    """Map the position of each block to the keys of the values that may be freed after it."""
    kept = {*_leaving(program), *program.updates.values()}
    last = {
        key: position
        for position, block in enumerate(program.blocks)
        for key in block.inputs + block.outputs
    }
    uses: dict[int, list[str]] = {}
    for key, position in last.items():
        if key not in kept:
            uses.setdefault(position, []).append(key)
    return uses
