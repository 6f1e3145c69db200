"""``autoparallel export PLAN --to python``: the whole script.

In: a plan. Out: a folder with ``train.py`` and the model's file, which train under torchrun without
this package. Its docstring lists the differences from ``autoparallel run``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from autoparallel import __version__
from autoparallel.analysis.facts import configuration_text
from autoparallel.exporting.plans import WrittenPlan, torchrun
from autoparallel.passes.local.stage_program import StageProgram
from autoparallel.planner.errors import PlanError
from autoparallel.planner.plan import Plan
from autoparallel.runtime.parameters.parameters import Formats
from autoparallel.script.expressions import (
    INDENT,
    Expression,
    call_of,
    dictionary,
    fold,
    function,
    literal,
)
from autoparallel.script.model import ModelText, model_text
from autoparallel.script.parts import collect, taken_names
from autoparallel.script.source import ExportedPlan, capture_export
from autoparallel.script.stages import WRAPPERS, Functions, StageText, split_of, stage_text
from autoparallel.script.values import (
    batch_dims,
    constants_text,
    count_text,
    inputs_table,
    row_count_text,
)
from autoparallel.script.whole_model import WholeModel, whole_model

TITLES = {
    "mesh": "Collectives",
    "random_ops": "Random numbers",
    "ops": "Ops on parts of tensors",
    "local_loss": "A loss whose classes are split",
    "weights": "Weights",
    "zero": "ZeRO 3",
    "stages": "Stages",
    "pipeline": "The pipeline",
    "training": "The training step",
    "data_parallel": "Data parallelism",
    "main": "The command line",
}
IMPORTS = {
    "F": "import torch.nn.functional as F",
    "checkpoint": "from torch.utils.checkpoint import checkpoint",
    "itertools": "import itertools",
    "partial": "from functools import partial",
}
"""Imports needed by the generated text, as opposed to the copied definitions."""

GIVEN = (
    "COMPUTE",
    "MASTER",
    "GRADIENT",
    "MICRO_BATCHES",
    "BATCH_DIMS",
    "LOSS_SCALE",
    "CROSSINGS",
    "SCHEDULE",
    "ROWS",
    "INPUTS",
)
"""Names that the copied definitions read and that each script defines."""


def write_script(
    plan: Plan, folder: Path, *, place: Path, plan_path: Path, trust: bool = False
) -> WrittenPlan:
    """Write the script of ``plan`` into ``folder``, which will later be moved to ``place``.

    Raises PlanError AP366 to AP369 if it cannot be written, and the errors of ``load_plan_model``.
    """
    found = capture_export(plan, str(plan_path), trust=trust)
    model = model_text(found, plan_path, folder)
    whole = whole_model(found, model.module)
    name = "train.py" if "train.py" not in model.files else "train_by_plan.py"
    start = f"{torchrun(plan.cluster)} {place / name}"
    differences = differences_of(plan, found, model, whole)
    (folder / name).write_text(script_text(found, model, whole, differences, name))
    report = "\n".join(["otherwise than autoparallel run:", *(f"  - {d}" for d in differences)])
    return WrittenPlan((name, *model.files), start, report, {"differences": list(differences)})


def differences_of(
    plan: Plan, found: ExportedPlan, model: ModelText, whole: WholeModel | None
) -> tuple[str, ...]:
    """Return sentences on differences between training by a script and by ``autoparallel run``."""
    lines = [
        "every rank builds the whole model on its host, and keeps its part; values are those that "
        "build_model draws on one device (as run --init exact)",
        "every rank reads the global batch, and takes its rows",
        "nothing is written but weights: no checkpoints, restarts or watchdog",
    ]
    if whole is None:
        lines.append(
            "collectives run after or between the computations, not beside them; each weight has "
            "its own"
        )
    elif plan.model.precision == "bf16":
        lines.append("ops have the precision that torch.autocast gives them")
    if not model.has_data:
        lines.append("the target has no build_data: batches are made up, in batches()")
    actions = {action.kind for row in found.rows for action in row}
    if "I" in actions:
        lines.append(
            f"schedule {plan.schedule}: a backward is not split; the gradients of weights are "
            "computed with those of inputs, where the plan has I, and W does nothing"
        )
    if plan.compiled:
        lines.append("blocks are not compiled")
    modes = {block.recompute for program in found.programs for block in program.blocks}
    if "selective" in modes:
        lines.append(
            "selective recomputation keeps the results of matrix products and attention, by "
            "torch.utils.checkpoint"
        )
    if plan.most_tiles > 1:
        lines.append("full recomputation runs the last ops of a block whole, in more memory")
    if whole is None and any(stage.zero for stage in plan.stages):
        lines.append("under ZeRO each weight is gathered by itself, when it is needed")
    if plan.gradient_order == "priority":
        lines.append("gradients are summed before the next step begins")
    return tuple(lines)


@dataclass(frozen=True, slots=True)
class _Contents:
    """Generated parts of a script. ``uses`` are the definitions of this package that it calls."""

    functions: tuple[str, ...]
    blocks: tuple[str, ...]
    tables: tuple[str, ...]
    uses: frozenset[str]


def script_text(
    found: ExportedPlan,
    model: ModelText,
    whole: WholeModel | None,
    differences: tuple[str, ...],
    name: str,
) -> str:
    """Return the text of the script, whose file is called ``name``.

    Raises PlanError AP369 if the first and last ranks of a stage run different programs.
    """
    contents = _blocks(found, model) if whole is None else _whole(found, whole)
    own = (model.functions, *contents.functions)
    texts = "".join([*own, *contents.blocks, *contents.tables])
    words = set(re.findall(r"\w+(?=[.(,])", texts))
    uses = contents.uses | ({"repeated", "count_targets", "rows_of"} & words)
    parts = collect({*uses, "main"}, GIVEN)
    imports = {*parts.imports, *model.imports, *(IMPORTS[name] for name in IMPORTS.keys() & words)}
    blocks = "The model's blocks, on this rank's part of each tensor"
    sections = [
        "\n\n".join(
            [
                _head(found, differences, name),
                _imports(imports, set(model.imports)),
                _section("The plan", _settings(found, whole)),
            ]
        ),
        _section("The model, its data and its optimizer", *own),
        *([_section(blocks, *contents.blocks)] if contents.blocks else []),
        *(
            _section(TITLES.get(title := module.rpartition(".")[2], title), *definitions)
            for module, definitions in parts.sections.items()
        ),
        _section("What each rank holds" if whole is None else "Batches", *contents.tables),
        'if __name__ == "__main__":\n'
        f"{INDENT}main(new_model, batches, new_optimizer, new_scheduler, new_trainer)",
    ]
    lines = "\n\n\n".join(sections).split("\n")
    return "\n".join(part for line in lines for part in fold(line)) + "\n"


def _whole(found: ExportedPlan, whole: WholeModel) -> _Contents:
    """Return the contents of a script that runs the model's own forward."""
    wrappers = {WRAPPERS[mode] for mode in whole.recomputed.values()} - {"checkpoint"}
    return _Contents(
        (row_count_text(found), whole.text()),
        (),
        (inputs_table(found), f"ROWS = {literal(whole.rows)}"),
        frozenset({"ModelTrainer", *wrappers}),
    )


