"""``autoparallel explain``: why a plan is as it is, and what would change it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoparallel.commands.options import (
    DatabaseOption,
    JsonOption,
    TrustOption,
    print_json,
    stdout_console,
)
from autoparallel.planner.errors import UsageError

if TYPE_CHECKING:
    from autoparallel.planner.plan import Plan

PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="a plan file")]
NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="[NAME]",
        help="a parameter, op, module or block; 'stage 0'; zero, recompute, schedule, microbatches",
    ),
]
WhyNotOption = Annotated[
    str | None,
    typer.Option(
        "--why-not", metavar="tp=4,pp=2", help="plan again with this forced, and say what loses"
    ),
]
WhatIfOption = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        metavar="FIGURE=VALUE",
        help="plan again for a changed cluster: link.inter.bytes_per_second=50e9, "
        "device.memory_bytes=40GiB, device.peak.bfloat16=*2; repeatable",
    ),
]
MeasuredOption = Annotated[
    str | None,
    typer.Option("--measured", metavar="FILE", help="a file of run --metrics to compare with"),
]
LimitOption = Annotated[
    float, typer.Option("--time-limit", min=0.1, help="seconds for planning again")
]


def explain(
    plan: PlanArgument,
    name: NameArgument = "",
    why_not: WhyNotOption = None,
    what_if: WhatIfOption = None,
    measured: MeasuredOption = None,
    database: DatabaseOption = None,
    time_limit: LimitOption = 20.0,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Explain a plan: the alternatives at a place, priced, or what a change would make of it."""
    asked = [bool(name), why_not is not None, bool(what_if), measured is not None]
    if sum(asked) != 1:
        raise UsageError(
            "AP360", "explain needs one of NAME, --why-not, --what-if and --measured",
            fix="for example: autoparallel explain plan.json zero",
        )  # fmt: skip
    from autoparallel.planning.plan_files import load_plan

    loaded = load_plan(plan)
    if measured is not None:
        _measured(loaded, plan, measured, database, trust=trust, json=json)
        return
    from autoparallel.analysis.recaptured import recaptured
    from autoparallel.cache.plan_cache import plan_cache
    from autoparallel.report import explanation as pages

    with plan_cache() as cache:
        model = recaptured(loaded, plan, trust=trust, cache=cache.values)
        if why_not is not None:
            from autoparallel.analysis.what_if import why_not as forced_plan

            other = forced_plan(model, why_not, time_limit, cache.values)
            if json:
                print_json(pages.why_not_json(loaded, other, why_not))
            else:
                pages.print_why_not(loaded, other, why_not, stdout_console())
        elif what_if:
            from autoparallel.analysis.what_if import what_if as changed

            found = changed(model, what_if, time_limit, cache.values)
            if json:
                print_json(pages.what_if_json(found))
            else:
                pages.print_what_if(found, stdout_console())
        else:
            from autoparallel.analysis.explain import explain as explained

            reasons = explained(model, name)
            if json:
                print_json(pages.explanation_json(reasons))
            else:
                pages.print_explanation(reasons, stdout_console())


def _measured(
    plan: Plan, path: str, measured: str, database: str | None, *, trust: bool, json: bool
) -> None:
    """What was predicted beside a run, and beside the blocks that were measured, if any."""
    from autoparallel.analysis.compare import read_run
    from autoparallel.analysis.measured_blocks import compute_errors
    from autoparallel.analysis.recaptured import recaptured
    from autoparallel.cache.database import find_profile
    from autoparallel.cache.plan_cache import plan_cache
    from autoparallel.report.explanation import measured_json, print_measured

    run, blocks = read_run(Path(measured)), None
    if find_profile(plan.cluster, "auto", database) is not None:
        with plan_cache() as cache:
            model = recaptured(plan, path, trust=trust, profile="analytic", cache=cache.values)
            blocks = compute_errors(model, database)
    if json:
        print_json(measured_json(plan, run, blocks))
    else:
        print_measured(plan, run, blocks, stdout_console())
