"""Stages of a plan as functions that call their blocks, and as tables of shardings.

In: the program of each stage. Out: ``StageText``: the functions of its blocks (equal functions
once), the stage's function, with runs of equal blocks as loops, and its entry in ``STAGES``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Any

from autoparallel.passes.local.stage_program import (
    BlockProgram,
    HeldValue,
    ParameterProgram,
    StageProgram,
)
from autoparallel.planner.graph.graph import Blocks, Graph
from autoparallel.planner.graph.layout import Layout
from autoparallel.planner.plan import StagePlan
from autoparallel.script.blocks import BlockFunction, block_function, module_path
from autoparallel.script.expressions import (
    INDENT,
    Expression,
    assignment,
    dictionary,
    function,
    literal,
)

WRAPPERS = {"full": "checkpoint", "selective": "keeping_products"}
"""Function in the script that wraps the call of a recomputed block, by recomputation mode."""


@dataclass(slots=True)
class Functions:
    """Functions of a script that compute blocks, by name; equal functions of blocks are merged."""

    taken: frozenset[str] = frozenset()
    """Names that are already used."""
    named: dict[str, BlockFunction] = field(default_factory=dict)
    about: dict[str, list[str]] = field(default_factory=dict)
    """Names of the blocks that each function computes."""

    def add(self, made: BlockFunction, program: BlockProgram, kind: str) -> str:
        """Add a block's function unless an equal function exists; return the function's name, which
        is ``kind`` with a suffix if already used."""
        for name, known in self.named.items():
            same = known.arguments, known.text, known.weights
            if same == (made.arguments, made.text, made.weights):
                self.about[name].append(program.name)
                return name
        kind = f"{kind}_block" if kind in self.taken else kind
        count, name = 1, kind
        while name in self.named or name in self.taken:
            count += 1
            name = f"{kind}_{count}"
        self.named[name], self.about[name] = made, [program.name]
        return name

    def text(self) -> str:
        """Return the text of all functions."""
        return "\n\n\n".join(map(self._one, self.named))

    def _one(self, name: str) -> str:
        made = self.named[name]
        arguments = [*(f"{each}: Tensor" for each in made.arguments), "w: Weights"]
        arguments += ["mesh: Mesh"] * made.takes_mesh + ["draw: Draw"] * made.takes_draw
        result = "Tensor" if len(made.results) == 1 else "tuple[Tensor, ...]"
        head = f"{name}({', '.join(arguments)}) -> {result}"
        return function(head, _note(self.about[name]), made.text.splitlines())


def _note(blocks: Sequence[str]) -> str:
    first, last = blocks[0], blocks[-1]
    return f"Block {first}." if first == last else f"Blocks {first} to {last}."


@dataclass(frozen=True, slots=True)
class _Call:
    """Call of a block's function in a stage: names of the values that it takes and returns, the
    path of the block's module, its recomputation, and the number of its first random op."""

    function: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    path: str
    recompute: str
    first_number: int


@dataclass(frozen=True, slots=True)
class StageText:
    """Texts of a script for one stage: its function, its entry in ``STAGES``, its parameters."""

    function: str
    entry: str
    parameters: str
    uses: frozenset[str]


def stage_text(
    program: StageProgram,
    plan: StagePlan,
    graph: Graph,
    blocks: Blocks,
    *,
    number: int,
    functions: Functions,
) -> StageText:
    """Write the texts of stage ``number``; functions of its blocks are added to ``functions``."""

    def layout_of(name: str) -> Layout | None:
        found = plan.layout_of(name, blocks)
        return None if found is None else found.outputs[0]

    calls = []
    for block in program.blocks:
        made = block_function(block, program, graph, layout_of)
        name = functions.add(made, block, function_name(block))
        held = {**program.parameters, **program.buffers}
        inputs = tuple(dict.fromkeys(key for key in block.inputs if key not in held))
        calls.append(
            _Call(
                name, inputs, block.outputs, module_path(block), block.recompute, made.first_number
            )
        )
    writer = _StageWriter(program, plan.zero, functions, calls)
    return StageText(
        writer.function(number),
        writer.entry(number, plan),
        _parameters(program, number),
        frozenset(writer.uses),
    )


def function_name(block: BlockProgram) -> str:
    """Name a block's function after its kind: for ``layers.3`` it is ``layer``."""
    path = re.sub(r"\W", ".", block.kind if not block.kind[-1:].isdigit() else block.name)
    last = [part for part in path.split(".") if part and not part.isdigit()][-1:] or ["block"]
    name = last[0]
    is_repeated = bool(re.search(r"\.\d+$", block.name))
    if is_repeated and name.endswith("s") and len(name) > 2:
        name = name[:-1]
    return {"h": "layer"}.get(name, name) if name.isidentifier() else "block"


