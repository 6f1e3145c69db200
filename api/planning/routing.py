"""Routing files: how many tokens each expert of a model got in a run, as JSON.

``autoparallel run --count-routing FILE`` writes the file, ``--routing FILE`` plans by it. It holds
``format``, ``version`` and ``layers``; a layer has its ``name`` in the graph, the number
of experts ``num_experts``, the number ``chosen`` for each token, the ``tokens``, and ``counts``:
the (token, expert) pairs of each expert, whose sum is tokens · chosen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoparallel.cost_model.cluster.given_text import check_texts, parse_json, read_text
from autoparallel.options.outputs import writing
from autoparallel.passes.programs.program import Program
from autoparallel.planner.costs.expert_loads import ExpertLoads
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.expert_dims import is_expert_layer
from autoparallel.planner.ops.case import argument
from autoparallel.planning.plan_files import load_plan
from autoparallel.runtime.messages.shared_objects import gather_on_first
from autoparallel.runtime.step.rank_model import RankModel

FORMAT, VERSION = "autoparallel.routing", 1
COUNT = "autoparallel run PLAN --count-routing FILE"


@dataclass(frozen=True, slots=True)
class RoutedLayer:
    """Layer of experts in a routing file: the tokens that it got, ``chosen`` experts of each, and
    ``counts``, the tokens of each expert. Of a plan, ``chosen`` and ``tokens`` are 0, unknown."""

    name: str
    num_experts: int
    chosen: int
    tokens: int
    counts: tuple[int, ...]


def check_has_experts(program: Program, option: str) -> None:
    """Raise UsageError AP177 if the model has no layer of experts, which ``option`` is about."""
    if not any(map(is_expert_layer, program.graph)):
        raise UsageError(
            "AP177",
            "the model has no layer of experts",
            why="only experts that are captured as one op are counted, as those of transformers",
            where=option,
            fix=f"leave {option} out",
        )


def begin_counting(model: RankModel) -> None:
    """Make the layers of experts on this rank count the tokens of each expert from now on."""
    for stage in model.stages.values():
        stage.program.draws.routed = {}


def write_routing(model: RankModel, path: str) -> None:
    """Write the counts of all ranks as the file ``path``, at once. Collective
    over all ranks; raises UsageError AP101 if the file cannot be written."""
    own = [
        (name, counts.tolist())
        for stage in model.stages.values()
        for name, counts in (stage.program.draws.routed or {}).items()
    ]
    totals: dict[str, list[int]] = {}
    for name, counts in (each for rank in gather_on_first(own) for each in rank):
        before = totals.get(name, [0] * len(counts))
        totals[name] = [one + other for one, other in zip(before, counts, strict=True)]
    if model.rank != 0:
        return
    layers = [asdict(layer) for layer in _layers(model.program, totals)]
    table = {"format": FORMAT, "version": VERSION, "layers": layers}
    beside = f"{path}.{os.getpid()}"
    with writing(path, "--count-routing"):
        Path(beside).write_text(json.dumps(table) + "\n", encoding="utf-8")
        os.replace(beside, path)


def _layers(program: Program, totals: Mapping[str, list[int]]) -> Iterator[RoutedLayer]:
    for node in filter(is_expert_layer, program.graph):
        num_experts, chosen = _form(program, node)
        counts = tuple(totals.get(node.name, [0] * num_experts))
        yield RoutedLayer(node.name, num_experts, chosen, sum(counts) // chosen, counts)


def _form(program: Program, node: Any) -> tuple[int, int]:
    """Return the number of experts of a layer, and the number chosen for each token."""
    return argument(node, 8, "num_experts"), program.graph.spec(node.inputs[1]).shape[-1]


def loads_of(program: Program, path: str) -> ExpertLoads:
    """Return the loads of a model's experts in the routing file ``path``, or in a plan made by
    one. Raises UsageError AP176 if there is no such file, or if it is of another model, and AP177
    if the model has no experts."""
    check_has_experts(program, "--routing")
    given = _read(path)
    wanted = {node.name: _form(program, node) for node in filter(is_expert_layer, program.graph)}
    for name, (num_experts, chosen) in wanted.items():
        if name not in given:
            known = ", ".join(given) or "none"
            raise _unusable(path, f"it has no layer {name}; its layers: {known}")
        found = given[name].num_experts, given[name].chosen or chosen
        if found != (num_experts, chosen):
            text = f"in {name} the file has {found[1]} of {found[0]} experts for each token"
            raise _unusable(path, f"{text}, the model {chosen} of {num_experts}")
        if not any(given[name].counts):
            raise _unusable(path, f"no tokens of {name} were counted")
    unknown = [name for name in given if name not in wanted]
    if unknown:
        raise _unusable(path, f"the model has no layer of experts {unknown[0]}")
    counts = {name: given[name].counts for name in wanted}
    return ExpertLoads.of(counts, program.graph, program.blocks)


def _read(path: str) -> dict[str, RoutedLayer]:
    """Return the layers of a routing file, or of a plan, by name."""
    try:
        table = parse_json(read_text(Path(path)))
        check_texts(table)
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise _unusable(path, why) from error
    if isinstance(table, dict) and "stages" in table:
        placements = [each for stage in load_plan(path).stages for each in stage.placements]
        return {p.layer: RoutedLayer(p.layer, len(p.counts), 0, 0, p.counts) for p in placements}
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise _unusable(path, f"its format is not {FORMAT}")
    if table.get("version") != VERSION:
        raise _unusable(path, f"it has version {table.get('version')!r}, not {VERSION}")
    layers = table.get("layers")
    if not isinstance(layers, list):
        raise _unusable(path, "it has no list named layers")
    return {layer.name: layer for layer in (_layer(path, each) for each in layers)}


def _layer(path: str, table: Any) -> RoutedLayer:
    kinds = {"name": str, "num_experts": int, "chosen": int, "tokens": int, "counts": list}
    if not isinstance(table, dict) or table.keys() != kinds.keys():
        raise _unusable(path, f"a layer has other keys than {', '.join(kinds)}")
    counts = table["counts"]
    is_whole = all(type(table[name]) is kind for name, kind in kinds.items())
    if not is_whole or not all(type(each) is int and each >= 0 for each in counts):
        raise _unusable(path, f"a value of layer {table['name']!r} is not a whole number")
    layer = RoutedLayer(**{**table, "counts": tuple(counts)})
    is_sum = sum(counts) == layer.tokens * layer.chosen
    if len(counts) != layer.num_experts or not is_sum:
        raise _unusable(path, f"the counts of layer {layer.name!r} do not fit its other numbers")
    return layer


def _unusable(path: str, why: str) -> UsageError:
    return UsageError(
        "AP176",
        f"cannot plan by the routing file {path}",
        why=why,
        where=f"--routing {path}",
        fix=f"{COUNT} writes one for the model",
    )
