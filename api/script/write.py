"""``autoparallel export PLAN --to python``: the whole script.

In: a plan. Out: ``train.py`` and the model's file in a folder, which train under torchrun without
this package. Its head lists the differences from ``autoparallel run``.
"""

from __future__ import annotations

import re
from pathlib import Path

from autoparallel import __version__
from autoparallel.analysis.facts import configuration_text
from autoparallel.exporting.plans import WrittenPlan, torchrun
from autoparallel.planner.errors import PlanError
from autoparallel.planner.plan import Plan
from autoparallel.runtime.parameters.parameters import Formats
from autoparallel.script.expressions import INDENT
from autoparallel.script.model import ModelText, model_text
from autoparallel.script.parts import Parts, collect, taken_names, trim_script
from autoparallel.script.source import ExportedPlan, capture_export
from autoparallel.script.stages import Functions, StageText, split_of, stage_text
from autoparallel.script.values import batch_dims, constants_text, count_text, inputs_table

ENTRY = (
    "Trainer",
    "load_weights",
    "write_weights",
    "rows_of",
    "Draw",
    "Stage",
    "Weights",
    "Mesh",
)
"""Definitions of this package that every script uses."""
TITLES = {
    "mesh": "Collectives",
    "random_ops": "Random numbers",
    "ops": "Ops on parts of tensors",
    "local_loss": "A loss whose classes are split",
    "weights": "Weights",
    "zero": "ZeRO",
    "stages": "Stages",
    "pipeline": "The pipeline",
    "training": "The training step",
}
IMPORTS = (
    "import argparse",
    "import itertools",
    "import os",
    "from collections.abc import Iterator",
    "from pathlib import Path",
    "from typing import Any",
    "import torch",
    "import torch.distributed as dist",
    "from torch import Tensor, nn",
)
GIVEN = (
    "COMPUTE",
    "MASTER",
    "GRADIENT",
    "MICRO_BATCHES",
    "BATCH_DIMS",
    "LOSS_SCALE",
    "STAGE_RANK",
    "CROSSINGS",
    "SCHEDULE",
)


def write_script(
    plan: Plan, folder: Path, *, place: Path, plan_path: Path, trust: bool = False
) -> WrittenPlan:
    """Write the script of ``plan`` into ``folder``, which will be called ``place``.

    Raises PlanError AP366 to AP369 where it cannot be written, and as ``load_plan_model`` does.
    """
    found = capture_export(plan, str(plan_path), trust=trust)
    model = model_text(found, plan_path, folder)
    name = "train.py" if "train.py" not in model.files else "train_by_plan.py"
    start = f"{torchrun(plan.cluster)} {place / name}"
    differences = differences_of(found, model)
    (folder / name).write_text(script_text(found, model, differences, name))
    report = "\n".join(["otherwise than autoparallel run:", *(f"  - {d}" for d in differences)])
    return WrittenPlan((name, *model.files), start, report, {"differences": list(differences)})


def differences_of(found: ExportedPlan, model: ModelText) -> tuple[str, ...]:
    """Describe the differences of a script from ``autoparallel run``."""
    plan = found.plan
    lines = [
        "every rank builds the whole model on its host, and keeps its part; values are those that "
        "build_model draws on one device (as run --init exact)",
        "every rank reads the global batch, and takes its rows",
        "collectives run after or between the computations, not beside them; each weight has its "
        "own",
        "nothing is written but weights: no checkpoints, restarts or watchdog",
    ]
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
    if any(stage.zero for stage in plan.stages):
        lines.append("under ZeRO each weight is gathered by itself, when it is needed")
    if plan.gradient_order == "priority":
        lines.append("gradients are summed before the next step begins")
    return tuple(lines)


def script_text(
    found: ExportedPlan, model: ModelText, differences: tuple[str, ...], name: str
) -> str:
    """Return the script, whose file is called ``name``."""
    functions = Functions(taken_names() | {model.module})
    stages = [_stage(found, number, functions) for number in range(len(found.programs))]
    _check_same_on_all_ranks(found, stages, functions.taken)
    uses = {name for function in functions.named.values() for name in function.uses}
    uses |= {name for stage in stages for name in stage.uses}
    body = functions.text()
    counting = count_text(found)
    is_random = any(function.takes_draw for function in functions.named.values())
    wanted = {*uses, *ENTRY, "step_key" if is_random else "Trainer"}
    wanted |= {"PipelineTrainer"} if found.plan.has_pipeline else set()
    wanted |= {"ShardedStageRank"} if any(stage.zero for stage in found.plan.stages) else set()
    parts = collect(wanted, GIVEN)
    sections = [
        _head(found, differences, name),
        _imports(parts, model, uses, body),
        _section("The plan", _settings(found)),
        _section(
            "The model, its data and its optimizer",
            model.functions,
            constants_text(found),
            *([counting] if counting else []),
        ),
        _section(
            "The model's blocks, on this rank's part of each tensor",
            body,
            *(stage.function for stage in stages),
        ),
        *(
            _section(TITLES.get(module.rpartition(".")[2], module.rpartition(".")[2]), *definitions)
            for module, definitions in parts.sections.items()
        ),
        _section(
            "What each rank holds",
            *(stage.parameters for stage in stages),
            _table("STAGES: list[Stage]", [stage.entry for stage in stages]),
            *_pipeline(found),
            inputs_table(found),
        ),
        _main(found, model, counts=bool(counting), is_random=is_random),
    ]
    text = trim_script("\n\n\n".join(sections) + "\n", {*GIVEN, "GLOBAL_BATCH"})
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    head, rest = text.split("\n\n\n# -", 1)  # linters want spaces around imports
    return head.replace('"""\n\n\nfrom', '"""\n\nfrom', 1) + "\n\n# -" + rest


