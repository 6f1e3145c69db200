"""Capture: a model on ``meta`` and an example batch to a ``Program``.

Steps: ``export`` (torch.export, forward and loss) → ``lower`` (to ``Graph``) → ``PASSES`` → blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from ...cost_model.ops.memory import NF4_GROUP
from ...planner.dims.batch import find_batch, of_one_row
from ...planner.errors import CaptureError, UsageError
from ...planner.graph.graph import Graph, OpRule, Ref
from ..graph_passes.autocast import Autocast
from ..graph_passes.fused import SplitFused
from ..graph_passes.grouped_heads import GroupHeads
from ..graph_passes.hoist import Hoist
from ..graph_passes.masks import SimplifyMasks
from ..graph_passes.pack_documents import PackDocuments
from ..graph_passes.rows import AlignRows
from ..graph_passes.runner import Pass, check, run_passes
from ..graph_passes.tokens import SplitTokens
from ..graph_passes.unfold import Unfold
from ..initialization.deferred_init import gc_paused
from ..programs.batch import Batch, Example
from ..programs.program import Dtype, Program
from ..tracing.call_trace import replaces_values
from .blocks import find_blocks
from .export import PREFIX, Exported, LossFn, export_loss, export_repeats
from .lower import Lowered, lower
from .refusals import check_names
from .repeat_calls import RepeatError, Repeats
from .repeat_graph import expand
from .repeats import find_repeats, find_tied
from .row_numbers import has_all_rows, with_numbers

NUM_TRIES = 2
"""Number of attempts at capturing only a few of equal layers: first with the submodules of the
other layers removed, then with all layers complete."""

NO_LOSS = ("AP203", "AP204")
"""Error codes for a model that returns no scalar loss, whatever the number of rows."""

PASSES: tuple[Pass, ...] = (
    Hoist(),
    AlignRows(),
    SimplifyMasks(),
    PackDocuments(),
    GroupHeads(),
    SplitFused(),
    Unfold(),
    SplitTokens(),
)
"""Graph passes of a capture, in order; ``Autocast``, if requested, comes before them."""


def capture(
    model: nn.Module,
    batch: Batch | Example,
    *,
    all_rows: Batch | Example | None = None,
    loss_fn: LossFn | None = None,
    dtype: Dtype = "float32",
    autocast: bool = False,
    rules: Mapping[str, OpRule] | None = None,
) -> Program:
    """Capture ``loss_fn(model(batch), batch)`` as a program.

    ``model`` is on ``meta`` (or real; its values are not read) and in the mode (train or eval) in
    which it is trained. ``batch`` is a dict (``model(**batch)``) or tuple (``model(*batch)``) of
    its arguments, best with 2 rows: ``Program.with_batch_size`` then gives the program for any
    number of rows. Rows are in the first dimension, unless an ``Example`` says otherwise.
    ``all_rows`` is the whole batch of a training step: the numbers that the model computes from its
    number of rows are taken from a capture with ``all_rows`` (``row_numbers``). If the model's code
    branches differently for ``all_rows``, or ``batch`` cannot be captured, the program is captured
    with ``all_rows``. ``autocast``: the ops for which torch's autocast uses float32 are computed in
    float32. ``rules`` maps the paths of the user's own ops to their sharding rules.

    Raises ``CaptureError``, which names the user's line.
    """
    way = _Options(loss_fn, dtype, rules or {}, autocast)
    few, every = (
        each if isinstance(each, Example | None) else Example.of(each) for each in (batch, all_rows)
    )
    assert few is not None
    check_names(model, few.batch)
    with gc_paused():
        return _captured(model, few, every, way)


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of a capture. ``autocast``: ops that torch's autocast runs in float32 are in
    float32."""

    loss_fn: LossFn | None
    dtype: Dtype
    rules: Mapping[str, OpRule]
    autocast: bool


