"""Capture: a model on ``meta`` and an example batch to a ``Program``.

The way: ``export`` (torch.export, forward and loss) → ``lower`` (to ``Graph``) →
``PASSES`` → blocks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ...planner.batch import find_batch
from ...planner.errors import CaptureError
from ...planner.graph import Graph, OpRule
from ..graph_passes.autocast import Autocast
from ..graph_passes.fused import SplitFused
from ..graph_passes.hoist import Hoist
from ..graph_passes.masks import SimplifyMasks
from ..graph_passes.rows import AlignRows
from ..graph_passes.runner import Observe, Pass, check, run_passes
from ..graph_passes.unfold import Unfold
from ..initialization.uncollected import uncollected
from ..programs.program import Dtype, Program
from .blocks import find_blocks
from .export import (
    PREFIX,
    Batch,
    Exported,
    LossFn,
    export_loss,
    export_repeats,
    tensor_keys,
)
from .held_tensors import with_held
from .lower import Lowered, lower
from .repeat_calls import RepeatError, Repeats
from .repeat_graph import expand
from .repeats import find_repeats
from .row_numbers import has_all_rows, with_numbers
from .tie import find_tied

NUM_TRIES = 2
"""Captures of alike layers: with those not captured hidden, then with all in sight."""

NO_LOSS = ("AP203", "AP204")
"""Errors of a model that returns no scalar to train, whatever its rows."""

PASSES: tuple[Pass, ...] = (Hoist(), AlignRows(), SimplifyMasks(), SplitFused(), Unfold())
"""The graph passes of a capture, in order; before them ``Autocast``, where it is asked for."""


def capture(  # noqa: PLR0913 - one parameter per option
    model: nn.Module,
    batch: Batch,
    *,
    all_rows: Batch | None = None,
    loss_fn: LossFn | None = None,
    dtype: Dtype = "float32",
    autocast: bool = False,
    buffers: Mapping[str, Tensor] | None = None,
    rules: Mapping[str, OpRule] | None = None,
    held: Mapping[str, Tensor] | None = None,
    observe: Observe | None = None,
) -> Program:
    """The program of ``loss_fn(model(batch), batch)``.

    ``model`` is on ``meta`` (or real; its values are not read) and in the mode it trains
    in. ``batch`` is a dict (``model(**batch)``) or tuple (``model(*batch)``) of tensors,
    best with 2 rows: any row count then follows by ``Program.with_batch_size``. ``all_rows`` is
    the batch that runs. Numbers that the model makes of the number of rows are those of that
    batch (``row_numbers``), and if the model takes another path for it, or ``batch`` cannot be
    captured, the program is that of ``all_rows``.
    With ``autocast`` the float32 ops of that list are in float32 (pass ``Autocast``).
    ``buffers`` are values of buffers that masks may be computed from, ``rules``
    those of the user's own ops by their path. ``held`` are the model's tensors by name, where its
    own are no longer whole (``held_tensors``).

    Raises ``CaptureError`` naming the user's line.
    """
    way = _Way(loss_fn, dtype, rules or {}, autocast)
    with uncollected(), with_held(model, held or {}):
        return _captured(model, batch, all_rows, way, buffers=buffers or {}, observe=observe)


@dataclass(frozen=True, slots=True)
class _Way:
    """How a model is captured: its loss, the dtype, the user's rules, and whether autocast's
    float32 ops are in float32."""

    loss_fn: LossFn | None
    dtype: Dtype
    rules: Mapping[str, OpRule]
    autocast: bool


def _captured(
    model: nn.Module, batch: Batch, all_rows: Batch | None, way: _Way, *,
    buffers: Mapping[str, Tensor], observe: Observe | None,
) -> Program:  # fmt: skip
    """The program of ``batch`` with the numbers of ``all_rows``, or of ``all_rows`` alone."""
    timed = _Timer(observe)

    def program(exported: Exported, lowered: Lowered) -> Program:
        check(lowered.graph, "lower")
        timed("export", lowered.graph)
        return _program(model, exported, lowered, way, buffers=buffers, observe=observe)

    try:
        exported, few = _lowered(model, batch, way)
    except CaptureError as error:
        if all_rows is None or error.code in NO_LOSS:
            raise
        return program(*_lowered(model, all_rows, way))
    if all_rows is None:
        return program(exported, few)
    whole = _lowered(model, all_rows, way)
    merged = with_numbers(few, whole[1])
    if merged is not None:
        found = program(exported, merged[0])
        if found.graph.batch_dims and has_all_rows(found.graph, merged[1], whole[1], buffers):
            return found
    return program(*whole)


def _program(
    model: nn.Module, exported: Exported, lowered: Lowered, way: _Way, *,
    buffers: Mapping[str, Tensor], observe: Observe | None,
) -> Program:  # fmt: skip
    """The program of a lowered model: its graph after all passes, cut into blocks."""
    graph, literals = lowered.graph, lowered.literals
    known = {**literals, **buffers}
    passes = tuple(
        replace(one, buffers=known) if isinstance(one, AlignRows | SimplifyMasks) else one
        for one in PASSES
    )
    casts = (Autocast(way.dtype),) if way.autocast else ()
    graph = run_passes(graph, (*casts, *passes), observe)
    timed = _Timer(observe)
    graph = _with_batch(graph)
    timed("batch", graph)
    blocks = find_blocks(graph)
    timed("blocks", graph)
    names = {node.name for node in graph.nodes}
    return Program(
        graph=graph,
        blocks=blocks,
        model=model,
        dtype=way.dtype,
        inputs={name: key for name, key in exported.inputs.items() if name in names},
        literals={name: value for name, value in literals.items() if name in names},
        unused=tuple(name for name, _ in model.named_parameters() if name not in names),
        outputs=exported.outputs,
    )


def _lowered(model: nn.Module, batch: Batch, way: _Way) -> tuple[Exported, Lowered]:
    """The exported program and its graph; of alike layers only a few are exported if that is
    sure to give the same."""
    tied = find_tied(model)

    def lowered(exported: Exported) -> Lowered:
        return lower(
            exported.program, prefix=PREFIX, inputs=list(exported.inputs), tied=tied,
            batch_size=_rows(batch), rules={**way.rules, **exported.rules},
        )  # fmt: skip

    groups = find_repeats(model)
    is_hidden = bool(groups)
    for _ in range(NUM_TRIES if groups else 0):
        repeats = Repeats(model, groups, is_hidden=is_hidden)
        try:
            exported = export_repeats(model, batch, repeats, loss_fn=way.loss_fn, dtype=way.dtype)
            made = lowered(exported)
            graph = expand(made.graph, repeats.calls, model, made.bases)
            return exported, replace(made, graph=graph)
        except Exception as error:  # noqa: BLE001 - whatever it is, all layers are captured
            is_hidden = False
            if not (isinstance(error, RepeatError) and error.is_hidden):
                break
    exported = export_loss(model, batch, loss_fn=way.loss_fn, dtype=way.dtype)
    return exported, lowered(exported)


def _rows(batch: Batch) -> int:
    for key in tensor_keys(batch):
        tensor = batch[key]  # type: ignore[index]
        if tensor.dim():
            return int(tensor.shape[0])
    raise CaptureError(
        "AP206",
        "the example batch holds no tensor with a batch dimension",
        fix="let `example_batch(global_batch)` return tensors whose first dimension is the batch",
    )


def _with_batch(graph: Graph) -> Graph:
    """The graph with its batch dimensions and what micro-batches need, where they are found."""
    found = find_batch(graph)
    if found is None:
        return graph
    batch_dims, accumulation = found
    return replace(graph, batch_dims=batch_dims, accumulation=accumulation)


class _Timer:
    """Reports the seconds since the last report."""

    def __init__(self, observe: Observe | None) -> None:
        self._observe = observe
        self.restart()

    def restart(self) -> None:
        self._start = time.perf_counter()

    def __call__(self, name: str, graph: Graph) -> None:
        if self._observe is not None:
            self._observe(name, graph, time.perf_counter() - self._start)
        self.restart()
