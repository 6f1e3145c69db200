"""Model of the user in a script: its file, construction, data and optimizer.

In: the plan's target. Out: files copied into the script's folder, and the text of the functions
``new_model``, ``batches``, ``new_optimizer`` and ``new_scheduler``.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from autoparallel.planner.errors import PlanError
from autoparallel.runtime.update.optimizer import (
    ELEMENTWISE,
    LEARNING_RATE,
    MOMENTUM,
    SGD_LEARNING_RATE,
    takes_names,
)
from autoparallel.script.expressions import INDENT, function, literal
from autoparallel.script.parts import taken_names
from autoparallel.script.source import ExportedPlan
from autoparallel.script.values import made_up_batches
from autoparallel.target.huggingface import target_config
from autoparallel.target.load import split_target
from autoparallel.target.lora import parse_lora, target_paths
from autoparallel.target.target import Target
from autoparallel.target.trust import target_name


@dataclass(frozen=True, slots=True)
class ModelText:
    """Script's text for the model: ``imports`` and ``functions``; names of the copied ``files``."""

    imports: tuple[str, ...]
    functions: str
    files: tuple[str, ...]
    module: str
    """Name of the module with the model's code that the script imports."""
    has_data: bool


def model_text(found: ExportedPlan, plan_path: Path, folder: Path) -> ModelText:
    """Copy the model's files into ``folder``, and write functions that build it and yield batches.

    Raises PlanError AP366 if a file imports this package or a batch is nested, AP368 for an
    optimizer that may need tensors of other ranks.
    """
    target, plan = found.made.target, found.plan
    check_optimizer(found)
    if target.name.startswith("hf:"):
        imports, build, files = _huggingface(target, folder)
        module = ""
    else:
        place, builder = split_target(target_name(plan, plan_path))
        files = _copy_files(place, folder) if place.endswith(".py") else ()
        module = Path(files[0]).stem if files else place
        settings = ", ".join(f"{name}={literal(v)}" for name, v in plan.model.settings.items())
        imports = (f"import {module}",)
        if module in taken_names():
            imports = (f"import {module} as model_{module}",)
            module = f"model_{module}"
        build = [f"return {module}.{builder or 'build_model'}({settings})"]
    functions = [
        function("new_model() -> nn.Module", "The model, whole, on the CPU.", build),
        function(
            "batches(seed: int) -> Iterator[Any]",
            "Global batches without end, the same on every rank: put your data here.",
            _data(found, module),
        ),
        function(
            "new_optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer",
            "The optimizer of this rank's weights.",
            _optimizer(found, module),
        ),
        function(
            "new_scheduler(optimizer: torch.optim.Optimizer) -> Any",
            "The learning-rate scheduler, or None.",
            [
                "return None"
                if target.build_scheduler is None
                else f"return {module}.build_scheduler(optimizer)"
            ],
        ),
    ]
    return ModelText(
        imports, "\n\n\n".join(functions), files, module, target.build_data is not None
    )


def _copy_files(place: str, folder: Path) -> tuple[str, ...]:
    """Copy a model's file and the files that it imports into ``folder``; return the new names."""
    first = Path(place)
    done = {first.name: re.sub(r"\W", "_", first.stem) + ".py"}
    pending = [first]
    while pending:
        path = pending.pop()
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            continue
        shutil.copyfile(path, folder / done[path.name])
        for name in _imported_names(path):
            if name == "autoparallel":
                raise PlanError(
                    "AP366",
                    f"the plan cannot be exported to Python: {path.name} imports autoparallel",
                    why="a script runs where it is not installed",
                    where=str(path),
                    fix="move what needs autoparallel out of the model's file",
                )
            for beside in (path.parent / f"{name}.py", path.parent / name):
                is_there = beside.is_file() or (beside / "__init__.py").is_file()
                if is_there and beside.name not in done:
                    done[beside.name] = beside.name
                    pending.append(beside)
    return tuple(done.values())


def _imported_names(path: Path) -> set[str]:
    """Return the top-level names of the modules that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def _huggingface(
    target: Target, folder: Path
) -> tuple[tuple[str, ...], list[str], tuple[str, ...]]:
    """Save the model's configuration; return imports, code that builds the model, and files."""
    config = target_config(target)
    config.save_pretrained(folder)
    lines = ["config = transformers.AutoConfig.from_pretrained(Path(__file__).parent)"]
    for name, value in (("use_cache", "False"), ("_experts_implementation", '"eager"')):
        lines += [f"config.{name} = {value}"] * hasattr(config, name)
    lines.append(f"model = transformers.{type(_meta(target)).__name__}(config)")
    lines += _adapters(target) if target.settings.get("lora") else []
    return ("import transformers",), [*lines, "return model"], ("config.json",)


