"""Model made by ``parallelize``: an ``nn.Module`` that trains by a plan under torchrun.

It is an instance of the model's own class. Its parameters become this rank's shards under the same
names (DTensors if the plan splits any), so stock optimizers, clipping and checkpoints work. In
training it takes the arguments and returns the results of the model; in evaluation the model's own
code runs with whole weights (``adoption.unsharded``).
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn

from autoparallel.adoption.guards import WEIGHT_HOOKS
from autoparallel.adoption.job import PlanJob
from autoparallel.adoption.state import ParallelState
from autoparallel.calls.methods import check_methods, has_forward, whole_method
from autoparallel.options.environment import as_launched
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.runtime.data.variants import Buckets
from autoparallel.runtime.launch.watched_script import watch_script
from autoparallel.runtime.messages.device_queue import queue_of
from autoparallel.runtime.messages.groups import allow_seconds
from autoparallel.runtime.parameters.global_values import are_whole
from autoparallel.target.target import LossFn

if TYPE_CHECKING:
    from autoparallel.runtime.step.trainer import Trainer

JOINED: WeakSet[ParallelModule] = WeakSet()
"""Models of this process that have a plan."""

_STATE = "_autoparallel"
"""Attribute of a model that holds its ``ParallelState``."""


class ParallelModule(nn.Module):
    """Model that trains by a plan under torchrun; all ranks plan it together at its first use.

    For a plan without a pipeline the ordinary loop works::

        optimizer = torch.optim.AdamW(model.parameters())
        loss = model(**batch)        # the global batch, the same on every rank
        loss.backward()
        optimizer.step()

    ``autoparallel.Step`` works for every plan.
    """

    def join(
        self,
        *,
        plan: Plan | None = None,
        loss_fn: LossFn | None = None,
        build_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        timeout_seconds: float | None = None,
        buckets: Buckets = (),
    ) -> Trainer:
        """Plan the model unless planned, replace its weights by shards, and return the trainer.

        Collective. From then on a watchdog ends the process if a rank dies or hangs for
        ``timeout_seconds``. ``buckets`` are sequence lengths to pad shorter batches to. Raises
        UsageError AP145 if the model has a plan and gets another plan, a loss or buckets.
        """
        adopted = _state_of(self)
        with as_launched():
            watchdog = watch_script(os.environ, timeout_seconds).watchdog
        adopted.tell, adopted.timeout_seconds = watchdog.progress, watchdog.timeout_seconds
        if timeout_seconds is not None:
            allow_seconds(timeout_seconds)
        if adopted.trainer is None:
            job = adopted.job
            if loss_fn is not None:
                job = replace(job, target=replace(job.target, loss_fn=loss_fn))
            with as_launched(), torch.random.fork_rng():
                adopted.join(self, job, plan, buckets)
            watchdog.follow(queue_of(adopted.joined.device))
            JOINED.add(self)
        elif plan is not None or loss_fn is not None or buckets:
            raise UsageError(
                "AP145",
                "this module already has a plan",
                why="it was called, or its parameters were read, before this",
                fix="pass loss_fn and the plan to parallelize, or create the Step first",
            )
        trainer = adopted.joined
        if build_optimizer is not None:
            trainer.use_optimizer(build_optimizer)
        return trainer

    @property
    def plan(self) -> Plan:
        """Plan that this model trains by."""
        return self.join().plan

    @contextmanager
    def unsharded(
        self, rank: int | None = None, *, device: torch.device | str | None = None
    ) -> Iterator[nn.Module]:
        """Put whole weights into the model inside the context, for generation or export.

        With ``rank`` only this rank gets weights, and other ranks have none meanwhile. The weights
        are on ``device`` (default: the plan's) and in the dtype of the optimizer. Collective over
        all ranks.

        Raises UsageError AP926 if the weights were changed inside, as the change would be lost.
        """
        self.join()
        with _state_of(self).unsharded(self, rank, device):
            yield self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: every backward sums gradients over ranks, and gradients accumulate."""
        yield

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return this rank's shards under the names of the model's parameters."""
        self._join_once()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's shards, for ``torch.distributed.checkpoint``.

        Inside ``autoparallel.one_process()`` it returns whole tensors on the CPU, on every rank.
        """
        self._join_once()
        if are_whole() and not _state_of(self).is_plain:
            with self.unsharded(device="cpu"):
                return super().state_dict(*args, **kwargs)
        _state_of(self).keep_buffers()
        return super().state_dict(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return this rank's parts of the buffers that training changes, and all other buffers."""
        _state_of(self).keep_buffers()
        return super().named_buffers(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load shards or whole tensors; each rank keeps its part of a whole tensor.

        Raises UsageError AP924 for ``assign=True``, which would replace the shards.
        """
        if assign:
            _refuse_move("load_state_dict(assign=True)", "the tensors would replace its shards")
        self._join_once()
        adopted = _state_of(self)
        if not adopted.is_plain:
            state_dict = adopted.own_part(state_dict)
        return super().load_state_dict(state_dict, strict=strict)

    def take_untrained(self) -> None:
        """Copy the values of untrained tensors from the checkpoint that the trainer loaded last
        into the model. Collective."""
        _state_of(self).take_untrained(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. While a capture or another call inside the package runs the plain
        forward, the script's hooks and ``__call__`` are skipped.

        Torch's hooks that compute a weight before each forward are part of the model, and run.
        """
        if not _state_of(self).leaves_own_hooks:
            return super().__call__(*args, **kwargs)
        for hook in self._forward_pre_hooks.values():
            if isinstance(hook, WEIGHT_HOOKS):
                hook(self, args)
        return self.forward(*args, **kwargs)

    def _join_once(self) -> None:
        adopted = _state_of(self)
        if adopted.trainer is None and not adopted.is_joining:
            adopted.plans_for_loop()
            self.join()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Refuse moves and casts (``to``, ``cuda``, ``half``): the plan sets devices and dtypes."""
        adopted = _state_of(self)
        if adopted.is_joining or adopted.is_plain:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in (*super().named_parameters(), *self.named_buffers()):
            probe = torch.empty(0, dtype=tensor.dtype, device=adopted.device_of(tensor))
            moved = fn(probe)
            if moved.dtype != probe.dtype:
                _refuse_move(f"a cast of {name} to {moved.dtype}", "its precision is the plan's")
            if adopted.trainer is not None and moved.device != probe.device:
                _refuse_move(f"a move of {name} to {moved.device}", "its devices are the plan's")
        return self

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise UsageError(
            "AP930",
            "a parallel model cannot be copied",
            why="its shards belong to the processes that train it",
            fix="with model.unsharded(): copy.deepcopy(model.state_dict())",
        )


def loss_of(module: ParallelModule) -> LossFn | None:
    """Return the loss function that the model was planned with, or None."""
    return _state_of(module).job.target.loss_fn


def take_buffers(module: ParallelModule) -> None:
    """Copy the buffers that training leaves alone to the program, if the script changed them."""
    _state_of(module).take_buffers()


def _state_of(module: nn.Module) -> ParallelState:
    found: ParallelState = module.__dict__[_STATE]
    return found


def _refuse_move(what: str, why: str) -> NoReturn:
    raise UsageError(
        "AP924",
        f"a parallel model does not support {what}",
        why=why,
        fix="do it before parallelize, or set precision= and cluster= there; for a plain model "
        "use model.unsharded()",
    )


def make_parallel(
    model: nn.Module, job: PlanJob, cls: type[nn.Module] | None = None, methods: Sequence[str] = ()
) -> nn.Module:
    """Make ``model`` parallel in place: its class becomes ``cls``, a subclass of its own class.

    Methods named in ``methods`` run with whole weights, gathered from the ranks. If the class has
    no ``forward``, the first of these methods is planned instead.
    """
    original = type(model)
    # A script may have assigned a forward to the object, which hides the forward of the class.
    main = "forward" if has_forward(original) or not methods else methods[0]
    forward = model.__dict__.pop("forward", None) or getattr(original, main).__get__(model)
    model.__class__ = cls or parallel_class(original, methods=methods)
    model.__dict__[_STATE] = ParallelState(job, forward)
    return model


def parallel_class(
    original: type[nn.Module],
    make: Callable[..., nn.Module] | None = None,
    methods: Sequence[str] = (),
) -> type[nn.Module]:
    """Make a ``ParallelModule`` class with the name, methods and signatures of ``original``.

    Calling the class runs ``make(cls, ...)`` instead of building the model. Methods named in
    ``methods`` run with whole weights, gathered from the ranks.
    """
    check_methods(original, methods)
    planned = ["forward"] if has_forward(original) or not methods else ["forward", methods[0]]

    @functools.wraps(getattr(original, planned[-1]))
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _state_of(self).call(self, args, kwargs)

    namespace: dict[str, Any] = {
        **{name: whole_method(name, _state_of) for name in methods},
        **dict.fromkeys(planned, torch.compiler.disable(forward)),  # type: ignore[no-untyped-call]
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
    }
    if make is not None:
        namespace |= {"__new__": make, "__init__": _init_nothing}
        namespace["__signature__"] = inspect.signature(original)
    return type(original.__name__, (ParallelModule, original), namespace)


def _init_nothing(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Do nothing, because ``__new__`` has already built the model."""