def _stage(found: ExportedPlan, number: int, functions: Functions) -> StageText:
    variant = found.variant
    return stage_text(
        found.programs[number],
        found.stages[number],
        variant.program.graph,
        variant.program.blocks,
        number=number,
        functions=functions,
    )


def _check_same_on_all_ranks(
    found: ExportedPlan, stages: list[StageText], taken: frozenset[str]
) -> None:
    """Raise PlanError AP369 if the last rank of a stage runs another program than the first."""
    functions, graph = Functions(taken), found.variant.program.graph
    for number, program in enumerate(found.last_programs):
        again = stage_text(
            program,
            found.stages[number],
            graph,
            found.variant.program.blocks,
            number=number,
            functions=functions,
        )
        if (again.function, again.entry) != (stages[number].function, stages[number].entry):
            raise PlanError(
                "AP369",
                f"the ranks of stage {number} run different programs",
                why="a script has one for all ranks of a stage",
                fix="train with autoparallel run",
            )


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
        *(_bullet(each) for each in differences),
        '"""',
    ]
    return "\n".join(lines)


def _bullet(text: str) -> str:
    """Wrap a list item into short lines."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) > 92:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "- " + "\n  ".join(lines)


def _imports(parts: Parts, model: ModelText, uses: set[str], body: str) -> str:
    wanted = {*IMPORTS, *parts.imports, *model.imports}
    if re.search(r"\bF\.", body):
        wanted.add("import torch.nn.functional as F")
    if "checkpoint" in uses:
        wanted.add("from torch.utils.checkpoint import checkpoint")
    merged: dict[str, set[str]] = {}
    plain = set()
    for line in wanted:
        found = re.fullmatch(r"from (\S+) import (.+)", line)
        if found:
            merged.setdefault(found[1], set()).update(found[2].split(", "))
        else:
            plain.add(line)
    froms = [_from(name, sorted(own)) for name, own in merged.items()]
    lines = sorted([*plain, *froms], key=lambda line: (line.startswith("from"), line.split()[1]))
    own = {line for line in model.imports if not _is_installed(line)}
    known = [line for line in lines if line not in own and not _is_installed(line)]
    installed = [line for line in lines if _is_installed(line)]
    groups = [known, installed, sorted(own)]
    return "from __future__ import annotations\n\n" + "\n\n".join(
        "\n".join(group) for group in groups if group
    )


def _from(module: str, names: list[str]) -> str:
    """Write an import, in lines as linters want them."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 88:
        return line
    return f"from {module} import (\n" + "".join(f"{INDENT}{name},\n" for name in names) + ")"


def _is_installed(line: str) -> bool:
    return line.split()[1].partition(".")[0] in ("torch", "transformers")


def _section(title: str, *parts: str) -> str:
    head = f"# {'-' * 10} {title} {'-' * max(3, 84 - len(title))}"
    return head + "\n\n" + "\n\n\n".join(parts)


def _settings(found: ExportedPlan) -> str:
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
        f"LOSS_SCALE = {scale}",
        f"BATCH_DIMS: dict[str, int] = {{{dims}}}",
    ]
    if plan.tf32 is not None:
        lines += [
            f"torch.backends.cuda.matmul.allow_tf32 = {'matmul' in plan.tf32}",
            f"torch.backends.cudnn.allow_tf32 = {'conv' in plan.tf32}",
        ]
    return "\n".join(lines)


def _table(name: str, entries: list[str]) -> str:
    return "\n".join([f"{name} = [", *entries, "]"]) if entries else f"{name} = []"


def _crossings(found: ExportedPlan) -> list[str]:
    """Return the values that go between stages, as entries of a table."""
    entries = []
    for each in (own for crossing in found.variant.crossing() for own in crossing):
        splits = [
            str(split_of(layout, found.stages[stage].mesh.axes)).replace("'", '"')
            for layout, stage in (
                (each.source_layout, each.source_stage),
                (each.target_layout, each.target_stage),
            )
        ]
        last = "" if each.spec.requires_grad else ", has_gradient=False"
        entries.append(
            f'{INDENT}Crossing("{each.key}", {each.source_stage}, {each.target_stage}, '
            f"{tuple(each.spec.shape)}, torch.{each.spec.dtype},\n"
            f"{INDENT}         {splits[0]}, {splits[1]}{last}),"
        )
    return entries


