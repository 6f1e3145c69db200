"""``autoparallel export PLAN --to FORMAT``: write a plan as a script, or for other training
systems.

In: a plan file, the name of a format. Out: a folder, and a record of its files. ``WRITERS`` is the
table of formats for plans; formats for checkpoints are in ``weights``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.exporting.new_folder import check_free, new_folder
from autoparallel.options.parse import choice_error
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planning.plan_files import PLAN, load_plan

CHECKPOINT_FORMATS = ("safetensors", "hf", "pt", "peft")
"""Formats for the weights of a checkpoint."""

WRITERS: dict[str, str] = {
    "python": "autoparallel.script.write:write_script",
    "torchtitan": "autoparallel.systems.torchtitan:SYSTEM",
    "megatron": "autoparallel.systems.megatron:SYSTEM",
    "deepspeed": "autoparallel.systems.deepspeed:SYSTEM",
    "accelerate": "autoparallel.systems.accelerate:SYSTEM",
    "transformers": "autoparallel.systems.accelerate:TRAINER",
}
"""Formats for a plan: the ``PlanWriter`` of each as MODULE:NAME, imported when used."""


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """Result of exporting a plan: ``files`` are names in the folder, ``start`` is the command that
    starts the training. ``report`` is printed below; ``facts`` are further entries for
    ``--json``."""

    files: tuple[str, ...]
    start: str
    report: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


class PlanWriter(Protocol):
    """Function that writes a plan for another system into the empty ``folder``, which is moved to
    ``place`` afterwards. ``trust`` allows a target that is code outside the current folder."""

    def __call__(
        self, plan: Plan, folder: Path, *, place: Path, plan_path: Path, trust: bool
    ) -> WrittenPlan: ...


def torchrun(cluster: Cluster) -> str:
    """Return the torchrun command that starts a process per device; each host runs it."""
    counts = {host.num_devices for host in cluster.hosts}
    count = str(counts.pop()) if len(counts) == 1 else "DEVICES"
    each = f"--nproc-per-node {count}"
    if len(cluster.hosts) == 1:
        return f"torchrun {each}"
    several = f"--nnodes {len(cluster.hosts)} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun {several} {each}"


def is_plan_format(to: str | None, source: str | Path) -> bool:
    """Return whether the format ``to`` is for plans, not for weights. Raises UsageError AP870 for
    an unknown format, AP361 for a plan file with a format for checkpoints."""
    known = (*CHECKPOINT_FORMATS, *WRITERS)
    if to is not None and to not in known:
        raise choice_error("AP870", "--to", to, known)
    if to not in WRITERS and _is_plan_file(Path(source)):
        raise UsageError(
            "AP361",
            f"{source} is a plan, which has no weights"
            if to is not None
            else f"{source} is a plan: say what to export it to",
            why="" if to is None else f"--to {to} writes the weights of a checkpoint",
            fix=f"of a plan: --to {', '.join(WRITERS)}; run --save writes checkpoints with weights",
        )
    return to in WRITERS


def _is_plan_file(path: Path) -> bool:
    """Return whether a file is JSON, but not the index of sharded weights."""
    return path.is_file() and path.suffix == ".json" and not path.name.endswith(".index.json")


def check_plan_options(given: Iterable[str]) -> None:
    """Raise UsageError AP363 if options for weights are given with a plan.

    >>> check_plan_options([])
    """
    if names := ", ".join(given):
        raise UsageError(
            "AP363",
            f"{names}: a plan has no weights",
            fix="leave these options out: they are for checkpoints",
        )


def export_plan(
    source: str | Path, folder: str | Path, *, to: str, force: bool = False, trust: bool = False
) -> WrittenPlan:
    """Write the plan ``source``, a file or a folder with a plan.json, as format ``to`` into
    ``folder``.

    Raises UsageError AP362 if ``source`` is a checkpoint without a plan, AP869 if the folder is not
    empty, and the errors of ``load_plan`` and of the writer.
    """
    path, place = Path(source), Path(folder)
    if path.is_dir() and not (path / PLAN).is_file():
        raise UsageError(
            "AP362",
            f"--to {to} needs a plan, and the folder {source} has no {PLAN}",
            where=str(path.resolve()),
            fix="name a plan file; of a checkpoint: --to " + ", ".join(CHECKPOINT_FORMATS),
        )
    path = path / PLAN if path.is_dir() else path
    check_free(place, force)
    plan = load_plan(path)
    module, _, function = WRITERS[to].partition(":")
    write: PlanWriter = getattr(importlib.import_module(module), function)
    with new_folder(place) as temporary:
        return write(plan, temporary, place=place, plan_path=path, trust=trust)
