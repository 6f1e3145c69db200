"""``autoparallel compare``: plans, runs and usual configurations side by side."""

from __future__ import annotations

from typing import Annotated

import typer

from autoparallel.commands.options import JsonOption, TrustOption, print_json, stdout_console

ItemsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="ITEM…",
        help="plan files, files of run --metrics, folders of run --save, or baselines: ddp, fsdp, "
        "zero1, tp8, pp4, 3d:tp=8,pp=4",
    ),
]


HtmlOption = Annotated[
    str | None,
    typer.Option("--html", metavar="FILE", help="write the comparison as one page of HTML"),
]


def compare(
    items: ItemsArgument,
    html: HtmlOption = None,
    trust: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Compare plans, runs and baselines with the first of them."""
    from autoparallel.analysis.compare import load_items
    from autoparallel.cache.plan_cache import plan_cache
    from autoparallel.options.progress import progress
    from autoparallel.report.comparison import comparison_json, print_comparison

    with plan_cache() as cache, progress() as observe:
        found = load_items(items, cache.values, trust=trust, observe=observe)
    if html is not None:
        from autoparallel.html.compared import compared_page
        from autoparallel.html.rendering import write_html

        write_html(compared_page(found), html)
        typer.echo(f"written to {html}; open it in a browser", err=True)
    elif json:
        print_json(comparison_json(found))
    else:
        print_comparison(found, stdout_console())