def _pipeline(found: ExportedPlan) -> list[str]:
    """Return the tables of values between stages and of the schedule."""
    if not found.plan.has_pipeline:
        return []
    return [_table("CROSSINGS: list[Crossing]", _crossings(found)), _schedule(found)]


def _schedule(found: ExportedPlan) -> str:
    """Write the schedule: a row of actions for the ranks of each place in the pipeline."""
    rows = [" ".join(map(str, row)) for row in found.rows]
    lines = [
        "# What each stage's ranks do in a step: 1F0 is the forward of micro-batch 0 in stage 1,",
        "# B its backward, RECV_F0 posts the receive of its input, SEND_F0 sends its "
        "result, REDUCE",
        "# sums the stage's gradients.",
    ]
    lines.append("SCHEDULE = [")
    for row in rows:
        lines += [f"{INDENT}{part}" for part in _break_row(row)]
    return "\n".join([*lines, "]"])


def _break_row(row: str) -> list[str]:
    """Write a row as a string, or as several that Python joins."""
    parts, line = [], ""
    for action in row.split():
        if len(line) + len(action) > 84:
            parts.append(line + " ")
            line = ""
        line += f" {action}" if line else action
    parts.append(line)
    if len(parts) == 1:
        return [f'"{line}",']
    return ["(", *(f'{INDENT}"{part}"' for part in parts), "),"]


SCHEDULED = (
    "        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):",
    "            scheduler.step(sum(losses) / len(losses))",
    "        else:",
    "            scheduler.step()",
)


def _main(found: ExportedPlan, model: ModelText, *, counts: bool, is_random: bool) -> str:
    scheduler, plan = model.has_scheduler, found.plan
    trainer = "PipelineTrainer" if plan.has_pipeline else "Trainer"
    kind = "ShardedStageRank" if any(stage.zero for stage in plan.stages) else "StageRank"
    lines = [
        "def named(batch: Any) -> dict[str, Tensor]:",
        '    """The tensors of a global batch by the names that stages have for them."""',
        "    tensors = {}",
        "    for name, (key, dtype, shape) in INPUTS.items():",
        "        tensor = batch[key]",
        "        if tuple(tensor.shape) != shape:",
        "            raise ValueError("
        'f"a batch has {key} of shape {tuple(tensor.shape)}, not {shape}")',
        "        tensors[name] = tensor.to(dtype) if dtype.is_floating_point else tensor",
        "    return tensors",
        "",
        "",
        "def main() -> None:",
        "    parser = argparse.ArgumentParser()",
        '    parser.add_argument("--steps", type=int, default=10)',
        '    parser.add_argument("--seed", type=int, default=0)',
        '    parser.add_argument("--accumulate", type=int, default=1, help="batches per update")',
        '    parser.add_argument("--max-norm", type=float, help="clip the gradient to this norm")',
        '    parser.add_argument("--weights", help="whole tensors to start from: .pt, '
        '.safetensors")',
        '    parser.add_argument("--save", help="the file to write the weights to")',
        "    asked = parser.parse_args()",
        "    has_gpu = torch.cuda.is_available()",
        '    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else '
        'torch.device("cpu")',
        "    if has_gpu:",
        "        torch.cuda.set_device(device)",
        '    dist.init_process_group("nccl" if has_gpu else "gloo")',
        "    torch.manual_seed(asked.seed)",
        "    model = new_model().to(MASTER)",
        "    if asked.weights:",
        "        load_weights(model, asked.weights)",
        f"    trainer = {trainer}(STAGES, model, constants(model), "
        f"{'count' if counts else 'None'}, device)",
        "    optimizer = new_optimizer(trainer.named_masters())",
        *(["    scheduler = new_scheduler(optimizer)"] if scheduler else []),
        "    data = batches(asked.seed)",
        "    for step in range(asked.steps):",
        "        losses = []",
        "        for part in range(asked.accumulate):",
        *(["            key = step_key(asked.seed, step * asked.accumulate + part)"] * is_random),
        f"            trainer.begin(named(next(data)){', key' * is_random})",
        "            is_last = part == asked.accumulate - 1",
        "            trainer.run(1 / asked.accumulate, is_last=is_last)",
        "            losses.append(trainer.loss())",
        "        norm = trainer.update(optimizer, asked.max_norm)",
        *(["        trainer.rescale(norm < float('inf'))"] * (plan.model.precision == "fp16")),
        *(SCHEDULED if scheduler else []),
        "        if dist.get_rank() == 0:",
        "            loss = sum(losses) / len(losses)",
        '            print(f"step {step + 1}  loss {loss:.17g}  norm {norm:.6g}", flush=True)',
        "    if asked.save:",
        *(["        trainer.fill_buffers(model)"] * any(p.updates for p in found.programs)),
        "        state = trainer.whole_state(model)",
        "        if state is not None:",
        "            write_weights(asked.save, state)",
        "    dist.destroy_process_group()",
        "",
        "",
        f"STAGE_RANK = {kind}",
        "",
        'if __name__ == "__main__":',
        "    main()",
    ]
    return "\n".join(lines)
