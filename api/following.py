"""Training computes what the model's code is now, not what it was when the model was planned.

In: a model that trains by a plan, and before each batch what its code reads of Python
(``python_state``). Out: the number of the capture that the batch is computed by. Where a value has
changed, or the forward draws random numbers of Python or NumPy, the forward's calls are traced
again: the same calls with other numbers are the same program with these, and other calls are
another capture, if the plan's layouts hold for it.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from autoparallel.at_start import in_modes_of_training
from autoparallel.passes.capture.call_trace import CallTrace, tracing_calls
from autoparallel.passes.capture.python_state import (
    Generators,
    PythonState,
    Reading,
    Replaced,
)
from autoparallel.passes.capture.retrace import (
    LiveProgram,
    capture_live,
    is_same_but_numbers,
    trace_calls,
    with_values,
)
from autoparallel.passes.local.live_numbers import LiveNumbers
from autoparallel.passes.programs.batch import (
    Batch,
    LeafPath,
    filled,
    leaf_at,
    path_text,
)
from autoparallel.passes.programs.program import Program
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.runtime.arriving import arriving
from autoparallel.runtime.shared import gather_values, share_value
from autoparallel.runtime.variants import variant_of
from autoparallel.targets import LossFn, Target, example_batches

if TYPE_CHECKING:
    from autoparallel.runtime.trainer import Trainer

P = ParamSpec("P")
T = TypeVar("T")

MOST_CAPTURES = 16
"""Captures of a model that are kept for batches of one size."""


@dataclass
class _Kept:
    """A capture with its number; ``numbers`` are those that its programs read."""

    capture: int
    live: LiveProgram
    numbers: LiveNumbers


@dataclass
class InputGradients:
    """The inputs whose gradients are asked for; ``examples`` makes batches that say so."""

    paths: frozenset[LeafPath] = frozenset()

    def examples(self, make: Callable[..., Batch]) -> Callable[..., Batch]:
        """Return ``make`` with batches whose tensors at ``paths`` require gradients."""

        def made(*args: Any) -> Batch:
            batch = make(*args)
            return filled(batch, {path: leaf_at(batch, path).detach().requires_grad_()
                                  for path in self.paths})  # fmt: skip

        return made


class _Form(NamedTuple):
    """The rows of a global batch, and the inputs whose gradients are asked for."""

    rows: int
    wanted: frozenset[LeafPath] = frozenset()


@dataclass(frozen=True)
class Sources:
    """How a model is traced and captured for a global batch of so many rows.

    ``trace(rows, before, watched)`` calls ``before`` in front of the forward and notes the source
    of the call number ``watched``. ``plan`` makes a plan of another program of the model that is
    like the one it trains by, with the same number of devices of each kind; None where it cannot.
    """

    trace: Callable[[int, Callable[[], None], int | None], CallTrace]
    capture: Callable[[int], Program]
    plan: Callable[[Program], Plan | None]
    loss_fn: LossFn | None
    gradients: InputGradients


class Following:
    """The captures of one model on this rank, and its loss."""

    def __init__(self, trainer: Trainer, state: PythonState, sources: Sources) -> None:
        """Trace the planned program."""
        self._trainer, self._state, self._sources = trainer, state, sources
        self.loss_fn = sources.loss_fn
        self._kept: dict[_Form, list[_Kept]] = defaultdict(list)
        self._current: dict[_Form, int] = {}
        self._fixed: set[tuple[int, int]] = set()
        self._num_captures = 0
        self._caches: list[Replaced] = []
        self._has_changed = False
        self._is_traceable = True
        self._read, drawn = state.read(), Generators.now()
        rows = trainer.plan.model.global_batch
        trace = self._first_trace(rows)
        draws = not drawn.is_same(Generators.now())
        self._kept_tensors = [
            replace(each, now=_unmade(each.place.name(each.key)))
            for each in state.forget_fakes(self._read)
        ]
        self._draws, self._moves = draws, bool(state.changes(self._read, state.read()))
        self._return_to(self._read, drawn)
        if trace is not None and not (self._draws or self._moves):
            # else the planned numbers are of no step
            planned = LiveProgram(trainer.program, trace, {}, {})
            self._kept[_Form(rows)].append(_Kept(0, planned, LiveNumbers(frozenset())))
        for each in self._kept_tensors:
            each.put_back()

    def _first_trace(self, rows: int) -> CallTrace | None:
        """Trace the planned batch; None for code that runs on no fake tensors, as that of a
        module which is kept whole."""
        try:
            return self._sources.trace(rows, lambda: None, None)
        except Exception:  # noqa: BLE001 - of the model's code, which was captured all the same
            self._is_traceable = False
            return None

    def __call__(self, rows: int, wanted: frozenset[LeafPath] = frozenset()) -> int:
        """Return the number of the capture that a batch of ``rows`` is computed by.

        ``wanted`` are the inputs whose gradients are asked for. Collective where values have
        changed. Raises UsageError AP936 where the plan has no layouts for the model as it is now,
        AP942 where it differs between ranks, AP933 where it has none for gradients of inputs.
        """
        self._sources.gradients.paths = wanted
        try:
            with self._without_caches():
                return self._found(_Form(rows, wanted))
        finally:
            self._sources.gradients.paths = frozenset()

    @contextmanager
    def own_forward(self) -> Iterator[None]:
        """While inside, the model's own forward runs: tensors that it keeps on the model for later
        calls change nothing that training computes."""
        for each in self._kept_tensors:
            if each.is_there():
                each.take_away()
        before = self._state.read()
        try:
            yield
        finally:
            self._caches += self._state.new_tensors(before)
            for each in self._kept_tensors:
                if each.is_free():
                    each.put_back()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put back, afterwards, all that forwards inside have changed or drawn."""
        with self._without_caches():
            reading, drawn = self._state.read(), Generators.now()
            try:
                yield
            finally:
                self._return_to(reading, drawn)

    def once(self, call: Callable[P, T]) -> Callable[P, T]:
        """Return a function that changes and draws nothing for good."""

        @functools.wraps(call)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.undone():
                return call(*args, **kwargs)

        return called

    @contextmanager
    def _without_caches(self) -> Iterator[None]:
        held = [each for each in (*self._caches, *self._kept_tensors) if each.is_there()]
        for each in held:
            each.take_away()
        try:
            yield
        finally:
            for each in held:
                each.put_back()

    def _found(self, form: _Form) -> int:
        now = self._state.read()
        changed = self._state.changes(self._read, now)
        if changed:
            self._current.clear()
            self._has_changed = True
        elif not (self._draws or self._moves):
            if not self._has_changed and not form.wanted:
                return 0
            if form in self._current:
                return self._current[form]
        if not self._is_traceable:
            if changed or form.wanted:
                raise _unfollowed(changed, "cannot be run on tensors without values", "", form)
            return 0
        drawn = Generators.now()
        shared = share_value(drawn) if self._draws else drawn
        before = self._before(now, shared)
        trace = self._sources.trace(form.rows, before, None)
        self._state.forget_fakes(now)
        after, last = self._state.read(), Generators.now()
        _check_equal(trace, changed)
        try:
            self._current[form] = self._choose(form, trace, before, changed)
        finally:
            self._return_to(after, last if shared.is_same(drawn) else drawn)
            self._read = self._state.read()
        return self._current[form]

    def _before(self, reading: Reading, generators: Generators) -> Callable[[], None]:
        return lambda: self._return_to(reading, generators)

    def _return_to(self, reading: Reading, generators: Generators) -> None:
        self._state.restore(reading)
        if not generators.is_same(Generators.now()):
            generators.restore()

    def _choose(
        self, form: _Form, trace: CallTrace, before: Callable[[], None], changed: Collection[str]
    ) -> int:
        like = [each for each in self._kept[form] if each.live.trace.is_like(trace)]
        for each in like:
            live = each.live
            is_covered = live.trace.changed_numbers(trace) <= live.stand_ins.keys()
            if is_covered and live.trace.changed_tensors(trace) <= live.tensors.keys():
                self._set_values(form.rows, each, trace)
                return each.capture
        kept = None
        if like:
            places = set().union(*(each.live.trace.changed_numbers(trace) for each in like))
            tensors = set().union(*(each.live.trace.changed_tensors(trace) for each in like))
            kept = self._capture_live(form, trace, places, tensors, before)
        if kept is None:
            if len(self._kept[form]) >= MOST_CAPTURES:
                raise self._refused(form, trace, before, changed, f"it has {MOST_CAPTURES} forms")
            program = self._captured(form.rows, before)
            kept = self._add(form, LiveProgram(program, trace, {}, {}))
        if kept is None:
            raise self._refused(
                form,
                trace,
                before,
                changed,
                "it now takes another path, for which the plan has no layouts",
            )
        return kept.capture

    def _captured(self, rows: int, before: Callable[[], None]) -> Program:
        with tracing_calls(before=before):
            return self._sources.capture(rows)

    def _capture_live(
        self,
        form: _Form,
        trace: CallTrace,
        places: set[tuple[int, int]],
        tensors: set[int],
        before: Callable[[], None],
    ) -> _Kept | None:
        places -= self._fixed
        if not places and not tensors:
            return None
        live = capture_live(
            lambda: self._sources.capture(form.rows), trace, places, tensors, before
        )
        found = None if live is None else self._add(form, live)
        if found is None:
            self._fixed |= places
            return None
        self._set_values(form.rows, found, trace)
        return found

    def _add(self, form: _Form, live: LiveProgram) -> _Kept | None:
        """Have batches run by another capture; None where the plan does not fit it. Collective."""
        trainer, planned, rows = self._trainer, self._trainer.program.graph, form.rows
        program = live.program
        if program.graph.batch_dims:
            program = program.with_batch_size(planned.batch_size)
        self._num_captures += 1
        capture = self._num_captures
        numbers = LiveNumbers(frozenset(live.stand_ins.values()))
        plan: Plan | None = trainer.runner.batches.batch(rows).plan
        if not is_same_but_numbers(program.graph, planned):
            is_planned = rows == trainer.plan.model.global_batch
            plan = self._sources.plan(live.program) if is_planned else None
        if plan is None or not trainer.model.can_run(plan):
            return None
        numbers.values.update((each, each) for each in numbers.stand_ins)
        trainer.model.take_program(rows, capture, live.program)
        if not trainer.runner.add(variant_of(live.program, plan, capture), numbers):
            return None
        kept = _Kept(capture, live, numbers)
        self._kept[form].append(kept)
        return kept

    def _set_values(self, rows: int, kept: _Kept, trace: CallTrace) -> None:
        live, trainer = kept.live, self._trainer
        values = {each: trace.numbers[place] for place, each in live.stand_ins.items()}
        kept.numbers.values.update(values)
        program = with_values(live, values, trace)
        if program is not live.program:
            trainer.model.take_program(rows, kept.capture, program)
            trainer.runner.forget_constants(rows, kept.capture)

    def _refused(
        self,
        form: _Form,
        trace: CallTrace,
        before: Callable[[], None],
        changed: Collection[str],
        why: str,
    ) -> UsageError:
        at = max(
            (_first_difference(each.live.trace, trace) for each in self._kept[form]), default=0
        )
        return _unfollowed(changed, why, self._sources.trace(form.rows, before, at).source, form)


