"""Whole weights of a model whose weights are sharded over ranks, for evaluation and export.

In: a rank's part of a model. Out: any of its parameters, and of the buffers that training changes,
as plain tensors on every rank: gathered within the stage that holds them, and sent from its first
rank to the ranks of other stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...passes.local.stage_cut import stage_ranges
from ...passes.ops.collectives import local_tensor
from ...passes.programs.constants import descendants
from ...planner.errors import UsageError
from ...planner.graph.layout import region_slices
from ...planner.variants.replicas import placed_stages
from ..messages.pending_results import arriving_tensor
from ..messages.shared_objects import group_for, occasion_group
from ..parameters.parameters import COMPUTE_DTYPES, MASTER_DTYPES

if TYPE_CHECKING:
    from .rank_model import RankModel


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """Value of a tensor that only other ranks hold: reading it is an error; ``tensor`` has its
    shape and dtype."""

    name: str
    tensor: Tensor

    def value(self) -> Tensor:
        raise UsageError(
            "AP931",
            f"{self.name} is read outside of the layer that it belongs to",
            why="weights are gathered layer by layer, as layers are called",
            fix="with model.unsharded(): ... gathers all of them at once",
        )

    host_value = value


class WholeWeights:
    """Whole tensors of a sharded model by name; calls of ``gather`` are collective over all
    ranks."""

    def __init__(self, model: RankModel) -> None:
        self._model = model
        self._stage_of = _stage_of(model)
        self._is_everywhere = {
            index: len(stage.devices) == dist.get_world_size()
            for index, stage in enumerate(placed_stages(model.plan))
        }
        precision = model.plan.model.precision
        self._computed, self._stepped = COMPUTE_DTYPES[precision], MASTER_DTYPES[precision]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of parameters and of the buffers that training changes."""
        return tuple(self._stage_of)

    def meet(self, tell: Callable[[str], None]) -> None:
        """Wait until all ranks are about to gather weights; return at once if each rank holds the
        whole model."""
        if not self.are_spread:
            return
        tell("waiting until every rank evaluates the model, as all must whose weights are spread")
        dist.barrier(group=occasion_group())

    @property
    def are_spread(self) -> bool:
        """Tell whether a rank needs other ranks' shards to have the whole model."""
        return not all(
            self._is_everywhere[index] and not isinstance(self._held(index, name), DTensor)
            for name, index in self._stage_of.items()
        )

    def gather(self, names: Iterable[str], *, as_computed: bool) -> dict[str, Tensor]:
        """Return the whole values of ``names``, gathered in that order on all ranks. If
        ``as_computed``, parameters are in the dtype that the plan computes in, else (even frozen
        ones) in the dtype that the optimizer updates."""
        whole: dict[str, Tensor] = {}
        works = []
        with torch.no_grad():
            for name in names:
                index = self._stage_of[name]
                held = self._held(index, name)
                parameter = self._model.parameters.get(name)
                if parameter is not None and parameter.spec.stored:
                    value = parameter.value.to(self._computed if as_computed else self._stepped)
                elif held is not None:
                    is_float = name in self._model.parameters and held.is_floating_point()
                    dtype = self._computed if as_computed else self._stepped
                    value = _full(held.to(dtype) if is_float else held)
                else:
                    value = self._empty(name, as_computed=as_computed)
                if not self._is_everywhere[index]:
                    source = placed_stages(self._model.plan)[index].devices[0]
                    value = value.contiguous()
                    works.append(
                        dist.broadcast(value, src=source, group=group_for(value), async_op=True)
                    )
                whole[name] = value
        for work in works:
            if work is not None:
                work.wait()
        return whole

    def share(self, buffers: Mapping[str, Tensor]) -> None:
        """Copy ``buffers`` (by name, in the same order on all ranks) from the first rank of the
        first stage that reads each to all ranks. Collective."""
        program, plan = self._model.program, self._model.plan
        stages, block_of = placed_stages(plan), program.blocks.of_node
        of_block = {at: i for i, positions in enumerate(stage_ranges(plan)) for at in positions}
        for name, buffer in buffers.items():
            readers = descendants(program.graph, name) & block_of.keys()
            first = min((of_block[block_of[reader]] for reader in readers), default=0)
            dist.broadcast(buffer, src=stages[first].devices[0], group=group_for(buffer))

    def is_elsewhere(self, name: str) -> bool:
        """Tell whether this rank holds no part of tensor ``name``."""
        return name in self._stage_of and self._held(self._stage_of[name], name) is None

    def stand_in(self, name: str) -> Tensor:
        """Make a tensor with the shape, dtype and device of tensor ``name``, which only other ranks
        hold; reading its values raises UsageError AP931."""
        spec = self._model.program.graph[name].spec
        like = torch.empty((), dtype=getattr(torch, spec.dtype), device=self._model.device)
        shaped = like.expand(spec.shape)
        return arriving_tensor(_Elsewhere(name, shaped), shaped)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """Cut this rank's part from a whole tensor, distributed like the model's ``name``. A
        DTensor, or a tensor of another shape than the model's, is returned as it is."""
        held = self._held(self._stage_of[name], name)
        if isinstance(whole, DTensor) or held is None or held.shape != whole.shape:
            return whole
        if not isinstance(held, DTensor):
            return whole.detach().to(held)
        return DTensor.from_local(
            whole.detach()[self._box(name)].to(held.to_local()),
            held.device_mesh,
            held.placements,
            run_check=False,
            shape=held.shape,
            stride=held.stride(),
        )

    def is_current(self, name: str, whole: Tensor) -> bool:
        """Tell whether this rank's part of ``name`` (if it has one) equals the same part of
        ``whole``."""
        held = self._held(self._stage_of[name], name)
        if held is None:
            return True
        if whole.shape != held.shape:
            return False
        local = local_tensor(held).detach()
        return torch.equal(whole.detach()[self._box(name)].to(local), local)

    def put(self, name: str, whole: Tensor) -> None:
        """Copy this rank's part of the whole tensor ``whole`` into the model's tensor ``name``."""
        held = self._held(self._stage_of[name], name)
        if held is not None:
            with torch.no_grad():
                local_tensor(held).copy_(whole[self._box(name)])

    def _box(self, name: str) -> tuple[slice, ...]:
        """Return the slices that cut this rank's part from the whole tensor ``name``."""
        stage = self._model.stages[self._stage_of[name]]
        return region_slices(stage.region_of(name))

    def _held(self, index: int, name: str) -> Tensor | None:
        """Return this rank's tensor ``name`` of stage ``index``; None if it lacks the stage."""
        stage = self._model.stages.get(index)
        if stage is None:
            return None
        if name not in stage.by_name:
            return stage.changing_buffers()[name]
        return stage.by_name[name].master

    def _empty(self, name: str, *, as_computed: bool) -> Tensor:
        node = self._model.program.graph[name]
        dtype = getattr(torch, node.spec.dtype)
        if node.kind == "parameter" and not as_computed and dtype.is_floating_point:
            dtype = self._stepped
        return torch.empty(node.spec.shape, dtype=dtype, device=self._model.device)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _stage_of(model: RankModel) -> dict[str, int]:
    """Map the names of parameters and changing buffers, in graph order, to the first stage that
    holds each."""
    program, plan = model.program, model.plan
    ranges = stage_ranges(plan)
    of_block = {at: index for index, positions in enumerate(ranges) for at in positions}
    position = program.blocks.of_node
    found = {
        name: of_block[position[name]]
        for name in position
        if program.graph[name].kind == "parameter"
    }
    for name, ref in program.graph.updates.items():
        found[name] = of_block[position[ref.name]]
    return found
