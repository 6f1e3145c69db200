"""Captures, and measurements of the CPU, that all processes of a test session share.

In: a target, an example batch, a precision. Out: the recorded model and its captured program. The
first process that asks for a capture makes it and writes it to the session's folder; the others
(the ranks, and the other workers of pytest-xdist) read it. ``ranks_share_captures``: so do scripts
that adopt a model again and again.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch import Tensor, nn

from autoparallel.adoption import join as joining
from autoparallel.cache.captures import model_text
from autoparallel.cache.plan_cache import digest, graph_digest
from autoparallel.passes.initialization.deferred_init import Deferred, record_build
from autoparallel.passes.programs.batch import leaves
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan import Plan, Precision
from autoparallel.planning.capture import capture_model
from autoparallel.target.target import Batch, Target

FOLDER = "AUTOPARALLEL_TEST_CAPTURES"
"""The variable that names the session's folder; without it nothing is kept."""

T = TypeVar("T")


def capture_once(target: Target, batch: Batch, precision: Precision) -> tuple[Deferred, Program]:
    """The model of ``target`` without weights, and its program in ``precision``.

    ``target``'s name, module and settings, the shapes of ``batch`` and ``precision`` identify a
    capture.
    """
    deferred = record_build(target.build_model, seed=0)

    def captured() -> Program:
        return capture_model(deferred.model, batch, target.loss_fn, precision)

    settings = sorted(target.settings.items())
    module = type(deferred.model).__module__  # which the pickle names
    key = target.name, module, settings, _shapes(batch), precision
    return deferred, replace(once(captured, *key), model=deferred.model)


def _shapes(batch: Batch) -> list[tuple[object, ...]]:
    return [
        (path, tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (path, repr(leaf))
        for path, leaf in leaves(batch)
    ]


def once(make: Callable[[], T], *key: object) -> T:
    """Return the value of ``key`` in this test session; the first process that asks makes it."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return make()
    path = Path(folder, digest(*key))
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(make()))
        value: T = pickle.loads(path.read_bytes())
    return value


_plans: dict[str, Plan] = {}


@contextmanager
def ranks_share_captures(*key: object) -> Iterator[None]:
    """Within it, a script's ranks capture and plan a model once, and again only if it has changed.

    ``key`` tells scripts apart. What a model is made of, its batch, and how it is captured tell
    its captures apart. A model whose hooks matter to a capture is captured each time. Plans are
    kept by the process that made them.
    """
    capture_rows, plan_program = joining.capture_rows, joining.plan_program

    def planned(program: Program, target: Target, *asked: Any) -> Plan:
        found = digest(graph_digest(program.graph, program.blocks), target.name, *asked)
        if found not in _plans:
            _plans[found] = plan_program(program, target, *asked)
        return _plans[found]

    def kept(target: Target, model: nn.Module, *, seq: int | None, **asked: Any) -> Program:
        def captured() -> Program:
            program = capture_rows(target, model, seq=seq, **asked)
            return replace(program, model=nn.Identity())  # in whose place is each one's own

        if any(module._forward_hooks or module._backward_hooks for module in model.modules()):
            return capture_rows(target, model, seq=seq, **asked)
        loss = getattr(target.loss_fn, "__qualname__", "")
        shapes = _shapes(target.example_batch(2, seq))
        made = once(captured, *key, model_text(model), loss, shapes, sorted(asked.items()))
        return replace(made, model=model)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "capture_rows", kept)
        patch.setattr(joining, "plan_program", planned)
        yield
