"""Plans, comparisons and estimates for Python users: displayed in notebooks, and as data frames.

The planner's ``Plan`` is plain data without a display. The public functions ``plan`` and
``load_plan`` return a ``ShownPlan``, which has the same fields and equals the same plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoparallel.analysis.compare import Item, load_items
from autoparallel.analysis.estimate import (
    DEFAULT_DEVICES,
    DEFAULT_LORA,
    Asked,
    Estimate,
    estimate_target,
    has_lora,
    num_processes,
    parse_devices,
)
from autoparallel.analysis.facts import (
    candidate_rows,
    configuration_text,
    figure_rows,
    memory_rows,
    stage_rows,
)
from autoparallel.analysis.sharding import weight_rows
from autoparallel.cache.plan_cache import plan_cache
from autoparallel.html import plan_notebook
from autoparallel.html.compared import compared_notebook, compared_page
from autoparallel.html.rendering import render
from autoparallel.options.option import check_names
from autoparallel.options.parse import did_you_mean
from autoparallel.options.progress import shown_to_callers
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Plan
from autoparallel.planning import plan_files
from autoparallel.report import describe
from autoparallel.report.comparison import comparison_rows, print_comparison
from autoparallel.report.estimates import (
    METHODS,
    estimate_table,
    estimates_json,
    estimates_title,
    print_estimates,
)
from autoparallel.report.printing import print_to_text
from autoparallel.target.from_python import make_target

if TYPE_CHECKING:
    import pandas


class ShownPlan(Plan):
    """``Plan`` with a display: HTML in notebooks, the short report in IPython, two lines
    elsewhere."""

    __slots__ = ()
    __hash__ = Plan.__hash__

    def __repr__(self) -> str:
        figures = "  ".join(
            f"{each.name} {each.text}" for each in figure_rows(self) if each.name != "bubble"
        )
        place = f"{self.cluster.name}, {self.model.precision}"
        return f"<Plan {configuration_text(self)} on {place}\n {figures}>"

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a training step."""
        return self.prediction.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens (samples, for models without sequences) per second."""
        return self.prediction.tokens_per_second

    @property
    def model_flops_utilization(self) -> float:
        """Predicted fraction of peak FLOPS used by the model, recomputation not counted."""
        return self.prediction.model_flops_utilization

    @property
    def peak_memory_bytes(self) -> int:
        """Predicted peak bytes of the fullest device."""
        return self.prediction.peak_memory_bytes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return all(getattr(self, each.name) == getattr(other, each.name) for each in fields(Plan))

    def _repr_html_(self) -> str:
        return plan_notebook(self)

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """Print the short report through IPython's ``printer``, where HTML cannot be shown."""
        printer.text("ShownPlan(...)" if is_cycle else describe(self, short=True))

    def to_frame(self, what: str = "stages") -> pandas.DataFrame:
        """Return a part of the plan as a pandas DataFrame, in seconds and bytes.

        The parts are "stages" (a row per stage), "memory" (bytes by stage and category), "weights"
        (the layout of each parameter) and "candidates" (this plan and its alternatives).

        Raises UsageError: AP340 if pandas is not installed, AP341 for an unknown part.
        """
        if what not in TABLES:
            raise UsageError(
                "AP341",
                f"a plan has no table {what!r}",
                fix=did_you_mean(what, tuple(TABLES)) or f"use one of {', '.join(TABLES)}",
            )
        return data_frame(TABLES[what](self))


TABLES: dict[str, Callable[[Plan], Sequence[Mapping[str, Any]]]] = {
    "stages": stage_rows,
    "memory": memory_rows,
    "weights": weight_rows,
    "candidates": candidate_rows,
}
"""Functions that return each part of a plan as rows of plain values."""


def data_frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return rows as a DataFrame. Raises UsageError AP340 if pandas is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise UsageError(
            "AP340",
            "to_frame needs pandas, which is not installed",
            why=str(error),
            fix="pip install pandas",
        ) from error
    return pandas.DataFrame(rows)


def with_display(plan: Plan) -> ShownPlan:
    """Return the plan as a ``ShownPlan``."""
    return ShownPlan(**{each.name: getattr(plan, each.name) for each in fields(Plan)})