class _Unmade:
    """The value of a tensor that the forward keeps, which training does not make."""

    def __init__(self, name: str) -> None:
        self._name = name

    def value(self) -> Tensor:
        raise UsageError(
            "AP946",
            f"{self._name} is read, which the forward sets in training",
            why="the plan's program runs instead of the forward, and keeps no values on the model",
            fix="return it from the forward, or keep it in a buffer and write to that",
        )

    host_value = value


def _unmade(name: str) -> Tensor:
    return arriving(_Unmade(name), torch.empty(0))


def followed(
    trainer: Trainer,
    state: PythonState,
    target: Target,
    seq: int | None,
    capture: Callable[[int], Program],
    ready: Callable[[], AbstractContextManager[Any]],
    plan: Callable[[Program], Plan | None],
    gradients: InputGradients,
) -> Following:
    """Follow a target's model, which is traced in the context that ``ready`` gives.

    ``capture`` makes the batches of ``gradients``."""
    model, dtype = trainer.program.model, trainer.program.dtype

    def trace(rows: int, before: Callable[[], None], watched: int | None) -> CallTrace:
        few, every = example_batches(target, rows, seq)
        with in_modes_of_training(), ready():
            batch = few if every is None else every
            return trace_calls(model, batch, target.loss_fn, dtype, before, watched)

    sources = Sources(trace, capture, plan, target.loss_fn, gradients)
    return Following(trainer, state, sources)


