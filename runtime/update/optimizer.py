"""The optimizer of one rank's shards, and the norm of a gradient that is spread over ranks.

In: the parameters of a stage, with gradients published after a step's last backward. Out: a
stock ``torch.optim`` optimizer; the exact global gradient norm.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from ...passes.ops.collectives import local_tensor
from ...planner.errors import UsageError
from ..messages.device_queue import queue_of
from ..messages.pending_results import Progress, arrival_of
from ..parameters.parameters import StageParameter

LEARNING_RATE = 3e-4

BuildOptimizer = Callable[[Any], Optimizer]
"""The user's function from the list of parameters to an optimizer; if its argument is called
``named_parameters``, it gets pairs of name and parameter instead."""

ELEMENTWISE = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Adadelta, ASGD, Rprop)
"""Optimizers that update each element independently of all other elements."""

NORM_ROW = 4096

NAMED = "named_parameters"

SGD_LEARNING_RATE = 1e-2
MOMENTUM = 0.9


def default_optimizer(
    parameters: Iterable[Any],
    name: str = "adamw",
    *,
    fused: bool | None = None,
    learning_rate: float | None = None,
) -> Optimizer:
    """Make the default optimizer, the same on one device as under a plan. ``name`` is the plan's:
    ``adamw``, ``adam``, ``sgd`` or ``sgd-momentum``. ``fused`` is passed to Adam and AdamW."""
    parameters = list(parameters)
    if name.startswith("sgd"):
        momentum = MOMENTUM if name == "sgd-momentum" else 0.0
        return SGD(parameters, lr=learning_rate or SGD_LEARNING_RATE, momentum=momentum)
    kind = Adam if name == "adam" else AdamW
    return kind(parameters, lr=learning_rate or LEARNING_RATE, fused=fused)


def build_with(build: BuildOptimizer, named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Call the user's ``build`` with the trained parameters; return the optimizer that it makes.

    ``build`` gets pairs of a name and a parameter if its only required argument is called
    ``named_parameters``, and the list of the parameters otherwise.

    Raises UsageError AP903 if it returns no optimizer.
    """
    pairs = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    optimizer = build(iter(pairs) if takes_names(build) else [parameter for _, parameter in pairs])
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            "AP903",
            f"build_optimizer returns a {type(optimizer).__name__}, not a torch.optim.Optimizer",
            fix="return the optimizer: return torch.optim.AdamW(parameters)",
        )
    return optimizer


