"""``autoparallel inspect``: the report of a plan, on the terminal or as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoparallel.commands.options import JsonOption, TrustOption, stdout_console

if TYPE_CHECKING:
    from autoparallel.html import Sources
    from autoparallel.planner.plan import Plan

PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="a plan file")]
StagesOption = Annotated[bool, typer.Option("--stages", help="add every stage")]
MemoryOption = Annotated[
    bool, typer.Option("--memory", help="add the memory of the fullest rank by category")
]
CandidatesOption = Annotated[
    bool, typer.Option("--candidates", help="add all other candidates of the search")
]
LayoutsOption = Annotated[
    bool, typer.Option("--layouts", help="add the layout of every weight, and what it costs")
]
AllOption = Annotated[bool, typer.Option("--all", help="all of these, and the sources")]
HtmlOption = Annotated[
    str | None,
    typer.Option("--html", metavar="FILE", help="write the report as one page of HTML"),
]
TargetOption = Annotated[
    bool,
    typer.Option(
        "--target/--no-target",
        help="with --html: load the plan's model, which runs its file, for baselines, roofline and "
        "memory in time",
    ),
]


def inspect(
    plan: PlanArgument,
    stages: StagesOption = False,
    memory: MemoryOption = False,
    candidates: CandidatesOption = False,
    layouts: LayoutsOption = False,
    everything: AllOption = False,
    html: HtmlOption = None,
    target: TargetOption = True,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Show a plan: what, where, how fast, how sure, what next; details on request."""
    from autoparallel.planner.plan_file import dumps
    from autoparallel.planning.plan_files import load_plan
    from autoparallel.report import Details, print_report
    from autoparallel.training.measurement import load_measurement, measured_text

    loaded = load_plan(plan)
    if html is not None:
        write_page(loaded, plan, html, loads_target=target, trust=trust)
        return
    if json:
        typer.echo(dumps(loaded), nl=False)
        return
    found = load_measurement(plan)
    details = Details(
        stages or everything, memory or everything, candidates or everything,
        layouts or everything, everything,
    )  # fmt: skip
    print_report(
        loaded, stdout_console(), details,
        next_steps=() if everything else next_steps(plan),
        measured=measured_text(found, loaded) if found is not None else "",
    )  # fmt: skip


def next_steps(plan_path: str) -> list[tuple[str, str]]:
    """What to do with a plan: commands, and what they are for."""
    page = Path(plan_path).with_suffix(".html").name
    return [
        (f"autoparallel inspect {plan_path} --html {page}", "the report as a page"),
        (f"autoparallel verify {plan_path}", "compare with one device"),
        (f"autoparallel run {plan_path}", "train and measure"),
    ]


def write_page(
    plan: Plan, plan_path: str, html: str, *, loads_target: bool, trust: bool = False
) -> None:
    """Writes the page of ``plan`` into the file ``html``. Raises UsageError AP343."""
    from autoparallel.html import page
    from autoparallel.html.rendering import write_html

    write_html(
        page(plan, page_sources(plan, plan_path, loads_target=loads_target, trust=trust)), html
    )
    typer.echo(f"written to {html}; open it in a browser", err=True)


def page_sources(plan: Plan, plan_path: str, *, loads_target: bool, trust: bool = False) -> Sources:
    """What a page shows besides the plan: what a run measured, and the plan priced again, or why
    its model could not be loaded."""
    from autoparallel.html import MISSING, Sources
    from autoparallel.planner.errors import AutoparallelError
    from autoparallel.training.measurement import load_measurement

    measured = load_measurement(plan_path)
    if not loads_target:
        return Sources(None, MISSING, measured)
    from autoparallel.analysis.repriced import price_again
    from autoparallel.options.progress import progress

    try:
        with progress() as observe:
            return Sources(price_again(plan, plan_path, observe, trust=trust), "", measured)
    except AutoparallelError as error:
        typer.echo(f"autoparallel: the page is without baselines: {error.what}", err=True)
        return Sources(None, f"{error.what} ({error.code})", measured)