def _blocks(found: ExportedPlan, model: ModelText) -> _Contents:
    """Return the contents of a script with a function for each kind of block."""
    functions = Functions(taken_names() | {model.module})
    stages = _stages(found, found.programs, functions)
    last = _stages(found, found.last_programs, Functions(functions.taken))
    for number, (stage, other) in enumerate(zip(stages, last, strict=True)):
        if (stage.function, stage.entry) != (other.function, other.entry):
            raise PlanError(
                "AP369",
                f"the ranks of stage {number} run different programs",
                why="a script has one for all ranks of a stage",
                fix="train with autoparallel run",
            )
    uses = {name for each in functions.named.values() for name in each.uses}
    uses |= {name for stage in stages for name in stage.uses}
    trainer = "PipelineTrainer" if found.plan.has_pipeline else "Trainer"
    tables = (
        *(stage.parameters for stage in stages),
        f"STAGES: list[Stage] = [{', '.join(stage.entry for stage in stages)}]",
        *([_crossings(found), _schedule(found)] if found.plan.has_pipeline else []),
        inputs_table(found),
        function(
            f"new_trainer(model: nn.Module, device: torch.device) -> {trainer}",
            "Trainer of this rank's part of the model, which is whole.",
            [f"return {trainer}(STAGES, model, constants(model), count, device)"],
        ),
    )
    return _Contents(
        (constants_text(found), count_text(found)),
        (functions.text(), *(stage.function for stage in stages)),
        tables,
        frozenset({*uses, trainer, "Draw", "Weights", "Mesh"}),
    )


def _stages(
    found: ExportedPlan, programs: Sequence[StageProgram], functions: Functions
) -> list[StageText]:
    program = found.variant.program
    return [
        stage_text(each, stage, program.graph, program.blocks, number=number, functions=functions)
        for number, (each, stage) in enumerate(zip(programs, found.stages, strict=True))
    ]