def takes_names(build: BuildOptimizer) -> bool:
    """Return whether the only argument that ``build`` requires is called ``named_parameters``."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # a builtin says nothing of its arguments
        return False
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds] == [NAMED]


def build_optimizer(
    parameters: Iterable[StageParameter],
    build: BuildOptimizer | None = None,
    *,
    name: str = "adamw",
    learning_rate: float | None = None,
    stand_ins: Iterable[tuple[str, nn.Parameter]] = (),
) -> Optimizer:
    """Make the optimizer of this rank's masters (the parameters it updates): the user's (see
    ``build_with``), or the plan's.

    Its parameter groups stay as the user made them; each ``step`` divides them by mesh and layout
    (see ``LayoutGroups``). A rank without parameters gets the user's optimizer over ``stand_ins``,
    parameters that never have a gradient, so that schedulers find the same groups on every rank.

    Raises UsageError AP903 as ``build_with`` does, and AP904 where the optimizer holds parameters
    that are not the plan's.
    """
    held = list(parameters)
    trained = [p for p in held if p.spec.requires_grad]
    if build is None:
        groups: list[Any] = [p.master for p in trained] or [{"params": []}]
        optimizer = default_optimizer(groups, name, fused=True, learning_rate=learning_rate)
    elif trained:
        optimizer = build_with(build, [(p.name, p.master) for p in trained])
        _check_held(optimizer, held)
    else:
        try:
            optimizer = build_with(build, stand_ins)
        except ValueError:  # ``build`` has names of its own and found none of them here
            optimizer = SGD([{"params": []}], lr=0.0)
    LayoutGroups(optimizer)
    return optimizer


def _check_held(optimizer: Optimizer, held: Iterable[StageParameter]) -> None:
    known = {id(parameter.master) for parameter in held}
    found = [p for group in optimizer.param_groups for p in group["params"]]
    strange = sum(id(parameter) not in known for parameter in found)
    if strange or not found:
        what = f"{strange} parameters that are not" if strange else "no parameter that is"
        raise UsageError(
            "AP904",
            f"build_optimizer returns an optimizer with {what} trained by the plan",
            why="only the parameters of the parallelized model are trained",
            fix="take the parameters that build_optimizer is given, or those of the parallelized "
            "model, not of the model before",
        )


class LayoutGroups:
    """Hooks on an optimizer that divide each parameter group by mesh and layout while ``step``
    runs.

    The multi-tensor kernels of ``torch.optim`` (``foreach``, ``fused``) take DTensors of one
    mesh and layout at a time. While a step runs, a group that mixes them is replaced by its
    parts, with the group's options, in the order in which the layouts first appear. Outside of
    steps, for schedulers and ``state_dict``, the groups are the user's. Optimizers without such
    kernels are left alone.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._whole: list[dict[str, Any]] | None = None
        self._known: dict[int, tuple[tuple[int, ...], list[list[nn.Parameter]]]] = {}
        optimizer.register_step_pre_hook(self._split)
        optimizer.register_step_post_hook(self._join)

    def _split(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        whole = optimizer.param_groups if self._whole is None else self._whole
        if all(len(self._parts(group)) == 1 for group in whole):
            return
        self._whole = whole
        optimizer.param_groups = [
            {**group, "params": part} for group in whole for part in self._parts(group)
        ]

    def _join(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hook after ``step``: restore the user's parameter groups, with options changed by the
        step."""
        if self._whole is None:
            return
        parts = iter(optimizer.param_groups)
        for group in self._whole:
            for part in [next(parts) for _ in self._parts(group)]:
                group.update({key: part[key] for key in part if key != "params"})
        optimizer.param_groups, self._whole = self._whole, None

    def _parts(self, group: dict[str, Any]) -> list[list[nn.Parameter]]:
        members = group["params"]
        if "foreach" not in group and "fused" not in group:
            return [members]
        ids = tuple(map(id, members))
        known = self._known.get(id(group))
        if known is None or known[0] != ids:
            self._known[id(group)] = known = (ids, by_layout(members) or [members])
        return known[1]


def by_layout(masters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters that have the same mesh and layout."""
    groups: dict[tuple[object, ...], list[nn.Parameter]] = {}
    for master in masters:
        kind = (master.device_mesh, master.placements) if isinstance(master, DTensor) else ()
        groups.setdefault(kind, []).append(master)
    return list(groups.values())


class GradientNorm:
    """Norm of the gradient whose sum over ranks may still be running; only a read of it waits."""

    def __init__(
        self,
        squares: Tensor,
        work: dist.Work | None,
        progress: Progress | None = None,
    ) -> None:
        """Make the norm from ``squares``, summed over ranks by ``work``; ``progress`` is called
        before waits."""
        others: tuple[int, ...] = ()
        if progress is not None:
            others = tuple(r for r in range(dist.get_world_size()) if r != dist.get_rank())
        words = "waiting for the norm of all ranks' gradients"
        self.arrival = arrival_of(squares, work, words, others=others, progress=progress)

    def value(self) -> Tensor:
        """Return the norm, after the sum over all ranks has arrived."""
        return self.arrival.value().sqrt()

    def host_value(self) -> Tensor:
        """Return the norm in memory that the host can read, after a wait for it on the host."""
        return self.arrival.host_value().sqrt()


def gradient_norm(
    parameters: Iterable[StageParameter],
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> GradientNorm:
    """Start to compute the 2-norm of the whole model's gradient, in float64. Collective over
    ``group`` (all ranks).

    Every element counts once: a rank's sum of squares is divided by the number of ranks of a stage
    that hold the same elements; of several stages with a tied parameter, only one passes it. A rank
    without a stage passes no parameters. ``progress`` is called before waits.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    alike: dict[tuple[int, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if (own := parameter.gradient) is not None:
            alike.setdefault((parameter.num_replicas, own.device), []).append(own)
    for (num_replicas, place), gradients in alike.items():
        total += sum_of_all_squares(gradients, place).to(device) / num_replicas
    work = dist.all_reduce(total, group=group, async_op=True)
    return GradientNorm(total, work, progress)


def sum_of_all_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all gradients, in float64, on ``device``. A GPU does it by
    multi-tensor kernels; a CPU by ``sum_of_squares`` for large tensors."""
    if queue_of(device).runs_behind:
        parts = [_as_real(gradient) for gradient in gradients]
        return _sum_of_norms(torch._foreach_norm(parts, 2, torch.float64), device)
    small = [_summable(gradient) for gradient in gradients if gradient.numel() <= NORM_ROW]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        if gradient.numel() > NORM_ROW:
            total += sum_of_squares(gradient).to(device)
    return total + _sum_of_norms(torch._foreach_norm(small), device) if small else total


def _sum_of_norms(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.stack([norm.to(device) for norm in norms]).to(torch.float64).square().sum()


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's squared elements, in float64. Rows of ``NORM_ROW`` elements are
    summed in the tensor's own dtype first: on the CPU ``vector_norm`` with another dtype goes
    element by element (float32 on one core: 4.6 ns each instead of 0.2)."""
    flat = _summable(tensor).reshape(-1)
    split = flat.numel() - flat.numel() % NORM_ROW
    total: Tensor = torch.linalg.vector_norm(flat[split:]).to(torch.float64).square()
    if split:
        rows = torch.linalg.vector_norm(flat[:split].view(-1, NORM_ROW), dim=1)
        total = total + rows.to(torch.float64).square().sum()
    return total


def _as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as a real tensor of twice as many numbers; return others unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _summable(tensor: Tensor) -> Tensor:
    """Convert a tensor of a 16-bit dtype, in which sums would be inexact, to float32; return others
    unchanged."""
    tensor = _as_real(tensor)
    return tensor.float() if tensor.itemsize < 4 else tensor


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that reduces a gradient with this ``norm`` to at most ``max_norm``. It is
    ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def published_gradients(parameters: Iterable[StageParameter]) -> list[Tensor]:
    """Return this rank's part of each gradient that the optimizer reads (masters' ``grad``)."""
    found = []
    for parameter in parameters:
        gradient = parameter.master.grad
        if gradient is not None:
            with torch.no_grad():
                found.append(local_tensor(gradient))
    return found


def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients of one device and dtype by a scalar tensor of that device, in place."""
    if gradients:
        parts = [_as_real(gradient) for gradient in gradients]
        torch._foreach_mul_(parts, factor.to(parts[0].device, parts[0].dtype))
