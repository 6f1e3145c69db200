"""Captures of targets: their models built without weights, and traced as graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoparallel.cache.captures import cached_program
from autoparallel.cache.plan_cache import NO_CACHE, Cache
from autoparallel.options.progress import Observe, ignore
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.initialization.deferred_init import record_build
from autoparallel.planner.plan import Precision
from autoparallel.target.register_op import registered_rules
from autoparallel.target.target import (
    Change,
    LossFn,
    Target,
    building,
    changed_target,
    example_batches,
    keep_batch,
)

if TYPE_CHECKING:
    from torch import nn

    from autoparallel.passes.initialization.deferred_init import Deferred, Init
    from autoparallel.passes.programs.batch import Example
    from autoparallel.passes.programs.program import Program
from autoparallel.options.plan_options import DTYPES, PlanOptions


def capture_target(
    target: Target, options: PlanOptions, observe: Observe = ignore, cache: Cache = NO_CACHE
) -> Program:
    """Capture the target's model and loss as a graph; no weights are allocated."""
    observe("capture", 0, 1)
    deferred = record_target(target)
    program = cached_program(
        cache,
        target,
        deferred.model,
        options,
        lambda: capture_program(
            target,
            deferred,
            global_batch=options.global_batch,
            seq=options.seq,
            precision=options.precision,
            autocast=options.autocasts,
        ),
    )
    observe("capture", 1, 1)
    return program


def capture_program(
    target: Target,
    deferred: Deferred,
    *,
    global_batch: int,
    seq: int | None,
    precision: Precision,
    autocast: bool = False,
) -> Program:
    """Capture a target's model, built without weights as ``deferred``, as a graph. The program's
    ``recapture`` captures it again for another number of samples."""

    def captured(rows: int, change: Change = keep_batch) -> Program:
        return capture_rows(
            changed_target(target, change),
            deferred.model,
            global_batch=rows,
            seq=seq,
            precision=precision,
            autocast=autocast,
        )

    return replace(captured(global_batch), recapture=captured)


def capture_rows(
    target: Target,
    model: nn.Module,
    *,
    global_batch: int,
    seq: int | None,
    precision: Precision,
    autocast: bool = False,
) -> Program:
    """Capture a target's model as a graph, with few rows if it can be rescaled to any number.

    Numbers that the model computes from the number of rows are computed for the global batch. A
    model that cannot be rescaled (rows interact before the loss, as in a contrastive loss, or few
    rows take another path) is captured with all rows of the global batch, as a single micro-batch.
    """
    batch, all_rows = example_batches(target, global_batch, seq)
    return capture_model(
        model, batch, target.loss_fn, precision, all_rows=all_rows, autocast=autocast
    )


def record_target(target: Target, seed: int = 0, init: Init = "exact") -> Deferred:
    """Build the target's model without weights, recording how to make them from ``seed``.

    ``init`` says whether each rank later draws exactly the plain model's weights or its own shards.
    Raises UsageError AP106 if the user's code fails.
    """
    with building(target):
        return record_build(target.build_model, seed, init)


def capture_model(
    model: nn.Module,
    batch: Example,
    loss_fn: LossFn | None,
    precision: Precision,
    *,
    all_rows: Example | None = None,
    autocast: bool = False,
) -> Program:
    """Capture a model on ``meta`` as a graph, in the compute dtype of ``precision``.

    With ``autocast`` losses and the other ops in autocast's float32 list stay in float32.
    """
    rules = registered_rules()
    return capture(
        model,
        batch,
        all_rows=all_rows,
        loss_fn=loss_fn,
        dtype=DTYPES[precision],
        rules=rules,
        autocast=autocast,
    )


def captured_seq(program: Program) -> int | None:
    """Return a program's sequence length: dimension 1 of its first integer input; None without."""
    for node in program.graph.inputs:
        if node.spec.dtype == "int64" and len(node.spec.shape) > 1:
            return node.spec.shape[1]
    return None
