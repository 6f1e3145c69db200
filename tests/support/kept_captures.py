"""Captures that all processes of a test session share.

In: a target, an example batch, a precision. Out: the recorded model and its captured program. The
first process that asks for a capture makes it and writes it to the session's folder; the others
(the ranks, and the other workers of pytest-xdist) read it.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from dataclasses import replace
from pathlib import Path

from autoparallel.cache import digest
from autoparallel.passes.initialization.deferred_init import Deferred, record_build
from autoparallel.passes.programs.program import Program
from autoparallel.planner.plan import Precision
from autoparallel.planning import capture_model
from autoparallel.targets import Batch, Target, batch_items

FOLDER = "AUTOPARALLEL_TEST_CAPTURES"
"""The variable that names the session's folder; without it nothing is kept."""


def capture_once(target: Target, batch: Batch, precision: Precision) -> tuple[Deferred, Program]:
    """The model of ``target`` without weights, and its program in ``precision``.

    ``target``'s name, module and settings, the shapes of ``batch`` and ``precision`` identify a
    capture.
    """
    deferred = record_build(target.build_model, seed=0)

    def captured() -> Program:
        return capture_model(deferred.model, batch, target.loss_fn, precision)

    folder = os.environ.get(FOLDER)
    if folder is None:
        return deferred, captured()
    shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in batch_items(batch)]
    settings = sorted(target.settings.items())
    module = type(deferred.model).__module__  # which the pickle names
    path = Path(folder, digest(target.name, module, settings, shapes, precision))
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(pickle.dumps(captured()))
        program: Program = pickle.loads(path.read_bytes())
    return deferred, replace(program, model=deferred.model)
