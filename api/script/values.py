"""Values of a script besides its blocks: constants, counts of targets, random batches.

In: the captured program. Out: the text of the functions ``constants``, ``count`` and ``batches``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import gcd

from torch import Tensor

from autoparallel.passes.local.accumulate import Counted, build_counting
from autoparallel.passes.local.stage_program import BlockProgram, StageProgram
from autoparallel.passes.programs.batch import InputPlace
from autoparallel.passes.programs.constants import ancestors
from autoparallel.passes.programs.inputs import integer_bounds
from autoparallel.passes.programs.interpret import LITERAL
from autoparallel.planner.errors import PlanError
from autoparallel.planner.graph.graph import Graph, Node, Ref, map_refs
from autoparallel.planner.graph.layout import Mesh
from autoparallel.runtime.parameters.parameters import Formats
from autoparallel.script.blocks import block_function
from autoparallel.script.expressions import (
    INDENT,
    Expression,
    call_of,
    dictionary,
    function,
    literal,
    op_call,
)
from autoparallel.script.source import ExportedPlan

MOST_VALUES = 256
"""Largest number of elements of a tensor that is written into a script."""


def needed_constants(found: ExportedPlan) -> tuple[str, ...]:
    """Return the names of constants that stages and the function ``count`` read, and of buffers
    that the script must set, as the model that it builds has other values or another precision."""
    names: dict[str, None] = {}
    master = Formats.of(found.plan.model.precision).master
    for program in found.programs:
        names.update(dict.fromkeys(program.constants))
        names.update(
            (name, None)
            for name, held in program.buffers.items()
            if name in found.made.program.literals
            or ("float" in held.spec.dtype and f"torch.{held.spec.dtype}" != str(master))
        )
        if program.counting is not None:
            names.update(dict.fromkeys(program.counting.leaves))
    return tuple(names)


def constants_text(found: ExportedPlan) -> str:
    """Write the function ``constants``, which returns whole constants and buffers on the CPU."""
    program, graph = found.made.program, found.variant.program.graph
    names = needed_constants(found)
    order = ancestors(graph, names)
    lines: list[str] = []
    variables: dict[str, str] = {}
    for node in graph.nodes:
        if node.name not in order or node.kind not in ("constant", "buffer"):
            continue
        variables[node.name] = name = _identifier(node.name, variables.values())
        if node.kind == "buffer":
            made = _buffer(node, program.literals.get(node.name))
        else:
            made = _constant(node, program.graph, variables)
        lines.append(f"{name} = {made.text}")
        if node.name in names and node.kind == "constant":
            lines += _at_batch(name, program.graph[node.name], node)
    if any("buffers[" in line for line in lines):
        lines.insert(0, "buffers = dict(model.named_buffers(remove_duplicate=False))")
    lines.append(f"return {dictionary({name: variables[name] for name in names})}")
    note = "Whole values that depend neither on the batch nor on weights."
    return function("constants(model: nn.Module) -> dict[str, Tensor]", note, lines)


def _identifier(name: str, taken: Iterable[str]) -> str:
    made = "".join(char if char.isalnum() else "_" for char in name).strip("_")
    return f"{made}_" if made in {*taken, "model", "buffers"} or made[:1].isdigit() else made


def _buffer(node: Node, value: Tensor | None) -> Expression:
    dtype = f"torch.{node.spec.dtype}"
    if value is None:
        return Expression(f'buffers["{node.name}"].to({dtype})')
    if value.numel() > MOST_VALUES:
        raise PlanError(
            "AP367",
            f"the tensor {node.name} of {value.numel()} values cannot be written into a script",
            why=f"at most {MOST_VALUES} values are",
            where=node.source or node.module,
            fix="register it as a buffer of the model",
        )
    return call_of("torch.tensor", [value.tolist()], {"dtype": Expression(dtype)})


def _constant(node: Node, captured: Graph, variables: dict[str, str]) -> Expression:
    """Write the call of the op that computed a constant when the model was captured."""
    node = captured[node.name]
    if node.op == LITERAL:
        return call_of("torch.tensor", [node.args[0]], node.kwargs)

    def read(ref: Ref) -> Expression:
        several = len(captured[ref.name].outputs) > 1
        return Expression(variables[ref.name] + (f"[{ref.index}]" if several else ""))

    args, kwargs = map_refs((node.args, dict(node.kwargs)), read)
    namespace, _, path = node.op.partition(".")
    if namespace != "aten":
        return call_of(f"torch.ops.{node.op}", args, kwargs)
    return op_call(path, list(args), dict(kwargs))


def _at_batch(name: str, captured: Node, node: Node) -> list[str]:
    """Write lines that resize a constant from the captured batch size to a micro-batch's."""
    lines = []
    for dim, (have, want) in enumerate(zip(captured.spec.shape, node.spec.shape, strict=True)):
        if have != want:
            part = gcd(have, want)
            repeats = [want // part if d == dim else 1 for d in range(len(node.spec.shape))]
            sizes = ", ".join(map(str, repeats))
            lines.append(f"{name} = {name}.narrow({dim}, 0, {part}).repeat({sizes})")
    return lines


def count_text(found: ExportedPlan) -> str:
    """Write the script's function ``count``, which returns the divisors of mean losses (numbers of
    targets), or ``count = None`` if there are none."""
    lines: list[str] = []
    results: dict[str, str] = {}
    for stage in found.programs:
        counting = stage.counting
        if counting is None or {c.key for c in counting.losses} | {*counting.totals} <= {*results}:
            continue
        place = 'rows_of(batch["{0}"], "{0}", microbatch)'
        values = _counting_lines(found, replace(stage, counting=counting), lines, place)
        results |= {key: values[output] for key, output in counting.totals.items()}
        results |= {each.key: _count(each, values) for each in counting.losses}
    if not results:
        return "count = None"
    arguments = "batch: dict[str, Tensor], constants: dict[str, Tensor], microbatch: int"
    note = "A micro-batch's share of the divisors of a batch's mean loss."
    lines.append(f"return {dictionary(results)}")
    return function(f"count({arguments}) -> dict[str, Tensor]", note, lines)


def row_count_text(found: ExportedPlan) -> str:
    """Write the script's function ``count``: the number of targets in a rank's rows, by which the
    rank's mean loss is divided."""
    (stage,) = found.programs
    assert stage.counting is not None
    graph = found.variant.program.graph
    graph = graph.with_batch_size(found.plan.microbatch_size // stage.mesh.size)
    keys = [each.key for each in stage.counting.losses]
    counting = build_counting(graph, keys, 1, stage.draws)
    assert counting is not None
    lines: list[str] = []
    values = _counting_lines(found, replace(stage, counting=counting), lines, 'rows["{0}"]')
    (each,) = counting.losses
    lines.append(f"return ({values[each.target]} != {each.ignore_index}).sum()")
    note = "Number of targets that the loss of some rows is a mean over."
    return function("count(rows: dict[str, Tensor]) -> Tensor", note, lines)


def _counting_lines(
    found: ExportedPlan, stage: StageProgram, lines: list[str], place: str
) -> dict[str, str]:
    """Append the lines that compute numbers of targets to ``lines``; return the variable of each
    value.

    ``place`` is the Python text that reads an input, with ``{0}`` for the input's name.
    """
    counting, values = stage.counting, dict[str, str]()
    assert counting is not None
    for node in counting.inputs:
        name = _identifier(node.name, values.values())
        values[node.name] = name
        source = f'constants["{node.name}"]'
        if node.kind == "input":
            source = place.format(node.name)
        lines.append(f"{name} = {source}")
    if counting.program is None:
        return values
    program = BlockProgram(
        "count",
        "count",
        counting.program,
        tuple(node.name for node in counting.inputs),
        counting.outputs,
        (),
        (),
        "none",
    )
    alone = replace(stage, mesh=Mesh(("whole",), (1,)), parameters={}, buffers={})
    made = block_function(program, alone, found.variant.program.graph, lambda name: None)
    if made.takes_mesh or made.takes_draw or made.weights:
        raise PlanError(
            "AP366",
            "the plan cannot be exported to Python: what its micro-batches must know of "
            "each other is drawn at random",
            why="a script does not draw it before the forward",
            fix="plan with microbatches=1",
        )
    lines += made.text.splitlines()[:-1]
    return {**values, **dict(zip(counting.outputs, made.results, strict=True))}


def _count(each: Counted, values: dict[str, str]) -> str:
    weight = None if each.weight is None else values[each.weight]
    dtype = "torch.float64" if each.dtype == "float64" else "torch.float32"
    return f"count_targets({values[each.target]}, {weight}, {each.ignore_index}, {dtype})"


def _global_graph(found: ExportedPlan) -> Graph:
    """Return the model's graph with the shapes of a global batch."""
    return found.variant.program.graph.with_batch_size(found.plan.model.global_batch)


def inputs_table(found: ExportedPlan) -> str:
    """Write the table ``INPUTS``: each graph input's key in a batch, dtype and global shape."""
    places = found.made.program.inputs
    table = {
        node.name: f"({literal(_key(node.name, places[node.name]))}, torch.{node.spec.dtype}, "
        f"{tuple(node.spec.shape)})"
        for node in _global_graph(found).inputs
    }
    return f"INPUTS = {dictionary(table)}"


def _key(name: str, place: InputPlace) -> str | int:
    """Return an input's key in a batch. Raises PlanError AP366 if the input is nested, or its batch
    dimension is not the first."""
    if len(place.path) > 1 or place.dim:
        raise PlanError(
            "AP366",
            f"the plan cannot be exported to Python: the input {name} is "
            + ("inside another" if len(place.path) > 1 else f"divided in dimension {place.dim}"),
            why="a script reads dicts and tuples of tensors whose first dimension is the batch",
            fix="let the forward take such a batch",
        )
    return place.path[0]


def batch_dims(found: ExportedPlan) -> dict[str, int]:
    """Return the batch dimension of each input that has one."""
    micro = found.variant.program.graph
    whole = _global_graph(found)
    dims = {}
    for node in micro.inputs:
        shapes = zip(node.spec.shape, whole[node.name].spec.shape, strict=True)
        differing = [dim for dim, (part, size) in enumerate(shapes) if part != size]
        if differing:
            dims[node.name] = differing[0]
    return dims


def made_up_batches(found: ExportedPlan) -> list[str]:
    """Write a generator of random batches, equal to the batches of ``autoparallel run``."""
    graph = _global_graph(found)
    bounds = integer_bounds(graph)
    keys = {name: literal(_key(name, place)) for name, place in found.made.program.inputs.items()}
    return [
        "for number in itertools.count():",
        f"{INDENT}generator = torch.Generator().manual_seed(seed + number)",
        f"{INDENT}yield {{",
        *(f"{INDENT * 2}{keys[node.name]}: {_random(node, bounds)}," for node in graph.inputs),
        f"{INDENT}}}",
    ]


def _random(node: Node, bounds: dict[str, int]) -> str:
    """Write an expression for random values of an input."""
    shape, dtype = tuple(node.spec.shape), f"torch.{node.spec.dtype}"
    if "float" in dtype:
        made = f"torch.randn({shape}, generator=generator, dtype=torch.float64)"
        return made if dtype == "torch.float64" else f"{made}.to({dtype})"
    if node.name in bounds:
        return f"torch.randint({bounds[node.name]}, {shape}, generator=generator, dtype={dtype})"
    return f"torch.ones({shape}, dtype={dtype})"