@dataclass(frozen=True, slots=True, repr=False)
class Comparison:
    """Comparison of plans and runs with the first: as text, notebook, HTML page and data frame."""

    items: tuple[Item, ...]

    def __repr__(self) -> str:
        return print_to_text(partial(print_comparison, self.items))

    def _repr_html_(self) -> str:
        return compared_notebook(self.items)

    def page(self) -> str:
        """Return the self-contained HTML page, as written by ``compare --html``."""
        return compared_page(self.items)

    def to_frame(self) -> pandas.DataFrame:
        """Return a row per item: seconds, bytes, shares, and differences from the first item.

        Raises UsageError AP340 if pandas is not installed.
        """
        return data_frame(comparison_rows(self.items))


def compare(*items: Plan | str | Path, trust: bool = False, progress: bool = True) -> Comparison:
    """Compare plans, runs and common configurations with the first item.

    An item is a plan, the path of a plan file or of a run's folder, a file of ``run --metrics``, or
    the name of a baseline: ``"fsdp"``, ``"tp8"``, ``"3d:tp=8,pp=4"``. Baselines are priced for the
    model, batch and cluster of the first plan; this runs the plan's code, which ``trust`` allows if
    it is outside the current folder. ``progress=False`` shows no progress bars.

    Raises UsageError AP353 to AP356, AP155, and the errors of loading a plan and its model.
    """
    with plan_cache() as cache, shown_to_callers(progress) as observe:
        return Comparison(load_items(items, cache.values, trust=trust, observe=observe))


class Estimates(tuple[Estimate, ...]):
    """Sequence of estimates with a display: as text, in a notebook, and as a data frame."""

    __slots__ = ()

    def __repr__(self) -> str:
        return print_to_text(partial(print_estimates, self))

    def _repr_html_(self) -> str:

        titles, rows = estimate_table(self)
        methods = [METHODS[each.method] for each in self]
        context = {"title": estimates_title(self), "titles": titles}
        return render(
            "estimated_notebook.html", {**context, "rows": zip(self, methods, rows, strict=True)}
        )

    def to_frame(self) -> pandas.DataFrame:
        """Return a row per device and training method, in seconds and bytes.

        Raises UsageError AP340 if pandas is not installed.
        """
        rows = estimates_json(self)
        return data_frame([{k: v for k, v in row.items() if k != "memory_bytes"} for row in rows])


def estimate(
    model: Any,
    example_batch: Any = None,
    *,
    devices: str | Sequence[str] = DEFAULT_DEVICES,
    loss_fn: Any = None,
    progress: bool = True,
    **options: Any,
) -> Estimates:
    """Find the fewest devices of each kind that train ``model``, with the plan and its figures.

    Returns a sequence of ``Estimate``, displayed as a table in notebooks. On a terminal and in a
    notebook progress bars are shown, unless ``progress=False``. ``model``, ``example_batch`` and
    ``loss_fn`` are as in ``plan``. ``devices`` are names of devices or clusters (``"8xH100"``),
    joined by commas or in a sequence. ``options`` are fields of ``Asked``: ``global_batch``,
    ``seq``, ``precision``, ``optimizer``, ``lora`` (``"none"``: no adapters; None: default adapters
    for ``hf:`` targets), ``max_devices``, ``seconds``, ``tokens``, ``prices``, ``processes``.

    Raises UsageError AP350 for an unknown device, AP141 for an unknown option, and the errors of
    planning.
    """
    target = make_target(model, example_batch, loss_fn)
    check_names(options, [name for name in Asked.__dataclass_fields__ if name != "devices"])
    text = devices if isinstance(devices, str) else ",".join(devices)
    lora = options.pop("lora", None) or (DEFAULT_LORA if has_lora(target) else None)
    lora = None if lora == "none" else lora
    processes = options.pop("processes", num_processes())
    asked = Asked(parse_devices(text), lora=lora, processes=processes, **options)
    with shown_to_callers(progress) as observe:
        return Estimates(estimate_target(target, asked, observe))


def load_plan(path: str | Path) -> ShownPlan:
    """Return the plan in the file ``path``.

    Raises UsageError AP101 if there is no such file, and PlanError if it is damaged or of another
    version.
    """
    return with_display(plan_files.load_plan(path))