def _first_difference(one: CallTrace, other: CallTrace) -> int:
    pairs = zip(one.calls, other.calls, strict=False)
    shorter = min(len(one.calls), len(other.calls))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)


def _unfollowed(changed: Collection[str], why: str, source: str, form: _Form) -> UsageError:
    if form.wanted and not changed:
        return UsageError(
            "AP933",
            f"the gradient of {', '.join(sorted(map(path_text, form.wanted)))} cannot be computed "
            "by this plan",
            why=f"the model was planned without it, and {why}",
            fix="pass parallelize an example_batch in which that tensor requires a gradient",
        )
    names = ", ".join(sorted(changed)[:3])
    return UsageError(
        "AP936",
        f"{names} was changed after the model was planned"
        if names
        else "the forward draws random numbers that decide which ops it computes",
        why=f"the model's code reads it, and {why}",
        where=source,
        fix="change it before parallelize, or compute with it as a number with a fraction or "
        "a buffer, so that the ops stay the same",
    )


def _check_equal(trace: CallTrace, changed: Collection[str]) -> None:
    """Raise UsageError AP942 where ranks would compute with different values. Collective."""
    parts = hashlib.sha256(repr(sorted(trace.numbers.items())).encode())
    parts.update(str(len(trace.calls)).encode())
    for tensor in trace.tensors:
        parts.update(tensor.tobytes())
    found = gather_values(parts.hexdigest())
    if len(set(found)) > 1:
        names = ", ".join(sorted(changed)[:3]) or "a value that the model's code reads"
        raise UsageError(
            "AP942",
            f"{names} differs between ranks",
            why="all ranks compute one step, whose numbers must be the same on all of them",
            fix="give it the same value on every rank, such as rank 0's",
        )