def _captured(model: nn.Module, batch: Example, all_rows: Example | None, way: _Options) -> Program:
    """Return the program captured with the small ``batch``, but with the numbers that the model
    computes from its number of rows taken from a capture with ``all_rows``. If the model's code
    branches differently for ``all_rows``, return the program captured with these."""
    try:
        exported, few = _lowered(model, batch, way)
    except CaptureError as error:
        if all_rows is None or error.code in NO_LOSS:
            raise
        return _program(model, *_lowered(model, all_rows, way), way)
    if all_rows is None:
        return _program(model, exported, few, way)
    whole = _lowered(model, all_rows, way)
    merged = with_numbers(few, whole[1])
    if merged is not None:
        found = _program(model, exported, merged[0], way)
        if found.graph.batch_dims and has_all_rows(found.graph, merged[1], whole[1]):
            return found
    return _program(model, *whole, way)


def _program(model: nn.Module, exported: Exported, lowered: Lowered, way: _Options) -> Program:
    """Build the program of an exported and lowered model: its graph after all graph passes, cut
    into blocks (layers)."""
    graph, literals = lowered.graph, lowered.literals
    check(graph, "lower")
    reading = AlignRows | SimplifyMasks | PackDocuments
    passes = tuple(
        replace(one, buffers=literals) if isinstance(one, reading) else one for one in PASSES
    )
    casts = (Autocast(way.dtype),) if way.autocast else ()
    graph = with_stored(_with_batch(run_passes(graph, (*casts, *passes))), model)
    blocks = find_blocks(graph)
    names = {node.name for node in graph.nodes}
    return Program(
        graph=graph,
        blocks=blocks,
        model=model,
        dtype=way.dtype,
        inputs={name: place for name, place in exported.inputs.items() if name in names},
        example=exported.example,
        literals={name: value for name, value in literals.items() if name in names},
        unused=tuple(name for name, _ in model.named_parameters() if name not in names),
        outputs=exported.outputs,
    )


def _lowered(model: nn.Module, batch: Example, way: _Options) -> tuple[Exported, Lowered]:
    """Export and lower the model; return the exported program and its graph of this package's ops.
    Of equal layers only a few are exported, if the resulting graph is the same."""
    tied = find_tied(model)

    def lowered(exported: Exported) -> Lowered:
        return lower(
            exported.program,
            prefix=PREFIX,
            inputs=list(exported.inputs),
            tied=tied,
            batch_size=batch.rows or 1,
            rules={**way.rules, **exported.rules},
        )

    groups = [] if replaces_values() else find_repeats(model)
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


def _with_batch(graph: Graph) -> Graph:
    """Return the graph with the batch dimension of each tensor, and the rule by which micro-batches
    accumulate; unchanged if these cannot be determined."""
    if graph.batch_size == 1:
        return replace(graph, accumulation=of_one_row(graph))
    found = find_batch(graph)
    if found is None:
        return graph
    batch_dims, accumulation = found
    return replace(graph, batch_dims=batch_dims, accumulation=accumulation)


STORED = "stored_weight"
"""Attribute of a layer with the format in which its weight is held: "nf4"."""


def with_stored(graph: Graph, model: nn.Module) -> Graph:
    """Return the graph with the format of each quantized weight. Raises UsageError AP868 if a
    weight cannot be held in it."""
    formats = {
        f"{path}.weight": form
        for path, module in model.named_modules()
        if (form := getattr(module, STORED, ""))
    }
    if not formats:
        return graph
    for name in formats.keys() & graph.by_name.keys():
        _check(graph, name, formats[name])
    nodes = (
        node.with_outputs((replace(node.spec, stored=formats[node.name]),))
        if node.name in formats
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def _check(graph: Graph, name: str, form: str) -> None:
    spec, why, fix = graph[name].spec, "", ""
    readers = [graph[user] for user in graph.users[name]]
    others = [
        each
        for each in readers
        if each.op != "aten.linear.default" or [*each.args].index(Ref(name)) != 1
    ]
    if spec.requires_grad:
        why, fix = "it is trained", "freeze it, and train adapters beside it"
    elif spec.numel % NF4_GROUP:
        why = f"its {spec.numel} elements are no multiple of {NF4_GROUP}, a group of {form}"
        fix = "leave base=nf4 out of --lora"
    elif others:
        why = f"{others[0].op} reads it at {others[0].source or others[0].module}"
        fix = "leave base=nf4 out of --lora: only weights that linear layers read can be quantized"
    if why:
        raise UsageError("AP868", f"{name} cannot be held in {form}", why=why, fix=fix)
