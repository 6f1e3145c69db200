"""The versions of a stage's weights that an asynchronous schedule computes with.

In: a stage's parameters, and which version each forward and backward uses
(``cost_model.simulator.actions.weight_versions``). Out: ``use`` brings in the version of a forward
or backward; ``update`` lets the optimizer make the next version while older versions stay as they
are.

Blocks compute with a parameter's ``leaf``; a version is a tensor that the leaf's ``data`` is set
to. Autograd does not count this as a change of the leaf, so for a micro-batch in flight

- the backward reads the leaf as it is then: the version that ``use`` has brought in, which a
  recomputed forward reads too;
- views that the forward took of the leaf stay on the memory of its own version.

While a version is needed its memory is not written to: the optimizer steps a copy, which becomes
the master. So there are as many copies of the weights as versions needed, and none where no old
version is (``cost_model.simulator.actions.versions_held``). In a schedule that uses the "latest"
weights in each action, all actions must see every update: there is one memory, which the optimizer
steps in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from ...cost_model.simulator.actions import (
    COMPUTE,
    ActionKind,
    Schedule,
    versions_needed,
    weight_versions,
)
from .parameters import StageParameter


class WeightVersions:
    """Versions of one stage's weights on one rank in an asynchronous schedule, which updates
    weights while earlier micro-batches still compute with older values. Version 0 is the weights at
    the start of a step, version ``n`` the weights after its ``n``-th update."""

    def __init__(
        self, parameters: Iterable[StageParameter], schedule: Schedule, stage: int
    ) -> None:
        """Prepare the versions of stage number ``stage``. ``parameters`` are its parameters, whose
        values are loaded and which ZeRO does not shard."""
        self._parameters = [p for p in parameters if p.leaf is not None and p.spec.requires_grad]
        row = schedule.table[schedule.stage_rank[stage]]
        versions = weight_versions(schedule)
        self._version_of: Mapping[tuple[ActionKind, int], int] = {
            (action.kind, action.microbatch): versions[action]
            for action in row
            if action.kind in COMPUTE and action.stage == stage
        }
        self._needed = versions_needed(schedule, stage)
        self._in_place = schedule.weights == "latest"
        self._held: dict[int, list[Tensor]] = {}
        self._newest = self._in_use = 0
        for parameter in self._parameters:
            _move(parameter)
        self.begin()

    def begin(self) -> None:
        """Begin a step: the present weights, updated or loaded since, become version 0."""
        self._newest = 0
        self._held = {0: [_compute_copy(parameter) for parameter in self._parameters]}
        self._bring(0)

    def use(self, kind: ActionKind, microbatch: int) -> None:
        """Let the blocks compute with the version of the weights that the schedule assigns to an
        action: the forward or backward (``kind``) of a micro-batch."""
        version = self._newest if self._in_place else self._version_of[kind, microbatch]
        if version != self._in_use:
            self._bring(version)

    def update(self, step: Callable[[], None]) -> None:
        """Run the optimizer's ``step`` on the newest version, and store the result as the next
        version."""
        needed = self._needed[self._newest]
        if not self._in_place:
            self._held = {v: t for v, t in self._held.items() if v in (*needed, self._newest)}
            for parameter in self._parameters if self._newest in needed else ():
                _move(parameter)
        step()
        is_kept = self._newest in needed and not self._in_place
        before = self._held[self._newest] if is_kept else self._held.pop(self._newest)
        self._newest += 1
        self._held[self._newest] = [
            _updated(parameter, None if is_kept else old)
            for parameter, old in zip(self._parameters, before, strict=True)
        ]
        self._bring(self._newest)

    def _bring(self, version: int) -> None:
        for parameter, values in zip(self._parameters, self._held[version], strict=True):
            assert parameter.leaf is not None
            parameter.leaf.data = values
        self._in_use = version


def _move(parameter: StageParameter) -> None:
    """Move the master to newly allocated memory with the same values; its old memory stays
    unchanged. The master remains the same Python object, which the optimizer holds."""
    master = parameter.master
    moved = Parameter(
        parameter.like_master(parameter.local.clone()), requires_grad=master.requires_grad
    )
    moved.grad = master.grad
    torch.utils.swap_tensors(master, moved)  # type: ignore[no-untyped-call]


def _compute_copy(parameter: StageParameter) -> Tensor:
    """Bring the tensor that blocks compute with up to date with the master, and return it: it is
    the master's own memory, or a copy in another dtype."""
    parameter.refresh()
    assert parameter.leaf is not None
    return parameter.leaf.data if parameter.has_copy else parameter.local


def _updated(parameter: StageParameter, old: Tensor | None) -> Tensor:
    """Return the tensor that blocks compute with after an optimizer step, in the memory of ``old``
    if given. Autograd's version counter is not increased, since a backward that is to use the
    newest weights may read the tensor."""
    if not parameter.has_copy:
        return parameter.local
    assert parameter.leaf is not None
    if old is None:
        return parameter.local.to(parameter.leaf.dtype)
    old.data.copy_(parameter.local)
    return old
