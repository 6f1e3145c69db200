"""``autoparallel compare``: plans, runs and common configurations side by side."""

from __future__ import annotations

from autoparallel.actions.terminal import stdout_console, write_html
from autoparallel.analysis.compare import load_items
from autoparallel.cache.plan_cache import plan_cache
from autoparallel.html.compared import compared_page
from autoparallel.options.outputs import check_output_file
from autoparallel.options.progress import progress
from autoparallel.options.results import say_json
from autoparallel.report.comparison import comparison_json, print_comparison


def compare(*, items: list[str], html: str | None, trust: bool, json: bool) -> None:
    """Print a table that compares the plans, runs and baselines ``items`` with the first item."""
    check_output_file(html, "--html")
    with plan_cache() as cache, progress() as observe:
        found = load_items(items, cache.values, trust=trust, observe=observe)
    if html is not None:
        write_html(compared_page(found), html)
    elif json:
        say_json("compare", comparison_json(found))
    else:
        print_comparison(found, stdout_console())