@dataclass(slots=True)
class _StageWriter:
    program: StageProgram
    zero: int
    functions: Functions
    calls: Sequence[_Call]
    uses: set[str] = field(default_factory=set)
    variables: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def result_keys(self) -> tuple[str, ...]:
        """Return the names of the values that the stage's function returns: sent, kept for other
        stages or updates, and the loss."""
        program = self.program
        keys = [*program.kept, *(each.key for each in program.sends), *program.updates.values()]
        return tuple(dict.fromkeys([*keys, *([program.loss] if program.loss else [])]))

    def function(self, number: int) -> str:
        """Return the text of the function that computes the stage."""
        start = 0
        while start < len(self.calls):
            stop = self._run_from(start)
            if stop - start > 1:
                self._loop(start, stop)
            else:
                self._single(start)
            start = stop
        returned = {key: self._value(key) for key in self.result_keys()}
        return function(
            f"stage_{number}(values: dict[str, Tensor], w: Weights, mesh: Mesh, draw: Draw)"
            " -> dict[str, Tensor]",
            _note([block.name for block in self.program.blocks]),
            [*self.lines, f"return {dictionary(returned)}"],
        )

    def _value(self, key: str) -> str:
        return self.variables.get(key, f'values["{key}"]')

    def _later(self, position: int) -> set[str]:
        """Return the names of the values that are read after the call number ``position``."""
        return {key for call in self.calls[position + 1 :] for key in call.inputs} | {
            *self.result_keys()
        }

    def _variable(self, key: str, position: int, count: int) -> str:
        """Return the variable for a result of call ``position``: ``x`` if the call has one result
        (``count``) and the old ``x`` is not read later, else a name made from ``key``."""
        holder = next((k for k, name in self.variables.items() if name == "x"), None)
        if count == 1 and (holder is None or holder not in self._later(position)):
            if holder is not None:
                del self.variables[holder]
            return "x"
        name = re.sub(r"\W", "_", key)
        return f"{name}_" if name in ("values", "w", "mesh", "draw", "x") else name

    def _single(self, position: int) -> None:
        call = self.calls[position]
        inputs = [self._value(key) for key in call.inputs]
        made = [self._variable(key, position, len(call.outputs)) for key in call.outputs]
        where = f'w.of("{call.path}")' if call.path else "w"
        called = self._call(call, inputs, where, str(call.first_number))
        self.lines.append(assignment(made, called))
        self.variables.update(zip(call.outputs, made, strict=True))

    def _call(self, call: _Call, inputs: Sequence[str], where: str, number: str) -> Expression:
        """Return the call of a block's function, wrapped where it recomputes or gathers ZeRO 3
        weights. ``where`` is the text for its weights, ``number`` for the number of its first
        random op."""
        made = self.functions.named[call.function]
        arguments = [*inputs, where, *["mesh"] * made.takes_mesh]
        arguments += [f"draw.of({number})"] * made.takes_draw
        head = call.function
        if wrapper := WRAPPERS.get(call.recompute, "run_sharded" if self.zero == 3 else ""):
            self.uses.add(wrapper)
            head, arguments = wrapper, [call.function, *arguments]
        if wrapper == "checkpoint":
            arguments.append("use_reentrant=False")
        return Expression(f"{head}({', '.join(arguments)})")

    def _run_from(self, start: int) -> int:
        """Return the end of the longest sequence of calls from ``start`` on that fits a loop.

        In it each result is read only by the next call, except the last call's results.
        """
        forms = [_form(call, following) for call, following in pairwise(self.calls[start:])]
        alike = takewhile(lambda form: form is not None and form == forms[0], forms)
        stop = start + 1 + sum(1 for _ in alike)
        while self._later(stop - 1) & {
            key for call in self.calls[start : stop - 1] for key in call.outputs
        }:
            stop -= 1
        return stop

    def _loop(self, start: int, stop: int) -> None:
        calls = self.calls[start:stop]
        first, last = calls[0], calls[-1]
        carried = dict(_carried_values(first, calls[1]))
        names = {}
        for at, index in carried.items():
            before = self._value(first.inputs[at])
            names[at] = self._variable(last.outputs[index], stop - 1, len(first.outputs))
            if before != names[at]:
                self.lines.append(f"{names[at]} = {before}")
        inputs = [names.get(at, self._value(key)) for at, key in enumerate(first.inputs)]
        made = ["_"] * len(first.outputs)
        for at, index in carried.items():
            made[index] = names[at]
        for index, key in enumerate(last.outputs):
            if made[index] == "_" and key in self._later(stop - 1):
                made[index] = re.sub(r"\W", "_", key)
        prefix, begin = split_index(first.path) or ("", 0)
        step = calls[1].first_number - first.first_number
        number = f"{first.first_number - step * begin} + {step} * i"
        where = f'w.of(f"{prefix}{{i}}")'
        called = self._call(first, inputs, where, number)
        self.lines += [
            f"for i in {index_range(begin, begin + len(calls))}:",
            INDENT + assignment(made, called),
        ]
        self.variables.update(
            (key, name) for key, name in zip(last.outputs, made, strict=True) if name != "_"
        )

    def entry(self, number: int, plan: StagePlan) -> str:
        """Write the stage's entry in the table ``STAGES``."""
        program, axes = self.program, self.program.mesh.axes
        tables: dict[str, Mapping[str, HeldValue | ParameterProgram]] = {
            "inputs": program.inputs,
            "constants": program.constants,
            "buffers": program.buffers,
        }
        parts = [
            f"forward=stage_{number}",
            f"devices={tuple(plan.devices)}",
            f"mesh={dictionary(dict(zip(axes, program.mesh.shape, strict=True)))}",
            f"parameters=STAGE_{number}",
        ]
        for name, held in tables.items():
            splits = {key: dictionary(split_of(e.layout, axes)) for key, e in held.items()}
            parts += [f"{name}={dictionary(splits)}"] * bool(splits)
        if program.updates:
            updates = {name: literal(key) for name, key in program.updates.items()}
            parts.append(f"updates={dictionary(updates)}")
            parts += ["updates_once=True"] * (program.updates_once and program.num_microbatches > 1)
            parts += [f"means={tuple(sorted(program.means))}"] * bool(program.means)
        if plan.zero:
            parts.append(f"zero={plan.zero}")
            parts += [f"degree={plan.shard_degree}"] * bool(plan.shard_degree)
        if plan.zero == 3:
            self.uses.add("GatheredWeight")
            parts.append("weight=GatheredWeight")
        if program.loss is not None:
            layout = program.layouts[program.loss]
            terms = tuple(a for a, held in zip(axes, layout, strict=True) if held.kind == "P")
            parts.append(f'loss="{program.loss}"')
            parts += [f"loss_terms={literal(terms)}"] * bool(terms)
        return f"Stage({', '.join(parts)})"


