"""``autoparallel export``: a checkpoint's weights, or a plan, in the formats of other programs."""

from __future__ import annotations

from typing import cast

from autoparallel.exporting.plans import check_plan_options, export_plan, is_plan_format
from autoparallel.exporting.solver_programs import check_format, plan_program, write_plan_program
from autoparallel.exporting.weights import export as write
from autoparallel.options.parse import parse_size
from autoparallel.options.results import say, say_json
from autoparallel.planner.search.stage_program import Minimized


def export(
    source: str,
    *,
    to: str | None,
    output: str,
    model: str | None,
    lora: str | None,
    dtype: str | None,
    max_shard_size: str,
    force: bool,
    trust: bool,
    json: bool,
) -> None:
    """Write a checkpoint's weights, or a plan for another training system, into ``output``."""
    if is_plan_format(to, source):
        assert to is not None
        own = {"--model": model, "--lora": lora, "--dtype": dtype}
        check_plan_options(name for name, value in own.items() if value is not None)
        wrote = export_plan(source, output, to=to, force=force, trust=trust)
        if json:
            say_json("export", {"files": wrote.files, "start": wrote.start, **wrote.facts})
        else:
            say(f"{output}: {', '.join(wrote.files)}")
            say("\n".join(filter(None, (f"start: {wrote.start}", wrote.report))))
        return

    done = write(
        source,
        output,
        to=to or "safetensors",
        model=model,
        lora=lora,
        dtype=dtype,
        max_shard_size=max_shard_size,
        force=force,
        trust=trust,
    )
    if json:
        names = [file.name for file in done.files]
        found = {"files": names, "tensors": done.num_tensors, "bytes": done.num_bytes}
        say_json("export", found)
        return
    files = f"{len(done.files)} files" if len(done.files) > 1 else done.files[0].name
    say(f"{done.folder}: {done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB, in {files}")


def program(
    plan: str,
    *,
    stage: int,
    objective: str,
    memory_limit: str | None,
    output: str,
    profile: str,
    database: str | None,
    trust: bool,
) -> None:
    """Write the integer program that chooses the layouts of the plan's stage number ``stage``."""
    check_format(output)
    found = plan_program(
        plan,
        stage,
        minimized=cast("Minimized", objective),
        memory_limit_bytes=None if memory_limit is None else parse_size(memory_limit),
        profile=profile,
        database=database,
        trust=trust,
    )
    done = write_plan_program(found, output)
    say(
        f"{done.path}: {done.num_variables:,} variables ({done.num_binaries:,} binary), "
        f"{done.num_constraints:,} constraints; minimizes {done.unit}"
    )
    if done.planned is not None:
        say(f"the plan's own layouts: {done.planned:.6f} {done.unit}")