def _head(found: ExportedPlan, differences: tuple[str, ...], name: str) -> str:
    plan = found.plan
    lines = [
        f'"""Trains {plan.model.target} on {plan.cluster.num_devices} devices.',
        "",
        configuration_text(plan),
        "",
        f"    {torchrun(plan.cluster)} {name} --steps 100",
        "",
        f"Written by autoparallel {__version__} from a plan; it needs PyTorch and the model alone.",
        "Otherwise than under autoparallel run:",
        *(fill(each, 96, initial_indent="- ", subsequent_indent="  ") for each in differences),
        '"""',
    ]
    return "\n".join(lines)


SHORT_LINE = 88
"""Longest import line that linters leave unbroken by default."""


def _imports(lines: set[str], own: set[str]) -> str:
    """Write imports in groups: standard library, installed packages, the model's ``own`` files."""
    merged: dict[str, set[str]] = {}
    for line in lines:
        module, _, name = line.partition(" import ")
        merged.setdefault(module, set()).update({name} - {""})
    groups: list[list[str]] = [["from __future__ import annotations"], [], [], []]
    for module, names in sorted(merged.items(), key=lambda each: (each[0][0] == "f", each[0])):
        line = f"{module} import {', '.join(sorted(names))}" if names else module
        if len(line) > SHORT_LINE:
            body = "".join(f"{INDENT}{name},\n" for name in sorted(names))
            line = f"{module} import (\n{body})"
        groups[2 if _is_installed(line) else 3 if line in own else 1].append(line)
    return "\n\n".join("\n".join(group) for group in groups if group)


def _is_installed(line: str) -> bool:
    return line.split()[1].partition(".")[0] in ("torch", "transformers")


def _section(title: str, *parts: str) -> str:
    head = f"# {'-' * 10} {title} {'-' * max(3, 84 - len(title))}"
    return head + "\n\n" + "\n\n\n".join(filter(None, parts))


def _settings(found: ExportedPlan, whole: WholeModel | None) -> str:
    plan = found.plan
    formats = Formats.of(plan.model.precision, plan.states)
    scale = "2.0**16" if plan.model.precision == "fp16" else "1.0"
    dims = ", ".join(f'"{name}": {dim}' for name, dim in batch_dims(found).items())
    lines = [
        f"GLOBAL_BATCH = {plan.model.global_batch}",
        f"MICRO_BATCHES = {plan.num_microbatches}",
        f"COMPUTE = {formats.compute}  # what blocks compute in",
        f"MASTER = {formats.master}  # of the weights that the optimizer updates",
        f"GRADIENT = {formats.gradient}  # that gradients are summed in",
    ]
    if whole is None:
        lines += [f"LOSS_SCALE = {scale}", f"BATCH_DIMS: dict[str, int] = {{{dims}}}"]
    if plan.tf32 is not None:
        lines += [
            f"torch.backends.cuda.matmul.allow_tf32 = {'matmul' in plan.tf32}",
            f"torch.backends.cudnn.allow_tf32 = {'conv' in plan.tf32}",
        ]
    return "\n".join(lines)


def _crossings(found: ExportedPlan) -> str:
    """Write the table ``CROSSINGS`` of the tensors that are sent between stages."""
    entries = []
    for each in (own for crossing in found.variant.crossing() for own in crossing):
        ends = (
            (each.source_layout, each.source_stage),
            (each.target_layout, each.target_stage),
        )
        splits = [
            Expression(dictionary(split_of(layout, found.stages[stage].mesh.axes)))
            for layout, stage in ends
        ]
        dtype = Expression(f"torch.{each.spec.dtype}")
        given = [each.key, each.source_stage, each.target_stage, tuple(each.spec.shape), dtype]
        options = {} if each.spec.requires_grad else {"has_gradient": False}
        entries.append(call_of("Crossing", [*given, *splits], options).text)
    return f"CROSSINGS: list[Crossing] = [{', '.join(entries)}]"


SCHEDULE_NOTE = """\
# What each stage's ranks do in a step: 1F0 is the forward of micro-batch 0 in stage 1, B its
# backward, RECV_F0 posts the receive of its input, SEND_F0 sends its result, REDUCE sums the
# stage's gradients."""


def _schedule(found: ExportedPlan) -> str:
    """Write the schedule: a row of actions for each pipeline rank."""
    rows = [" ".join(map(str, row)) for row in found.rows]
    lines = [f'{INDENT}"""{fill(row, 90, subsequent_indent=INDENT)}""",' for row in rows]
    return "\n".join([SCHEDULE_NOTE, "SCHEDULE = [", *lines, "]"])
