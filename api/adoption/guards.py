"""Errors for changes to a planned model that its captured program would silently ignore.

In: a model whose parameters are this rank's shards. Out: ``check``, called before each forward of
the program. It raises an error if the script has changed a mode, a module, a parameter object, a
hook or a setting that was captured with the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from autoparallel.adoption.unsharded import Slot
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Precision
from autoparallel.runtime.parameters.parameters import COMPUTE_DTYPES, StageParameter, precision_of


class ModelGuard:
    """Guard that raises if a script has changed a planned model. ``modes`` are its modules'
    ``training`` flags at planning, ``slots`` the (module, attribute) pairs of each parameter."""

    def __init__(
        self,
        model: nn.Module,
        modes: Sequence[bool],
        parameters: Mapping[str, StageParameter],
        slots: Mapping[str, Sequence[Slot]],
    ) -> None:
        self._model = model
        self._modules = tuple(zip(model.modules(), modes, strict=True))
        self._inner = [module for module, _ in self._modules[1:]]
        self._children = [(module, [*module._modules.values()]) for module, _ in self._modules]
        self._num_hooks = self._count_hooks()
        self._frozen = [p for p in parameters.values() if not p.spec.requires_grad]
        self._held = [
            (module, attribute, parameters[name].master)
            for name, places in slots.items()
            if name in parameters
            for module, attribute in places
        ]
        self._storages = [(name, p.master, _storage_id(p.master)) for name, p in parameters.items()]

    def check(self) -> None:
        """Raise UsageError AP922, AP923, AP929 or AP936 if training modes, hooks, ``requires_grad``
        or parameters have changed since the model was planned."""
        self._check_places()
        self.check_data()
        for module, mode in self._modules:
            if module.training is not mode:
                raise UsageError(
                    "AP922",
                    f"the mode of {self._path(module)} changed after the model was planned",
                    why=f"the plan's program computes it with training={mode}",
                    fix="call train() and eval() on parts of the model before parallelize",
                )
        if self._count_hooks() != self._num_hooks:
            raise UsageError(
                "AP923",
                "a hook was put on a submodule after the model was planned",
                why="in training the plan's program runs instead of the submodules",
                fix="put hooks on the model itself or on its parameters, remove them, "
                "or register them before parallelize",
            )
        for parameter in self._frozen:
            if parameter.master.requires_grad:
                raise UsageError(
                    "AP929",
                    f"{parameter.name} requires a gradient, but was frozen when the model was "
                    "planned",
                    fix="set requires_grad before parallelize; parameters may be frozen later",
                )

    def check_data(self) -> None:
        """Raise UsageError AP936 if a parameter's ``data`` was assigned.

        Assigning ``data`` of a DTensor is allowed: its values are in its local tensor.
        """
        for name, master, storage in self._storages:
            if _storage_id(master) != storage:
                raise UsageError(
                    "AP936",
                    f"the data of {name} was assigned after the model was planned",
                    why="a shard's memory cannot be replaced, so the values are lost",
                    fix=_write_fix(name),
                )

    def _check_places(self) -> None:
        for module, children in self._children:
            if [*module._modules.values()][: len(children)] != children:  # by identity
                raise _change_error(f"a module in {self._path(module)}", "of the one before")
        for module, attribute, master in self._held:
            if module._parameters.get(attribute) is not master:
                path = self._path(module)
                name = attribute if module is self._model else f"{path}.{attribute}"
                raise _change_error(f"{attribute} of {path}", "of the one before", _write_fix(name))

    def _count_hooks(self) -> int:
        return sum(
            len(module._forward_hooks)
            + len(module._forward_pre_hooks)
            + len(module._backward_hooks)
            + len(module._backward_pre_hooks)
            for module in self._inner
        )

    def _path(self, module: nn.Module) -> str:
        names = {other: name for name, other in self._model.named_modules()}
        return names.get(module) or "the model"


WEIGHT_HOOKS = (SpectralNorm, WeightNorm)
"""Classes of torch hooks that compute a weight before each forward, so are part of the model."""


def check_own_hooks(model: nn.Module) -> None:
    """Raise UsageError AP923 for a hook on the model itself, or a ``__call__`` of its class.

    Both would run around a call of the model, but ``Step`` does not call the model.
    """
    hooks = (
        *model._forward_hooks.values(),
        *model._forward_pre_hooks.values(),
        *model._backward_hooks.values(),
        *model._backward_pre_hooks.values(),
    )
    own = [each for each in type(model).__mro__[2:] if "__call__" in vars(each)]
    is_hooked = any(not isinstance(hook, WEIGHT_HOOKS) for hook in hooks)
    if is_hooked or own[0] is not nn.Module:
        found = "a hook" if is_hooked else "a __call__ of its own"
        raise UsageError(
            "AP923",
            f"the model has {found}, and Step does not call the model",
            why="it runs around a call; Step runs the plan's program on micro-batches",
            fix="train in a loop that calls the model, or do in the forward what it does",
        )


def check_backward_hooks(model: nn.Module) -> None:
    """Raise UsageError AP923 for backward hooks of submodules, which the program would not run."""
    for path, module in model.named_modules():
        if path and (module._backward_hooks or module._backward_pre_hooks):
            raise UsageError(
                "AP923",
                f"{path} has a backward hook",
                why="in training the plan's program runs instead of the submodules",
                fix="put it on the model itself or on its parameters, or remove it",
            )


def check_autocast(device: torch.device, precision: Precision) -> None:
    """Raise UsageError AP941 if autocast uses another dtype than the plan."""
    if not torch.is_autocast_enabled(device.type):
        return
    dtype = torch.get_autocast_dtype(device.type)
    if COMPUTE_DTYPES[precision] == dtype:
        return
    wanted = precision_of(dtype)
    raise UsageError(
        "AP941",
        f"the model is called under torch.autocast in {dtype}, but the plan is for {precision}",
        why="the plan's program has its casts built in",
        fix=f'parallelize(..., precision="{wanted}"), or call it without torch.autocast',
    )


def _storage_id(parameter: nn.Parameter) -> int:
    """Return an identifier of a parameter's storage."""
    identity: int = parameter.untyped_storage()._cdata
    return identity


def _write_fix(name: str) -> str:
    return f"write whole values: model.load_state_dict({{{name!r}: values}}, strict=False)"


def _change_error(
    what: str,
    planned: str,
    fix: str = "change it before parallelize, or store the changing value in a buffer and write to "
    "that",
) -> UsageError:
    return UsageError(
        "AP936",
        f"{what} was changed after the model was planned",
        why=f"the plan's program is that {planned}, so the change would have no effect in training",
        fix=fix,
    )