def split_of(layout: Layout, axes: Sequence[str]) -> dict[str, int]:
    """Return for each mesh axis the tensor dimension that it shards, if any."""
    return {a: held.dim for a, held in zip(axes, layout, strict=True) if held.is_shard}


def split_index(path: str) -> tuple[str, int] | None:
    """Split a path into its prefix and final number: ``layers.3`` into (``layers.``, 3).

    >>> split_index("model.layers.12"), split_index("head")
    (('model.layers.', 12), None)
    """
    prefix, _, last = path.rpartition(".")
    return (f"{prefix}." if prefix else "", int(last)) if last.isdigit() else None


def index_range(start: int, stop: int) -> str:
    return f"range({start}, {stop})" if start else f"range({stop})"


def _follows(before: str, path: str) -> bool:
    own, following = split_index(before), split_index(path)
    return None not in (own, following) and following == (own[0], own[1] + 1)  # type: ignore[index]


def _form(call: _Call, following: _Call) -> tuple[Any, ...] | None:
    """Return the pattern in which call ``following`` repeats ``call`` (carried values, step of
    random numbers), None if it does not; equal patterns in a row make a loop."""
    pairs = zip(following.inputs, call.inputs, strict=False)
    continues = (
        (call.function, call.recompute) == (following.function, following.recompute)
        and _follows(call.path, following.path)
        and all(key in call.outputs or key == before for key, before in pairs)
    )
    step = following.first_number - call.first_number
    return (_carried_values(call, following), step) if continues else None


def _carried_values(call: _Call, following: _Call) -> tuple[tuple[int, int], ...]:
    """Return pairs of indices: an input of ``following``, and the output of ``call`` it reads."""
    return tuple(
        (at, call.outputs.index(key))
        for at, key in enumerate(following.inputs)
        if key in call.outputs
    )


def _parameters(program: StageProgram, number: int) -> str:
    """Write the table of a stage's parameters; equal numbered modules share an entry."""
    modules: dict[tuple[str, int], dict[str, str]] = {}
    for name, each in program.parameters.items():
        found = re.match(r"(.*?\.|)(\d+)\.(.*)", name)
        place, inner = ((found[1], int(found[2])), found[3]) if found else (("", -1), name)
        modules.setdefault(place, {})[inner] = dictionary(split_of(each.layout, program.mesh.axes))
    entries, done = [], set[tuple[str, int]]()
    for (prefix, first), splits in modules.items():
        stop = first + 1
        while first >= 0 and modules.get((prefix, stop)) == splits:
            stop += 1
        if stop - first > 1 and (prefix, first) not in done:
            numbers, table = index_range(first, stop), dictionary(splits)
            entries.append(f'**repeated("{prefix}", {numbers}, {table})')
        elif (prefix, first) not in done:
            start = f"{prefix}{first}." if first >= 0 else ""
            entries += [f'"{start}{name}": {split}' for name, split in splits.items()]
        done |= {(prefix, at) for at in range(first, stop)}
    return f"STAGE_{number} = {{{', '.join(entries)}}}"
