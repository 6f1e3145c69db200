"""Integer programs of a plan's stages for other solvers: as PuLP problems and as files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from autoparallel.analysis.plan_model import load_plan_model
from autoparallel.options.outputs import check_output_file, writing
from autoparallel.planner.errors import UsageError
from autoparallel.planner.intra_op.pulp_solver import import_pulp
from autoparallel.planner.search.stage_program import stage_program
from autoparallel.planning.plan_files import load_plan

if TYPE_CHECKING:
    from autoparallel.planner.plan import Mode
    from autoparallel.planner.search.stage_program import Minimized, StageProgram

FORMATS = (".lp", ".mps")


@dataclass(frozen=True, slots=True)
class WrittenProgram:
    """Result of writing an integer program: path, size, and the plan's objective value."""

    path: Path
    num_variables: int
    num_binaries: int
    num_constraints: int
    unit: str
    planned: float | None


def write_program(problem: Any, path: str | Path) -> None:
    """Write a ``pulp.LpProblem`` in the format given by the ending of ``path``.

    Raises UsageError AP101 if the file cannot be written.
    """
    with writing(path, "-o"):
        if Path(path).suffix == ".lp":
            problem.writeLP(str(path))
        else:
            problem.writeMPS(str(path))


def check_format(path: str | Path) -> None:
    """Raise UsageError AP332 for a path that ends in neither ``.lp`` nor ``.mps``."""
    if Path(path).suffix not in FORMATS:
        raise UsageError(
            "AP332", f"{path} ends in neither .lp nor .mps", where="-o", fix="-o stage.mps"
        )
    check_output_file(path)


def plan_program(
    plan_path: str,
    stage: int,
    *,
    minimized: Minimized = "time",
    memory_limit_bytes: int | None = None,
    profile: str = "auto",
    database: str | None = None,
    trust: bool = False,
) -> StageProgram:
    """Return the integer program of stage ``stage`` of a plan file, whose model is captured again.
    ``minimized`` is its objective: time within the memory limit, time alone, or memory.

    Raises the errors of ``load_plan``, ``check_trusted`` and ``stage_program``, and PlanError AP550
    if the model has changed since the plan was made.
    """
    import_pulp("an integer program in a file")
    plan = load_plan(plan_path)
    made = load_plan_model(
        plan, plan_path, trust=trust, profile=cast("Mode", profile), database=database
    )
    return stage_program(
        made.graph,
        made.program.blocks,
        plan,
        stage,
        minimized=minimized,
        memory_limit_bytes=memory_limit_bytes,
        basis=made.basis,
    )


def write_plan_program(found: StageProgram, output: str) -> WrittenProgram:
    """Write the integer program of a stage to the file ``output``."""
    problem = found.named.as_pulp()
    write_program(problem, output)
    return WrittenProgram(
        Path(output),
        problem.numVariables(),
        found.named.program.num_binaries,
        problem.numConstraints(),
        found.unit,
        found.planned,
    )
