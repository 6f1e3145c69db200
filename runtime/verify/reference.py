"""Training steps on one device: the reference that a plan's run is compared with.

In: the plain model and global batches. Out: a ``Reference``.

``run_replay`` makes the updates of an asynchronous schedule. The rule is taken from the papers, not
from the action table. Of S stages, with w[s](v) the weights of stage s after v updates of a step,
the gradient of update u, counted from 0, is taken at

=============  =====================================================================
pipedream      w[s](max(0, u - (S - 1 - s)))
pipedream-2bw  w[s](max(0, u - 1))
ampnet         the forward at w[s](max(0, u - (S - 1 - s))), the backward with w[s](u)
=============  =====================================================================

and makes w[s](u + 1) of w[s](u) by the optimizer. Sources: Harlap et al. 2018
(arXiv:1806.03377), section 3.3; Narayanan et al. 2021 (arXiv:2006.09503), section 3.1; Gaunt et
al. 2017 (arXiv:1705.09786), section 3, with the order of 1F1B. The pipeline drains at the end of
a step, so the next one begins with all updates made.

``streaming`` computes a model on a device that could not hold it, at the speed of the link between
device and host: each op gets copies of its parameters, tensors that autograd saves are moved to the
CPU and back, and gradients arrive beside their parameters, on the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ...cost_model.simulator.actions import Weights
from ...passes.ops.random_ops import step_key
from ...passes.tracing.counter_random import counter_random
from ...planner.dims.batch import meeting, meeting_text
from ...planner.errors import UsageError
from ..data.rank_batch import microbatch_rows
from ..data.variants import Variant
from ..update.optimizer import BuildOptimizer, build_with

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Reference:
    """Results of one-device training: each step's loss, the first step's gradients, the final
    weights and buffers."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    def on_cpu(self) -> Reference:
        """Return a copy on the CPU, where the ranks' parts of tensors are gathered too."""
        held = (self.gradients, self.weights, self.buffers)
        return Reference(self.losses, *({n: t.cpu() for n, t in own.items()} for own in held))


def run_reference(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    loss: Callable[[nn.Module, Batch], torch.Tensor],
    build_optimizer: BuildOptimizer,
    seed: int = 0,
    split: Callable[[Batch], Sequence[Batch]] = lambda batch: (batch,),
    random_dims: Mapping[int, int] | None = None,
) -> Reference:
    """Train the plain ``model`` on its device, one step per batch.

    ``loss(model, batch)`` is the scalar loss. Tied parameters count once, by their first name.
    ``gradients`` lacks parameters without a gradient. Random ops (dropout) draw the same numbers as
    a ``Trainer`` with the same ``seed``. ``split`` cuts a batch into micro-batches whose gradients
    are averaged, as a plan must where rows depend on each other; ``random_dims`` then are the batch
    dimensions of the random ops.
    """
    parameters = dict(model.named_parameters())
    optimizer = build_with(build_optimizer, parameters.items())
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        parts, total = split(batch), 0.0
        for index, part in enumerate(parts):
            key = step_key(seed, step)
            with counter_random(key, microbatch=index, batch_dims=random_dims):
                value = loss(model, part) / len(parts)
            value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        losses.append(total)
        if step == 0:
            gradients = {
                name: p.grad.detach().clone()
                for name, p in parameters.items()
                if p.grad is not None
            }
        optimizer.step()
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return Reference(tuple(losses), gradients, weights, buffers)


