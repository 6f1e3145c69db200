"""Python API: plan a model, and train it by the plan with the same code for every plan.

::

    @autoparallel.parallelize(example_batch=example_batch, global_batch=256)
    class Net(nn.Module): ...

    step = autoparallel.Step(Net(), loss_fn=loss_fn)
    for batch in data:
        loss = step(batch)          # the true loss of the global batch, on every rank

Without torchrun ``Net()`` is the plain module. Under torchrun it is a ``ParallelModule``, planned
for the machines that torchrun joined. ``step`` trains by that plan, pipelines included; for plans
without a pipeline the ordinary ``loss.backward()`` loop works too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack, overload

import torch
from torch import nn

from autoparallel.adoption.job import PlanJob
from autoparallel.adoption.module import make_parallel, parallel_class
from autoparallel.adoption.step import Step
from autoparallel.calls.modes import say_if_drawn_apart
from autoparallel.html.notebooks import ShownPlan, with_display
from autoparallel.options.environment import under_torchrun
from autoparallel.options.plan_options import SearchOptions, plan_options
from autoparallel.options.progress import shown_to_callers
from autoparallel.options.run_options import Init, checked_init
from autoparallel.passes.initialization.deferred_init import Deferred, record_build, state_after
from autoparallel.planner.errors import UsageError
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.runtime.parameters.parameters import precision_of
from autoparallel.runtime.parameters.pretrained import load_pretrained
from autoparallel.target.from_python import batch_rows, make_target
from autoparallel.target.target import Batch, LossFn

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """Arguments of ``parallelize`` besides the model, as documented there."""

    example_batch: Any = None
    cluster: str = "local"
    global_batch: int | None = None
    seq: int | None = None
    loss_fn: LossFn | None = None
    search: SearchOptions | None = None
    init: Init = "auto"
    weights: str | Path | None = None
    weights_partial: bool = False
    allow_idle: bool = False
    check_first_step: bool | None = None
    loss: Literal["auto"] | None = "auto"
    methods: Sequence[str] = ()


def plan(
    model: nn.Module | Callable[[], nn.Module] | str,
    example_batch: Batch | Callable[..., Batch] | None = None,
    *,
    cluster: str = "local",
    global_batch: int | None = None,
    seq: int | None = None,
    loss_fn: LossFn | None = None,
    progress: bool = True,
    **options: Unpack[SearchOptions],
) -> ShownPlan:
    """Return the fastest plan found for training ``model`` on ``cluster``; needs no process group.

    ``model`` is a module, a function that builds a module, or the text of a target
    (``"model.py"``). ``example_batch`` is a batch of global shape (meta tensors suffice), or a
    function ``(global_batch, seq)`` that makes one; a target brings its own. ``global_batch``
    defaults to the rows of the example, and to 32 for a function. On a terminal and in a notebook
    progress bars are shown, unless ``progress=False``.

    Raises UsageError (AP140, AP141) for arguments of the wrong kind, and the errors of planning:
    CaptureError, InfeasibleError, TimeLimitError.
    """
    target = make_target(model, example_batch, loss_fn, global_batch)
    rows = global_batch if global_batch is not None else batch_rows(example_batch)
    asked = plan_options(rows or 32, seq, **options)
    with shown_to_callers(progress) as observe:
        return with_display(make_plan(target, cluster, asked, observe))


@overload
def parallelize(model: ModuleClass) -> ModuleClass: ...
@overload
def parallelize(
    model: None = None,
    *,
    example_batch: Any = None,
    cluster: str = "local",
    global_batch: int | None = None,
    seq: int | None = None,
    loss_fn: LossFn | None = None,
    init: Init = "auto",
    weights: str | Path | None = None,
    weights_partial: bool = False,
    allow_idle: bool = False,
    check_first_step: bool | None = None,
    loss: Literal["auto"] | None = "auto",
    methods: Sequence[str] = (),
    **options: Unpack[SearchOptions],
) -> Callable[[ModuleClass], ModuleClass]: ...
@overload
def parallelize(
    model: nn.Module,
    *,
    example_batch: Any = None,
    cluster: str = "local",
    global_batch: int | None = None,
    seq: int | None = None,
    loss_fn: LossFn | None = None,
    init: Init = "auto",
    weights: str | Path | None = None,
    weights_partial: bool = False,
    allow_idle: bool = False,
    check_first_step: bool | None = None,
    loss: Literal["auto"] | None = "auto",
    methods: Sequence[str] = (),
    **options: Unpack[SearchOptions],
) -> nn.Module: ...
def parallelize(  # noqa: PLR0913 - one parameter per option
    model: Any = None,
    *,
    example_batch: Any = None,
    cluster: str = "local",
    global_batch: int | None = None,
    seq: int | None = None,
    loss_fn: LossFn | None = None,
    init: Init = "auto",
    weights: str | Path | None = None,
    weights_partial: bool = False,
    allow_idle: bool = False,
    check_first_step: bool | None = None,
    loss: Literal["auto"] | None = "auto",
    methods: Sequence[str] = (),
    **options: Unpack[SearchOptions],
) -> Any:
    """Make an ``nn.Module`` class (as a decorator) or instance train by a plan.

    Outside torchrun the class or instance is returned unchanged. Under torchrun an instance becomes
    a ``ParallelModule``, as do all instances of a class, which are never whole in memory. A plan is
    for one global batch size. The model returns the loss, unless ``loss_fn(outputs, batch)`` is
    given here or to ``Step``.

    ``example_batch`` is a global batch in the form of a call: the arguments of ``forward`` in a
    tuple or, by name, in a dict, whose other entries are for ``loss_fn``; or a function
    ``(global_batch, seq)`` that makes such a batch.

    ``weights`` is a file or folder of initial weights, or a checkpoint; each rank reads only its
    shards. With ``weights_partial`` names may be only in ``weights`` or only in the model.

    The default ``cluster`` is the set of processes that the launcher joined, on all hosts. A plan
    that leaves processes idle is refused (MachineError AP412), unless ``allow_idle`` is set, which
    needs ``Step``.

    With ``init="exact"`` the weights drawn by a class's constructor equal the plain class's bit for
    bit, and torch's generator continues as after it; each rank then draws the random numbers of the
    whole model. With ``init="sharded"`` each rank draws only its shards: the weights are the same
    for every plan and distributed as in the constructor, but differ from the plain class's. The
    default is exact if that takes less than 10 s per rank (a billion numbers), else sharded, and
    rank 0 says so.

    The first step is compared with the model alone on the same batch, by the loss and the norm of
    each gradient; UsageError AP943 names a difference. ``check_first_step=False`` turns this off;
    True compares even if one device needs more than 10 s for the step.

    ``loss=None`` declares that the model returns no loss, although a scalar is among its outputs;
    the script computes the loss from the outputs. ``methods`` names methods besides ``forward``
    that the script calls; they compute with whole weights, and in training on every rank. In a
    class without ``forward`` the first of them is planned.

    Without ``precision`` the plan computes in the dtype of the model's floating-point parameters if
    all have the same dtype, else in float32.

    Raises UsageError AP850 for an unknown ``init``, AP140 if ``model`` is neither an nn.Module nor
    such a class, AP948 for a name in ``methods`` that is no method, and AP860 to AP862 if the
    weights cannot be read or are not the model's.
    """
    plan_options(global_batch or 1, seq, **options)
    given = ParallelOptions(
        example_batch,
        cluster,
        global_batch,
        seq,
        loss_fn,
        options,
        checked_init(init),
        weights,
        weights_partial,
        allow_idle,
        check_first_step,
        loss,
        methods,
    )

    def mark(thing: Any) -> Any:
        if inspect.isclass(thing) and issubclass(thing, nn.Module):
            return (
                _parallel_class(thing, given) if under_torchrun() else _with_weights(thing, given)
            )
        if isinstance(thing, nn.Module):
            if weights is not None:
                load_pretrained(weights, thing, partial=weights_partial)
            return (
                make_parallel(thing, _job(lambda: thing, given), methods=methods)
                if under_torchrun()
                else thing
            )
        raise UsageError(
            "AP140",
            f"parallelize takes an nn.Module or a class of them, not {thing!r}",
        )

    return mark if model is None else mark(model)


def _with_weights(original: type[nn.Module], given: ParallelOptions) -> type[nn.Module]:
    """Return the class itself or, with ``weights``, a subclass whose instances load the weights."""
    place = given.weights
    if place is None:
        return original

    def start(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, *args, **kwargs)
        load_pretrained(place, self, partial=given.weights_partial)

    namespace = {"__init__": start, "__doc__": original.__doc__, "__module__": original.__module__}
    return type(original.__name__, (original,), namespace)


def _parallel_class(original: type[nn.Module], given: ParallelOptions) -> type[nn.Module]:
    """Make a class of the same name that builds parallel models, without making their weights."""

    def make(cls: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        _check_class(cls, original)
        state = torch.get_rng_state()
        torch.rand(())  # So that the next model of the script does not start from this state.
        deferred = record_build(lambda: original(*args, **kwargs), state, given.init)
        after = state_after(deferred) if deferred.init == "exact" else None
        if after is not None:
            torch.set_rng_state(after)
        say_if_drawn_apart(deferred, given.init)
        job = _job(lambda: deferred.model, given, deferred)
        return make_parallel(deferred.model, job, cls, given.methods)

    return parallel_class(original, make, given.methods)


def _check_class(cls: type[nn.Module], original: type[nn.Module]) -> None:
    """Raise UsageError AP938 if a decorated class cannot be built: it is a subclass of
    ``original``, or its ``__init__`` refers to the class by name."""
    name = original.__name__
    if "__new__" not in cls.__dict__:
        raise UsageError(
            "AP938",
            f"{cls.__name__} is a subclass of {name}, which parallelize has decorated",
            why=f"the plan is for {name}",
            fix=f"decorate {cls.__name__} instead, or pass its objects to parallelize",
        )
    build = inspect.unwrap(original.__init__)
    code = getattr(build, "__code__", None)
    if code is not None and "super" in code.co_names and name in code.co_names + code.co_freevars:
        raise UsageError(
            "AP938",
            f"__init__ of {name} names its own class, which parallelize has replaced",
            fix=f"write super().__init__() for super({name}, self).__init__()",
        )


def _precision_of(model: nn.Module) -> SearchOptions:
    """Return the planning options for computing in the dtype of the model's parameters.

    Empty for float32, and if the floating-point parameters have several dtypes.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    precision = precision_of(dtypes.pop()) if len(dtypes) == 1 else None
    if precision is None or precision == "fp32":
        return {}
    return {"precision": precision, "float32_ops": "none"}


def _job(
    build: Callable[[], nn.Module], given: ParallelOptions, deferred: Deferred | None = None
) -> PlanJob:
    search = given.search or {}
    if "precision" not in search:
        search = {**_precision_of(build()), **search}
    rows = given.global_batch or batch_rows(given.example_batch)
    return PlanJob(
        target=replace(
            make_target(build, given.example_batch, given.loss_fn, given.global_batch),
            returns_loss=given.loss is not None,
        ),
        cluster=given.cluster,
        options=plan_options(rows or 32, given.seq, **search),
        deferred=deferred,
        weights=given.weights,
        weights_partial=given.weights_partial,
        allow_idle=given.allow_idle,
        check_first_step=given.check_first_step,
    )


def __getattr__(name: str) -> Any:
    """Import ``Step`` from ``autoparallel.adoption.step`` at its first use."""
    if name != "Step":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    return Step
