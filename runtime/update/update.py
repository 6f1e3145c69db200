"""The update at the end of a step: from complete gradients to stepped weights.

In: the local gradients, the norm of the whole gradient, the optimizer. Out: stepped weights, or
the weights as they were where the update is skipped. In this order:

1. with a ``GradScaler``, gradients and norm are divided by its scale;
2. gradients are clipped, by the norm or by value;
3. the optimizer steps, unless the norm is not finite and the options ask to skip;
4. the learning-rate scheduler steps.

Every rank has the same norm, so every rank decides alike. Optimizers whose kernel takes
``found_inf`` (``fused=True``) decide on the device, as with ``torch.amp.GradScaler``; for others
the host reads the norm first.

Parameters whose gradients are held in half precision, or whose masters and optimizer states are in
the host's memory, are updated in parts (``PartedUpdate``), so that copies of one part exist at a
time: its gradients are brought to the masters, the optimizer steps, and the device's parameters
get the new values. Optimizers of ``torch.optim`` skip parameters without a gradient. Source: Ren et
al. 2021, "ZeRO-Offload", section 4.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ...passes.ops.collectives import local_tensor
from ...planner.errors import UsageError
from ...planner.plan import Precision
from ..messages.device_queue import queue_of
from ..parameters.parameters import HOST, StageParameter
from .optimizer import clip_coefficient, published_gradients, scale_gradients

OnNan = Literal["ignore", "skip", "stop"]
"""Reaction to a loss or a gradient that is not finite; ``stop`` skips the update too."""

BuildScheduler = Callable[[Optimizer], Any]


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """Options of an update besides the optimizer's. Raises UsageError AP900 for invalid values.
    ``max_norm`` and ``max_value`` clip the gradient, ``accumulate`` is the number of global batches
    per update, ``scaler`` scales the loss."""

    max_norm: float | None = None
    max_value: float | None = None
    accumulate: int = 1
    on_nan: OnNan = "ignore"
    scaler: GradScaler | None = None

    def __post_init__(self) -> None:
        for name in ("max_norm", "max_value"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError("AP900", f"{name} is {value}, but must be above 0")
        if self.max_norm is not None and self.max_value is not None:
            raise UsageError(
                "AP900", "gradients can be clipped by max_norm or by max_value, but not by both"
            )
        if self.accumulate < 1:
            raise UsageError("AP900", f"accumulate is {self.accumulate}, but must be at least 1")
        if self.on_nan not in get_args(OnNan):
            names = ", ".join(get_args(OnNan))
            raise UsageError("AP900", f"on_nan is {self.on_nan!r}, but must be one of {names}")

    def for_precision(self, precision: Precision, device: str) -> UpdateOptions:
        """Return the options for a precision: fp16 gets torch's ``GradScaler`` if none is given."""
        if precision != "fp16" or self.scaler is not None:
            return self
        return replace(self, scaler=GradScaler(device))

    @property
    def scales(self) -> bool:
        """Tell whether the loss is scaled."""
        return self.scaler is not None and self.scaler.is_enabled()

    @property
    def decides(self) -> bool:
        """Tell whether an update is skipped if its norm is not finite."""
        return self.on_nan != "ignore" or self.scales

    @property
    def needs_norm(self) -> bool:
        """Tell whether the update has to know the norm of the gradient first."""
        return self.decides or self.max_norm is not None


def check_updates_itself(options: UpdateOptions, schedule: str) -> None:
    """Raise UsageError AP901 if ``options`` need the whole gradient's norm before an update, which
    an asynchronous ``schedule`` does not know."""
    plain = UpdateOptions(on_nan=options.on_nan)
    if options != plain or options.on_nan == "skip":
        raise UsageError(
            "AP901",
            f"schedule {schedule} does not support clipping, accumulation, loss scaling or "
            "skipping",
            why="each of its stages updates its weights when its own gradients are there, before "
            "the norm of the whole gradient is known",
            fix="plan with another schedule, such as 1f1b, or remove these options",
        )