def _meta(target: Target) -> nn.Module:
    """Return the model on the meta device."""
    with torch.device("meta"):
        return target.build_model()


def _adapters(target: Target) -> list[str]:
    """Return code that freezes a model and adds LoRA adapters, whose initial values are drawn in
    the same order as by this package."""
    lora, model = parse_lora(target.settings["lora"]), _meta(target)
    for module in model.modules():  # an adapted layer has a class of this package
        if hasattr(module, "lora_A"):
            module.__class__ = type(module).__mro__[2]
    own = {path for path, module in model.named_modules() if hasattr(module, "lora_A")}
    names = tuple(dict.fromkeys(path.rpartition(".")[2] for path in target_paths(model, lora)))
    wanted = {path for path, _ in model.named_modules() if path.rpartition(".")[2] in names}
    chosen = f"path.rpartition('.')[2] in {names}" if wanted == own else f"path in {sorted(own)}"
    return [
        "model.requires_grad_(False)",
        "for path, layer in list(model.named_modules()):",
        f"{INDENT}if {chosen}:",
        f"{INDENT * 2}sizes = layer.weight.shape if isinstance(layer, nn.Linear) else "
        "layer.weight.shape[::-1]",
        f"{INDENT * 2}layer.lora_A = nn.Linear(sizes[1], {lora.rank}, bias=False)",
        f"{INDENT * 2}layer.lora_B = nn.Linear({lora.rank}, sizes[0], bias=False)",
        f"{INDENT * 2}nn.init.zeros_(layer.lora_B.weight)",
    ]


def _data(found: ExportedPlan, module: str) -> list[str]:
    """Return code that yields global batches: of the target's data, or random."""
    build, model = found.made.target.build_data, found.plan.model
    if build is None:
        return made_up_batches(found)
    taken = inspect.signature(build).parameters
    known = {"global_batch": model.global_batch, "seq": model.seq}
    options = [f"{n}={v}" for n, v in known.items() if n in taken and v is not None]
    options += ["seed=seed"] * ("seed" in taken)
    call = ", ".join(["0", "1", *options])
    return [
        "for number in itertools.count():",
        f"{INDENT}torch.manual_seed(seed + number)",
        f"{INDENT}yield from {module}.build_data({call})",
    ]


def _optimizer(found: ExportedPlan, module: str) -> list[str]:
    build, name = found.made.target.build_optimizer, found.plan.model.optimizer
    if build is not None:
        given = "iter(named)" if takes_names(build) else "[weight for _, weight in named]"
        return [f"return {module}.build_optimizer({given})"]
    weights = "[weight for _, weight in named]"
    if name.startswith("sgd"):
        momentum = f", momentum={MOMENTUM}" if name == "sgd-momentum" else ""
        return [f"return torch.optim.SGD({weights}, lr={SGD_LEARNING_RATE}{momentum})"]
    kind = "Adam" if name == "adam" else "AdamW"
    return [f"return torch.optim.{kind}({weights}, lr={LEARNING_RATE})"]


def check_optimizer(found: ExportedPlan) -> None:
    """Raise PlanError AP368 if the target's optimizer may need tensors that a rank lacks.

    A script passes the optimizer this rank's shard of each weight, in a pipeline only weights of
    the rank's stages. Optimizers known to update each element by its own gradient and state are
    safe; with whole weights all optimizers of torch are. Other optimizers are unknown.
    """
    build = found.made.target.build_optimizer
    splits = any(
        stage.zero or any(each.is_shard for p in program.parameters.values() for each in p.layout)
        for stage, program in zip(found.stages, found.programs, strict=True)
    )
    if build is None or not (splits or found.plan.has_pipeline):
        return
    named = [
        (name, nn.Parameter(torch.empty(p.shape)))
        for name, p in found.made.program.model.named_parameters()
        if p.requires_grad
    ]
    made = build(iter(named) if takes_names(build) else [p for _, p in named])
    kind = type(made)
    is_torchs = kind.__module__.startswith("torch.optim")
    if kind in (*ELEMENTWISE, torch.optim.Adagrad) or (is_torchs and not splits):
        return
    raise PlanError(
        "AP368",
        f"the optimizer {kind.__name__} cannot be exported with weights on several ranks",
        why="a script gives it this rank's parts of weights, and it may compute with all of them",
        where=found.made.target.name,
        fix="plan with dp and ZeRO 0 alone, or run the plan",
    )
