"""The Python API: plan a model, and train by a plan with one function for every plan.

::

    @autoparallel.parallelize(example_batch=example_batch, global_batch=256)
    class Net(nn.Module): ...

    step = autoparallel.Step(Net(), loss_fn=loss_fn)
    for batch in data:
        loss = step(batch)          # the true loss of the global batch, on every rank

Alone, ``Net()`` is the plain module. Under torchrun it is a ``ParallelModule``, planned for
the machines that torchrun joined; ``step`` trains by that plan, pipelines included, and the
ordinary ``loss.backward()`` loop works where there is none.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from autoparallel.adoption.module import adopt, parallel_class
from autoparallel.adoption.state import Job
from autoparallel.calls.modes import say_if_drawn_apart
from autoparallel.options.asked import Init, SearchOptions, checked_init, options_of
from autoparallel.options.environment import under_torchrun
from autoparallel.options.progress import shown_to_callers
from autoparallel.passes.initialization.deferred_init import (
    Deferred,
    record_build,
    state_after,
)
from autoparallel.passes.programs.batch import LeafPath, dims_of_size, leaves, resize_batch
from autoparallel.planner.errors import UsageError
from autoparallel.planning.plan import PlanOptions, make_plan
from autoparallel.report.notebook_plan import ShownPlan, shown
from autoparallel.runtime.parameters.parameters import precision_of
from autoparallel.runtime.parameters.pretrained import load_pretrained
from autoparallel.target.load import (
    Batch,
    LossFn,
    Target,
    check_batch,
    checked_batches,
    load_target,
)

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """What ``parallelize`` was told."""

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
    """The fastest plan found for training ``model`` on ``cluster``; needs no process group.

    ``model`` is a module, a function that builds one, or the text of a target
    (``"model.py"``). ``example_batch`` is a batch of global shapes (meta tensors welcome), or
    a function ``(global_batch, seq)`` that makes one; a target brings its own.
    ``global_batch`` defaults to the rows of the batch, and to 32 for a function. On a terminal
    and in a notebook bars show the progress; ``progress=False`` shows none.

    Raises UsageError (AP140, AP141) for arguments of the wrong kind, and what planning
    raises: CaptureError, InfeasibleError, TimeLimitError.
    """
    target = make_target(model, example_batch, loss_fn, global_batch)
    rows = global_batch if global_batch is not None else batch_rows(example_batch)
    asked = plan_options(rows or 32, seq, options)
    with shown_to_callers(progress) as observe:
        return shown(make_plan(target, cluster, asked, observe))


def plan_options(global_batch: int, seq: int | None, options: SearchOptions) -> PlanOptions:
    """Keyword arguments as ``PlanOptions``. Raises UsageError AP141 for an unknown one."""
    known = SearchOptions.__annotations__
    for name in options:
        if name not in known:
            raise UsageError(
                "AP141", f"unknown option {name!r}", fix=f"the options are {', '.join(known)}"
            )
    return options_of(global_batch, seq, options)


def make_target(
    model: nn.Module | Callable[[], nn.Module] | str,
    example_batch: Batch | Callable[..., Batch] | None,
    loss_fn: LossFn | None,
    global_batch: int | None = None,
) -> Target:
    """A model and a batch as a Target. Raises UsageError AP140."""
    if isinstance(model, str):
        return load_target(model)
    if isinstance(model, nn.Module):
        build: Callable[[], nn.Module] = partial(_with_same_tensors, model)
        name = type(model).__name__
    elif callable(model):
        build = model
        name = getattr(model, "__name__", type(model).__name__)
    else:
        raise UsageError(
            "AP140",
            f"a {type(model).__name__} is not a model",
            fix="pass an nn.Module, a function that builds one, or a target's name",
        )
    if example_batch is None:
        raise UsageError(
            "AP140",
            "example_batch is missing",
            fix="pass a batch of global shapes, or a function (global_batch, seq) that returns one",
        )
    return Target(name, build, batch_function(example_batch, global_batch), loss_fn, is_named=False)


def _with_same_tensors(model: nn.Module) -> nn.Module:
    """A copy of the modules of ``model`` with its own tensors: planning takes them off its model.

    Raises UsageError AP851 where the modules cannot be copied.
    """
    tensors = (*model.parameters(), *model.buffers())
    try:
        return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    except (TypeError, RuntimeError, pickle.PicklingError) as error:
        raise UsageError(
            "AP851",
            f"the {type(model).__name__} cannot be copied, which planning requires",
            why=f"{type(error).__name__}: {error}",
            fix="pass a function that builds it",
        ) from error


def batch_function(
    example_batch: Batch | Callable[..., Batch], global_batch: int | None = None
) -> Callable[..., Batch]:
    """``example_batch`` as a checked function; a batch is made smaller or larger by its rows.

    A batch of a ``global_batch`` of one is a sample without rows, and stays as it is.
    """
    if isinstance(example_batch, Tensor):
        example_batch = (example_batch,)
    if callable(example_batch):
        return checked_batches(example_batch, "example_batch")
    check_batch(example_batch, 1, "example_batch")
    rows = batch_rows(example_batch, global_batch) or 1
    dims = dims_of_rows(example_batch, rows) if global_batch != 1 else {}

    def sized(global_batch: int, seq: int | None = None) -> Batch:
        return resize_batch(example_batch, dims, lambda path, size: global_batch)

    return checked_batches(sized, "example_batch")


def batch_rows(example_batch: Any, global_batch: int | None = None) -> int | None:
    """The rows of a batch, or None for a function or a batch of numbers.

    They are its first tensor's first dimension; ``global_batch`` if every tensor has a dimension
    of that size.
    """
    if isinstance(example_batch, Tensor):
        example_batch = (example_batch,)
    if not isinstance(example_batch, Mapping | tuple | list):
        return None
    shapes = [
        leaf.shape for _, leaf in leaves(example_batch) if isinstance(leaf, Tensor) and leaf.ndim
    ]
    if shapes and all(global_batch in each for each in shapes):
        return global_batch
    return shapes[0][0] if shapes else None


def dims_of_rows(example_batch: Batch, rows: int) -> dict[LeafPath, int]:
    """The dimension of each tensor that counts rows: the first of that size where all tensors have
    one, else the first dimension of those where it has the size."""
    found = dims_of_size(example_batch, rows)
    shaped = [leaf for _, leaf in leaves(example_batch) if isinstance(leaf, Tensor) and leaf.ndim]
    return found if len(found) == len(shaped) else {p: dim for p, dim in found.items() if not dim}


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
    """An ``nn.Module`` class (as a decorator) or instance that trains by a plan.

    Outside torchrun the class or instance comes back as it was, and trains as ever. Under
    torchrun an instance becomes a ``ParallelModule``, and so does what the class makes; a
    model that the class makes is never whole in memory. Plans are for one global batch;
    without ``loss_fn(outputs, batch)`` the model returns the loss, or ``Step`` brings the function.

    ``example_batch`` is a global batch in the form of the calls: the arguments of ``forward`` in a
    tuple or, by name, in a dict, whose other entries are for ``loss_fn``; or a function
    ``(global_batch, seq)`` that makes one.

    ``weights`` is a file or folder of initial weights, or a checkpoint; of it each rank reads
    what it holds. With ``weights_partial`` names may be in it or in the model alone.

    The default ``cluster`` is the processes that the launcher joined, on all their hosts. A plan
    that leaves some of them nothing to do is refused (MachineError AP412) without ``allow_idle``,
    which takes ``Step``.

    Weights that a class's constructor draws are, by ``init="exact"``, those of the plain class, bit
    for bit, and torch's generator goes on as after it; each rank then draws the whole model's
    numbers. By ``init="sharded"`` each rank draws what it holds: the same for every plan,
    distributed as the constructor says, but not those of the plain class. The default is exact
    where that takes a rank less than 10 s (a billion numbers); else rank 0 says so.

    The first step is compared with that of the model alone, on the batch that runs: the loss and
    the norm of each gradient; UsageError AP943 names what differs. ``check_first_step`` False
    turns that off; True compares also where one device needs more than 10 s for the step.

    ``loss=None`` says that the model returns no loss, though a scalar is among its outputs: all are
    differentiated as the script does. ``methods`` names methods beside ``forward`` that the script
    calls; they compute with whole weights, in training on every rank. Of a class without a
    ``forward`` the first of them is planned.

    Without ``precision`` the plan computes in the dtype of the model's floating parameters, if all
    have the same, else in float32.

    Raises UsageError AP850 for another ``init``, AP140 unless ``model`` is an nn.Module or a
    class of them, AP948 for a name that is no method, and AP860 to AP862 where the weights cannot
    be read or are not the model's.
    """
    plan_options(global_batch or 1, seq, options)
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
            return _parallel_class(thing, given) if under_torchrun() else _loaded(thing, given)
        if isinstance(thing, nn.Module):
            if weights is not None:
                load_pretrained(weights, thing, partial=weights_partial)
            return (
                adopt(thing, _job(lambda: thing, given), methods=methods)
                if under_torchrun()
                else thing
            )
        raise UsageError(
            "AP140",
            f"parallelize takes an nn.Module or a class of them, not {thing!r}",
        )

    return mark if model is None else mark(model)


def _loaded(original: type[nn.Module], given: ParallelOptions) -> type[nn.Module]:
    """The class itself, or with ``weights`` one whose instances start from them."""
    place = given.weights
    if place is None:
        return original

    def start(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, *args, **kwargs)
        load_pretrained(place, self, partial=given.weights_partial)

    namespace = {"__init__": start, "__doc__": original.__doc__, "__module__": original.__module__}
    return type(original.__name__, (original,), namespace)


def _parallel_class(original: type[nn.Module], given: ParallelOptions) -> type[nn.Module]:
    """A class of the same name whose calls build a parallel model, without its weights."""

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
        return adopt(deferred.model, job, cls, given.methods)

    return parallel_class(original, make, given.methods)


def _check_class(cls: type[nn.Module], original: type[nn.Module]) -> None:
    """Raise UsageError AP938 for a class that a parallel one cannot build."""
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
    """Return the options with which a plan computes in the dtype of the model's parameters.

    None are needed for float32, or where the floating parameters have several dtypes.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    precision = precision_of(dtypes.pop()) if len(dtypes) == 1 else None
    if precision is None or precision == "fp32":
        return {}
    return {"precision": precision, "float32_ops": "none"}


def _job(
    build: Callable[[], nn.Module], given: ParallelOptions, deferred: Deferred | None = None
) -> Job:
    search = given.search or {}
    if "precision" not in search:
        search = {**_precision_of(build()), **search}
    rows = given.global_batch or batch_rows(given.example_batch)
    return Job(
        target=replace(
            make_target(build, given.example_batch, given.loss_fn, given.global_batch),
            returns_loss=given.loss is not None,
        ),
        cluster=given.cluster,
        options=plan_options(rows or 32, given.seq, search),
        deferred=deferred,
        weights=given.weights,
        weights_partial=given.weights_partial,
        allow_idle=given.allow_idle,
        check_first_step=given.check_first_step,
    )


def __getattr__(name: str) -> Any:
    """``Step``, which is at home in ``autoparallel.adoption.step``."""
    if name != "Step":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autoparallel.adoption.step import Step

    return Step