class Update:
    """Function that updates one rank's weights, given complete gradients: it unscales and clips
    them, steps the optimizer and the scheduler. The tensor ``skipped`` counts skipped updates."""

    def __init__(
        self,
        options: UpdateOptions,
        optimizer: Optimizer,
        *,
        device: torch.device,
        build_scheduler: BuildScheduler | None = None,
        parted: PartedUpdate | None = None,
    ) -> None:
        """Prepare updates; ``parted``, if given, steps the optimizer part by part with gradient
        copies. Raises UsageError AP902 where ``build_scheduler`` returns no scheduler."""
        self.options, self.optimizer, self.parted = options, optimizer, parted
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._one = torch.ones((), dtype=torch.float64, device=device)
        self._probe = nn.Parameter(torch.zeros_like(self._one))
        self._probed = SGD([self._probe])
        self.scheduler = None if build_scheduler is None else build_scheduler(optimizer)
        if build_scheduler is not None and not callable(getattr(self.scheduler, "step", None)):
            raise UsageError(
                "AP902",
                f"build_scheduler returns a {type(self.scheduler).__name__}, not a scheduler",
                fix="return one of torch.optim.lr_scheduler, or an object with step()",
            )

    @property
    def decides_on_host(self) -> bool:
        """Tell whether the host must read the norm before each optimizer step, to decide whether to
        skip it. SGD with momentum, unlike Adam, leaves its state undefined where its first step is
        skipped on the device."""
        optimizer = self.optimizer
        takes = getattr(optimizer, "_step_supports_amp_scaling", False) and all(
            group.get("fused") for group in optimizer.param_groups
        )
        has_momentum = isinstance(optimizer, SGD) and any(
            group["momentum"] for group in optimizer.param_groups
        )
        return not takes or has_momentum

    def scale(self) -> Tensor | None:
        """Return a copy of the scaler's scale on the device, or None without a scaler."""
        scaler = self.options.scaler
        return scaler.scale(self._one) if scaler is not None and scaler.is_enabled() else None

    def loss_scale(self) -> Tensor | float:
        """Return the factor by which each batch's loss is multiplied before its backward."""
        share = 1.0 / self.options.accumulate
        scale = self.scale()
        return share if scale is None else scale * share

    def __call__(
        self,
        gradients: Callable[[], Sequence[Tensor]],
        norm: Tensor | None,
        loss: Callable[[], Tensor],
    ) -> Tensor | None:
        """Update the weights; return the norm of the gradient before clipping, without the loss
        scale.

        ``gradients`` returns this rank's gradients, which are changed in place. ``norm`` may be
        None if the options need none. ``loss`` is called by schedulers that depend on the loss.
        """
        coefficient, is_bad = None, None
        if norm is not None:
            norm, coefficient = self._unscaled(norm)
            is_bad = ~torch.isfinite(norm)
            if self.options.max_norm is not None:
                clip = clip_coefficient(norm, self.options.max_norm)
                coefficient = clip if coefficient is None else coefficient * clip
        prepare = partial(self._prepare, coefficient)
        step = self._stepping(is_bad if self.options.decides else None)
        if self.parted is not None:
            if step is not None:
                self.parted(prepare, step)
        else:
            prepare(gradients())
            if step is not None:
                step()
        self.schedule(loss)
        return norm

    def _prepare(self, coefficient: Tensor | None, gradients: Sequence[Tensor]) -> None:
        """Multiply gradients by ``coefficient`` (unscales, clips) and clamp them, in place."""
        if coefficient is not None:
            scale_gradients(gradients, coefficient)
        if self.options.max_value is not None:
            for gradient in gradients:
                gradient.clamp_(-self.options.max_value, self.options.max_value)

    def _unscaled(self, norm: Tensor) -> tuple[Tensor, Tensor | None]:
        """Remove the loss scale: return the true norm, and the factor for the gradients; update the
        scaler. The scaler gets the norm as the gradient of a dummy parameter: the norm is finite if
        all ranks' gradients are."""
        scaler, scale = self.options.scaler, self.scale()
        if scaler is None or scale is None:
            return norm, None
        inverse = scale.reciprocal()
        self._probe.grad = norm.clone()
        scaler.unscale_(self._probed)
        scaler.update()
        return self._probe.grad, inverse

    def _stepping(self, is_bad: Tensor | None) -> Callable[[], object] | None:
        """Return the function that steps the optimizer. ``is_bad`` says that the norm is not finite
        (None: not asked): then the function skips the step on the device, or, where the host has
        read it, None is returned."""
        if is_bad is None:
            return self.optimizer.step
        self.skipped += is_bad
        if self.decides_on_host:
            return None if bool(is_bad) else self.optimizer.step
        groups = self.optimizer.param_groups
        device = next((p.device for group in groups for p in group["params"]), is_bad.device)
        return partial(self._step_unless, is_bad.to(device, torch.float32))

    def _step_unless(self, found_inf: Tensor) -> None:
        vars(self.optimizer)["found_inf"] = found_inf
        try:
            self.optimizer.step()
        finally:
            del vars(self.optimizer)["found_inf"]

    def schedule(self, loss: Callable[[], Tensor]) -> None:
        """Step the scheduler, if any, whether or not the update was skipped. ``loss()`` is called
        only for a scheduler that depends on the loss."""
        if self.scheduler is None:
            return
        with warnings.catch_warnings():
            # The optimizer's first step may have been skipped.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(float(loss()))
            else:
                self.scheduler.step()

    def learning_rates(self) -> tuple[float | Tensor, ...]:
        """Return the learning rate of each group of parameters."""
        return tuple(group["lr"] for group in self.optimizer.param_groups if "lr" in group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler, scaler and counters; with a scheduler also the
        parameter groups' options. It is the same on every rank; options that are equal in all
        groups are stored once."""
        state: dict[str, Any] = {"skipped_steps": int(self.skipped)}
        if self.scheduler is not None:
            state["scheduler"] = _without_rates(self.scheduler.state_dict())
            groups = [_options(group) for group in self.optimizer.param_groups]
            state["groups"] = groups[:1] if all(each == groups[0] for each in groups) else groups
        if self.options.scaler is not None:
            state["scaler"] = self.options.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of ``state_dict``; entries missing in it or in this update are skipped."""
        self.skipped.fill_(state.get("skipped_steps", 0))
        if self.scheduler is not None and "scheduler" in state:
            groups, saved = self.optimizer.param_groups, state.get("groups", ())
            for position, group in enumerate(groups):
                if len(saved) in (1, len(groups)):
                    group.update(saved[position % len(saved)])
            _load_rates(self.scheduler, state["scheduler"], self.optimizer)
        if self.options.scaler is not None and state.get("scaler"):
            self.options.scaler.load_state_dict(state["scaler"])


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


_RATES = ("base_lrs", "_last_lr")
"""Entries of a scheduler's state that have a learning rate per group. They are not saved, as groups
depend on how a rank's parameters are sharded."""


def _without_rates(state: Any) -> Any:
    """Remove the groups' learning rates from a scheduler's state and its inner schedulers'."""
    if isinstance(state, dict):
        return {key: _without_rates(value) for key, value in state.items() if key not in _RATES}
    if isinstance(state, list | tuple):
        return [_without_rates(value) for value in state]
    return state


def _load_rates(scheduler: Any, state: dict[str, Any], optimizer: Optimizer) -> None:
    """Load a scheduler's state, and take the missing learning rates from the optimizer's groups."""
    inner = getattr(scheduler, "_schedulers", ())
    for each in (scheduler, *inner):
        if hasattr(each, "base_lrs"):
            each.base_lrs = [
                group.get("initial_lr", group["lr"]) for group in optimizer.param_groups
            ]
        if hasattr(each, "_last_lr"):
            each._last_lr = [group["lr"] for group in optimizer.param_groups]
    scheduler.load_state_dict(state)


PART_BYTES = 256_000_000
"""Largest size of a part's masters in bytes. Much smaller copies from and to a GPU would not use
the whole bandwidth."""


class PartedUpdate:
    """Update of ``parameters`` on one rank in parts, so that gradient copies need memory for one
    part only."""

    def __init__(
        self, parameters: Iterable[StageParameter], device: torch.device, num_threads: int
    ) -> None:
        """Divide ``parameters`` into parts. ``num_threads`` CPU threads step masters in host memory
        if ``device`` is a GPU."""
        self.device, self.num_threads = device, num_threads
        self.parts = [tuple(part) for part in _parts(parameters)]
        self._staging: dict[torch.dtype, Tensor] = {}

    def __call__(
        self, prepare: Callable[[Sequence[Tensor]], None], step: Callable[[], object]
    ) -> None:
        """Step the optimizer on each part; ``prepare`` scales and clips the part's gradients in
        place first."""
        if self.device.type != "cpu":
            torch.set_num_threads(self.num_threads)
        for part in self.parts:
            self._publish(part)
            gradients = published_gradients(part)
            if gradients:
                prepare(gradients)
                step()
            for parameter in part:
                if parameter.casts_gradient:
                    parameter.master.grad = None
            self._refresh([p for p in part if p.formats.offloads and p.spec.requires_grad])

    def _publish(self, part: Sequence[StageParameter]) -> None:
        """Copy a part's gradients to its masters; from a GPU, all at once by pinned memory."""
        if self.device.type == "cpu":
            for parameter in part:
                parameter.publish()
            return
        gradients = {p.name: p.gradient for p in part if p.formats.offloads and p.sums is None}
        copies = self._slices([g for g in gradients.values() if g is not None])
        given = {name: next(copies) for name, own in gradients.items() if own is not None}
        for name, copy in given.items():
            copy.copy_(gradients[name], non_blocking=True)  # type: ignore[arg-type]
        queue_of(self.device).mark().synchronize()
        for parameter in part:
            parameter.publish(given.get(parameter.name))

    def _refresh(self, part: Sequence[StageParameter]) -> None:
        """Copy the new values of a part's masters to the device, cast on the host first, or to
        the shards that are gathered from host memory."""
        on_host = [p for p in part if self.device.type == "cpu" or p.host_shard is not None]
        for parameter in on_host:
            parameter.refresh()
        part = [parameter for parameter in part if parameter not in on_host]
        if not part:
            return
        held = [local_tensor(parameter.held.detach()) for parameter in part]
        for parameter, own, copy in zip(part, held, self._slices(held), strict=True):
            own.copy_(copy.copy_(parameter.local), non_blocking=True)
            parameter.is_stale = False
        queue_of(self.device).mark().synchronize()

    def _slices(self, like: Sequence[Tensor]) -> Iterator[Tensor]:
        """Return pinned host memory in the shapes of ``like``, tensors of one dtype; it is reused
        by later calls."""
        total = sum(each.numel() for each in like)
        if not total:
            return iter(())
        dtype = like[0].dtype
        staging = self._staging.get(dtype)
        if staging is None or staging.numel() < total:
            staging = torch.empty(total, dtype=dtype, device=HOST, pin_memory=True)
            self._staging[dtype] = staging
        parts = torch.split(staging[:total], [each.numel() for each in like])
        return (part.view(each.shape) for part, each in zip(parts, like, strict=True))


def _parts(parameters: Iterable[StageParameter]) -> Iterator[list[StageParameter]]:
    part: list[StageParameter] = []
    size = 0
    for parameter in parameters:
        own = parameter.local.numel() * parameter.formats.master.itemsize
        if part and size + own > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += own
    if part:
        yield part
