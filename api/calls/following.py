"""Captures that follow changes of the model's Python code and values after planning.

In: a model that trains by a plan, and the Python values that its code reads (``python_state``),
read before each batch. Out: the index of the capture that computes the batch. If a value has
changed, or the forward draws random numbers of Python or NumPy, the forward is traced again. If the
same ops are called with other numbers, the same program runs with these numbers; if other ops are
called, they need another capture, for which the plan's layouts must hold.
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

from autoparallel.calls.form import PLANNED, CallForm, Form
from autoparallel.calls.modes import in_modes_of_training
from autoparallel.passes.capture.blocks import blocks_like
from autoparallel.passes.capture.retrace import (
    LiveProgram,
    capture_live,
    is_same_but_numbers,
    trace_calls,
    with_values,
)
from autoparallel.passes.local.live_numbers import LiveNumbers
from autoparallel.passes.programs.batch import Batch
from autoparallel.passes.programs.outputs import OutputForm
from autoparallel.passes.programs.program import Program
from autoparallel.passes.tracing.call_trace import CallTrace, tracing_calls
from autoparallel.passes.tracing.python_state import Generators, PythonState, Reading, Replaced
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.graph import Blocks
from autoparallel.planner.plan import Plan
from autoparallel.runtime.data.variants import variant_of
from autoparallel.runtime.messages.pending_results import arriving_tensor
from autoparallel.runtime.messages.shared_objects import gather_values, occasion_group, share_value
from autoparallel.target.target import LossFn, Target, example_batches

if TYPE_CHECKING:
    from autoparallel.runtime.step.trainer import Trainer

P = ParamSpec("P")
T = TypeVar("T")

MOST_CAPTURES = 16
"""Maximum number of captured programs that are kept for batches of one size."""


@dataclass
class _Capture:
    """Captured program ``live``, its index ``capture`` in the trainer, and the Python ``numbers``
    that it reads anew at each run."""

    capture: int
    live: LiveProgram
    numbers: LiveNumbers


class _Call(NamedTuple):
    """Kind of call of the model, which needs a captured program of its own: the number of rows of
    the global batch, and the differences from the example batch."""

    rows: int
    form: Form = PLANNED


@dataclass(frozen=True)
class Sources:
    """Functions that trace (run and record the ops of), capture and plan a model.

    ``trace(rows, before, watched)`` calls ``before`` just before the forward, and records the
    source line of the op with index ``watched``. ``plan`` plans another program of the model like
    the current plan, on the same devices, or returns None.
    """

    trace: Callable[[int, Callable[[], None], int | None], CallTrace]
    capture: Callable[[int], Program]
    plan: Callable[[Program], Plan | None]
    loss_fn: LossFn | None
    call: CallForm


class LiveCaptures:
    """Captured programs of a model on this rank; new programs are added when the Python values that
    the model's code reads, or the form of its calls, change.

    ``outputs`` describes the structure of the model's outputs in the current call.
    """

    def __init__(self, trainer: Trainer, state: PythonState, sources: Sources) -> None:
        """Trace the model as planned, so that later traces can be compared with the first."""
        self._trainer, self._state, self._sources = trainer, state, sources
        self.loss_fn = sources.loss_fn
        self._kept: dict[_Call, list[_Capture]] = defaultdict(list)
        self._current: dict[_Call, int] = {}
        self._outputs: dict[_Call, OutputForm | None] = {}
        self.outputs = trainer.program.outputs
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
            replace(each, now=_missing_tensor(each.place.name(each.key)))
            for each in state.forget_fakes(self._read)
        ]
        self._draws, self._moves = draws, bool(state.changes(self._read, state.read()))
        self._return_to(self._read, drawn)
        if trace is not None and not (self._draws or self._moves):
            # else no step has the planned numbers
            planned = LiveProgram(trainer.program, trace, {}, {})
            self._kept[_Call(rows)].append(_Capture(0, planned, LiveNumbers(frozenset())))
        for each in self._kept_tensors:
            each.put_back()

    def _first_trace(self, rows: int) -> CallTrace | None:
        """Trace the model on the planned batch; return None for code that cannot run on fake
        tensors, such as a module that is captured as one node."""
        try:
            return self._sources.trace(rows, lambda: None, None)
        except Exception:  # noqa: BLE001 - of the model's code, which was captured all the same
            self._is_traceable = False
            return None

    def __call__(self, rows: int, form: Form = PLANNED) -> int:
        """Return the index of the captured program for a batch of ``rows`` rows, capturing it if
        needed.

        Collective if Python values that the model reads, or the form of the call, have changed.
        Raises UsageError AP936 if the plan has no layouts for the model's present code, AP942 if
        values differ between ranks, AP920 and AP933 if the plan has no layouts for the form.
        """
        self._sources.call.form = form
        try:
            with self._without_caches():
                return self._find_capture(_Call(rows, form))
        finally:
            self._sources.call.form = PLANNED

    def as_called(self, batch: Batch, form: Form) -> Batch:
        """Return a batch with the argument values and gradient flags that ``form`` has."""
        return self._sources.call.apply_form(batch, form)

    @contextmanager
    def own_forward(self) -> Iterator[None]:
        """Let the model's own forward run inside the context, and keep the tensors that it stores
        on the model out of training."""
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
    def undo_changes(self) -> Iterator[None]:
        """Undo the changes of forwards inside the context to Python state and random generators.

        Items added to containers stay, and do not count as changes.
        """
        with self._without_caches():
            reading, drawn = self._state.read(), Generators.now()
            try:
                yield
            finally:
                self._return_to(reading, drawn)
                if not self._state.changes(self._read, reading):
                    self._read = self._state.read()

    def once(self, call: Callable[P, T]) -> Callable[P, T]:
        """Wrap a function so that its changes of Python state and its random draws are undone."""

        @functools.wraps(call)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.undo_changes():
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

    def _find_capture(self, call: _Call) -> int:
        now = self._state.read()
        changed = self._state.changes(self._read, now)
        if changed:
            self._current.clear()
            self._has_changed = True
        elif not (self._draws or self._moves):
            if not self._has_changed and call.form == PLANNED:
                self.outputs = self._trainer.program.outputs
                return 0
            if call in self._current:
                self.outputs = self._outputs[call]
                return self._current[call]
        if not self._is_traceable:
            if changed or call.form != PLANNED:
                raise _plan_error(changed, "cannot be run on tensors without values", "", call.form)
            return 0
        drawn = Generators.now()
        progress = self._trainer.runner.progress
        if changed and progress is not None:
            names = ", ".join(sorted(changed)[:3])
            progress(f"comparing between ranks {names}, which has changed", ())
        shared = share_value(drawn, occasion_group()) if self._draws else drawn
        before = self._before(now, shared)
        trace = self._sources.trace(call.rows, before, None)
        self._state.forget_fakes(now)
        after, last = self._state.read(), Generators.now()
        _check_equal(trace, changed)
        try:
            self._current[call] = self._choose(call, trace, before, changed)
            self._outputs[call] = self.outputs = trace.outputs
        finally:
            self._return_to(after, last if shared.is_same(drawn) else drawn)
            self._read = self._state.read()
        return self._current[call]

    def _before(self, reading: Reading, generators: Generators) -> Callable[[], None]:
        return lambda: self._return_to(reading, generators)

    def _return_to(self, reading: Reading, generators: Generators) -> None:
        self._state.restore(reading)
        if not generators.is_same(Generators.now()):
            generators.restore()

    def _choose(
        self, call: _Call, trace: CallTrace, before: Callable[[], None], changed: Collection[str]
    ) -> int:
        like = [each for each in self._kept[call] if each.live.trace.is_like(trace)]
        for each in like:
            live = each.live
            is_covered = live.trace.changed_numbers(trace) <= live.stand_ins.keys()
            if is_covered and live.trace.changed_tensors(trace) <= live.tensors.keys():
                self._set_values(call.rows, each, trace)
                return each.capture
        kept = None
        if like:
            places = set().union(*(each.live.trace.changed_numbers(trace) for each in like))
            tensors = set().union(*(each.live.trace.changed_tensors(trace) for each in like))
            kept = self._capture_live(call, trace, places, tensors, before)
        if kept is None:
            if len(self._kept[call]) >= MOST_CAPTURES:
                raise self._refusal(call, trace, before, changed, f"it has {MOST_CAPTURES} forms")
            program = self._capture_rows(call.rows, before)
            kept = self._add(call, LiveProgram(program, trace, {}, {}))
        if kept is None:
            raise self._refusal(
                call,
                trace,
                before,
                changed,
                self._why_not(program),
            )
        return kept.capture

    def _why_not(self, program: Program) -> str:
        """Describe why the plan has no layouts for ``program``, a later capture of the model."""
        planned, now = (
            [node.name for node in each.graph.parameters]
            for each in (self._trainer.program, program)
        )
        more, less = set(now).difference(planned), set(planned).difference(now)
        if more or less:
            how = "with" if more else "without"
            return f"it computes {how} {min(more or less)}, unlike the planned call"
        return "it takes another path, for which the plan has no layouts"

    def _capture_rows(self, rows: int, before: Callable[[], None]) -> Program:
        with tracing_calls(before=before):
            return self._sources.capture(rows)

    def _capture_live(
        self,
        call: _Call,
        trace: CallTrace,
        places: set[tuple[int, int]],
        tensors: set[int],
        before: Callable[[], None],
    ) -> _Capture | None:
        places -= self._fixed
        if not places and not tensors:
            return None
        live = capture_live(
            lambda: self._sources.capture(call.rows), trace, places, tensors, before
        )
        found = None if live is None else self._add(call, live)
        if found is None:
            self._fixed |= places
            return None
        self._set_values(call.rows, found, trace)
        return found

    def _add(self, call: _Call, live: LiveProgram) -> _Capture | None:
        """Add a captured program for a kind of call to the trainer. Collective.

        Returns None if no plan can run it. A program that differs only in numbers keeps the plan's
        blocks. If its blocks have other parameters than planned, it is cut again as planned.
        """
        planned, program = self._trainer.program, live.program
        graph = program.graph
        if graph.batch_dims:
            graph = graph.with_batch_size(planned.graph.batch_size)
        if is_same_but_numbers(graph, planned.graph):
            plan = self._trainer.runner.batches.batch(call.rows).plan
            return self._add_with_plan(call, _in_blocks(live, planned.blocks), plan)
        if call.rows != self._trainer.plan.model.global_batch:
            return None
        found = self._add_with_plan(call, live, self._sources.plan(program))
        blocks = blocks_like(program.graph, planned.blocks)
        if found is not None or blocks is None or blocks == program.blocks:
            return found
        cut = _in_blocks(live, blocks)
        return self._add_with_plan(call, cut, self._sources.plan(cut.program))

    def _add_with_plan(self, call: _Call, live: LiveProgram, plan: Plan | None) -> _Capture | None:
        trainer = self._trainer
        if plan is None or not trainer.model.can_run(plan):
            return None
        self._num_captures += 1
        capture = self._num_captures
        numbers = LiveNumbers(frozenset(live.stand_ins.values()))
        numbers.values.update((each, each) for each in numbers.stand_ins)
        trainer.model.take_program(call.rows, capture, live.program)
        if not trainer.runner.add(variant_of(live.program, plan, capture), numbers):
            return None
        kept = _Capture(capture, live, numbers)
        self._kept[call].append(kept)
        return kept

    def _set_values(self, rows: int, kept: _Capture, trace: CallTrace) -> None:
        live, trainer = kept.live, self._trainer
        values = {each: trace.numbers[place] for place, each in live.stand_ins.items()}
        kept.numbers.values.update(values)
        program = with_values(live, values, trace)
        if program is not live.program:
            trainer.model.take_program(rows, kept.capture, program)
            trainer.runner.forget_constants(rows, kept.capture)

    def _refusal(
        self,
        call: _Call,
        trace: CallTrace,
        before: Callable[[], None],
        changed: Collection[str],
        why: str,
    ) -> UsageError:
        at = max(
            (_first_difference(each.live.trace, trace) for each in self._kept[call]), default=0
        )
        source = self._sources.trace(call.rows, before, at).source
        return _plan_error(changed, why, source, call.form)


def _in_blocks(live: LiveProgram, blocks: Blocks) -> LiveProgram:
    return replace(live, program=replace(live.program, blocks=blocks))


class _MissingTensor:
    """Placeholder for a tensor that the plain forward would store on the model; every read of it
    raises UsageError AP946."""

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


def _missing_tensor(name: str) -> Tensor:
    return arriving_tensor(_MissingTensor(name), torch.empty(0))


def follow_model(
    trainer: Trainer,
    state: PythonState,
    target: Target,
    seq: int | None,
    capture: Callable[[int], Program],
    ready: Callable[[], AbstractContextManager[Any]],
    plan: Callable[[Program], Plan | None],
    call: CallForm,
) -> LiveCaptures:
    """Return the captured programs of a target's model, to be kept up to date with its Python code.

    ``target`` and ``capture`` make the batches of a call's form; the model is traced inside
    ``ready()``; ``plan`` plans another program on the same devices.
    """
    model, dtype = trainer.program.model, trainer.program.dtype

    def trace(rows: int, before: Callable[[], None], watched: int | None) -> CallTrace:
        few, every = example_batches(target, rows, seq)
        with in_modes_of_training(), ready():
            batch = few if every is None else every
            return trace_calls(model, batch, target.loss_fn, dtype, before, watched)

    sources = Sources(trace, capture, plan, target.loss_fn, call)
    return LiveCaptures(trainer, state, sources)


def _first_difference(one: CallTrace, other: CallTrace) -> int:
    pairs = zip(one.calls, other.calls, strict=False)
    shorter = min(len(one.calls), len(other.calls))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), shorter)


def _plan_error(changed: Collection[str], why: str, source: str, form: Form) -> UsageError:
    if form.wanted:
        return UsageError(
            "AP933",
            f"this plan cannot compute {form.text()}",
            why=f"the model was planned without it, and {why}",
            where=source,
            fix="pass parallelize an example_batch in which that tensor requires a gradient",
        )
    if form.fixed:
        return UsageError(
            "AP920",
            f"in training the model is called with {form.text()}",
            why=f"the example batch has another value, and {why}",
            where=source,
            fix="pass parallelize an example_batch with this value; in evaluation any are possible",
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
    """Raise UsageError AP942 if the ranks traced different ops or numbers. Collective.

    ``changed`` names the Python values that differ from the last trace.
    """
    parts = hashlib.sha256(repr(sorted(trace.numbers.items())).encode())
    parts.update(str(len(trace.calls)).encode())
    for tensor in trace.tensors:
        parts.update(tensor.tobytes())
    found = gather_values(parts.hexdigest(), occasion_group())
    if len(set(found)) > 1:
        names = ", ".join(sorted(changed)[:3]) or "a value that the model's code reads"
        raise UsageError(
            "AP942",
            f"{names} differs between ranks",
            why="all ranks compute one step, whose numbers must be the same on all of them",
            fix="give it the same value on every rank, such as rank 0's",
        )