def reference_split(planned: Variant, batch: Batch) -> tuple[Batch, ...]:
    """Divide a global batch into the parts that one device must run separately to match a plan.
    Parts are the rows of each update (all rows, unless the schedule is asynchronous), or the
    micro-batches if rows depend on each other. Raises UsageError AP949 if the loss of such rows is
    a sum: a plan adds up those of the micro-batches, of which one device computes the mean."""
    graph, count = planned.program.graph, planned.plan.num_microbatches
    met = meeting(graph) if graph.accumulation.mixing else None
    if met is None:
        count //= planned.schedule.per_update
    if count == 1:
        return (batch,)
    if met is not None and graph.accumulation.sums:
        raise UsageError(
            "AP949",
            f"a step of {count} micro-batches cannot be compared with the model alone",
            why=f"{meeting_text(met)}, and the loss sums over samples: the plan adds up the sums "
            "of the micro-batches, each of which is computed for itself",
            fix="microbatches=1, or a loss that is a mean over samples",
        )
    graph = graph.with_batch_size(planned.plan.model.global_batch // count)
    return tuple(
        {
            name: microbatch_rows(name, tensor, graph[name].spec, part, count)
            for name, tensor in batch.items()
        }
        for part in range(count)
    )


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """Rule of an asynchronous schedule: which version of a weight (number of updates in the step)
    each forward and backward uses. ``stage_of`` maps parameters' names to stage indices."""

    weights: Weights
    num_updates: int
    num_stages: int
    stage_of: Mapping[str, int]

    def forward_version(self, name: str, update: int) -> int:
        """Return the version of a parameter (its number of updates in the step) with which the
        forwards of update number ``update`` compute."""
        is_buffered = self.weights == "double-buffered"
        delay = 1 if is_buffered else self.num_stages - 1 - self.stage_of.get(name, 0)
        return max(0, update - delay)

    def backward_version(self, name: str, update: int) -> int:
        return update if self.weights == "latest" else self.forward_version(name, update)


def update_rule(planned: Variant) -> UpdateRule | None:
    """Return the rule by which a plan's asynchronous schedule updates weights; None if it is
    synchronous."""
    schedule, plan = planned.schedule, planned.plan
    if not schedule.is_asynchronous:
        return None
    blocks = iter(planned.program.blocks.blocks)
    stage_of: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        for block in itertools.islice(blocks, len(stage.blocks)):
            stage_of.update(dict.fromkeys(block.parameters, index))
    count = plan.num_microbatches // schedule.per_update
    return UpdateRule(schedule.weights, count, len(plan.stages), stage_of)


def run_replay(
    model: nn.Module,
    batches: Sequence[Batch],
    rule: UpdateRule,
    *,
    loss: Callable[[nn.Module, Batch], Tensor],
    build_optimizer: BuildOptimizer,
    seed: int = 0,
    split: Callable[[Batch], Sequence[Batch]] = lambda batch: (batch,),
    random_dims: Mapping[int, int] | None = None,
) -> Reference:
    """Train the plain ``model`` on its device, one step per batch, with the stale weights of an
    asynchronous schedule's ``rule``. Arguments: see ``run_reference``; ``split`` cuts a batch into
    equally many parts for each update. ``gradients`` are of the first step's last update."""
    replay = _Replay(model, rule, loss, build_optimizer, random_dims)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        losses.append(replay.step(split(batch), step_key(seed, step)))
        gradients = gradients or replay.gradients()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return Reference(tuple(losses), gradients, weights, buffers)


class _Replay:
    def __init__(
        self,
        model: nn.Module,
        rule: UpdateRule,
        loss: Callable[[nn.Module, Batch], Tensor],
        build_optimizer: BuildOptimizer,
        random_dims: Mapping[int, int] | None,
    ) -> None:
        self._model, self._rule, self._loss = model, rule, loss
        self._random_dims = random_dims
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._optimizer = build_with(build_optimizer, self._parameters.items())

    def step(self, parts: Sequence[Batch], key: int) -> float:
        """Run all updates of a step on a batch's ``parts``; return the parts' mean loss."""
        rule, total = self._rule, 0.0
        each = len(parts) // rule.num_updates
        history = {0: self._copies()}
        for update in range(rule.num_updates):
            self._optimizer.zero_grad(set_to_none=True)
            for index in range(update * each, (update + 1) * each):
                self._bring(history, rule.forward_version, update)
                with counter_random(key, microbatch=index, batch_dims=self._random_dims):
                    value = self._loss(self._model, parts[index]) / each
                self._bring(history, rule.backward_version, update)
                value.backward()  # type: ignore[no-untyped-call]
                total += float(value.detach()) / rule.num_updates
            self._bring(history, lambda name, made: made, update)
            self._optimizer.step()
            history[update + 1] = self._copies()
            history.pop(update - rule.num_stages, None)
        return total

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the last update."""
        return {
            name: p.grad.detach().clone()
            for name, p in self._parameters.items()
            if p.grad is not None
        }

    def _copies(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    def _bring(
        self,
        history: Mapping[int, Mapping[str, Tensor]],
        version: Callable[[str, int], int],
        update: int,
    ) -> None:
        """Overwrite each weight by a version of ``history``: number ``version(name, update)``.
        Autograd does not notice the change, so that a backward uses the new values."""
        for name, parameter in self._parameters.items():
            parameter.data.copy_(history[version(name, update)][name])


Tell = Callable[[str], None]

_FACTS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "ndim", "requires_grad", "is_leaf", "grad")
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point}
"""Functions on a parameter that do not read its values."""


@contextmanager
def streaming(model: nn.Module, device: torch.device, tell: Tell) -> Iterator[None]:
    """Make ``model`` compute on ``device`` inside the context, its parameters copied there op by
    op; its backward may run afterwards. ``tell`` is called with a description of the computation,
    in the forward and the backward."""
    place_buffers(model, device)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def save(tensor: Tensor) -> tuple[torch.device, Tensor]:
        return tensor.device, tensor.detach().to("cpu", copy=True)

    def restore(saved: tuple[torch.device, Tensor]) -> Tensor:
        tell("the reference: backward")
        return saved[1].to(saved[0])

    with torch.device(device), saved_tensors_hooks(save, restore), _Streaming(names, device, tell):
        yield


def place_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of ``model``, which ops may write, to ``device``; parameters stay."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


class _Streaming(TorchFunctionMode):
    """Torch function mode that passes parameters to ops as copies on ``device``; ``names`` maps
    ``id(parameter)`` to its name."""

    def __init__(self, names: dict[int, str], device: torch.device, tell: Tell) -> None:
        super().__init__()
        self._names, self._device, self._tell = names, device, tell

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = (args, kwargs or {})
        if func not in _FACTS:
            given = tree_map_only(nn.Parameter, self._on_device, given)
        return func(*given[0], **given[1])

    def _on_device(self, parameter: nn.Parameter) -> Tensor:
        name = self._names.get(id(parameter))
        if name is None:
            return parameter
        self._tell(f"the reference: forward of {name}")
        return parameter.to(self._device, copy=True)
