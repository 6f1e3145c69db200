"""The published measurements as runs to price: rows of CSV files to ``Run`` or ``Skipped``.

In: a file with the columns of those in ``data/``. Out: per row the model's shape, the cluster,
the configuration and what was measured, or the reason why the row cannot be represented.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.cost_model.ops.memory import PrecisionPolicy, policy
from autoparallel.passes.programs.program import Program as Captured
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.costs.basis import RUNTIME, CostAssumptions, Scaling

from .models import Shape
from .sources import Program

Row = Mapping[str, str]

GIB = 2**30
VOCAB_PART = 128
"""Megatron-LM pads the vocabulary to a multiple of this times the tensor-parallel degree."""


class UnusableRowError(ValueError):
    """A row that cannot be priced; the text says why."""


class Model(Protocol):
    """A model to capture: ``Shape``, or ``experts.Listed``."""

    @property
    def layers(self) -> int:
        """The number of the model's layers."""

    @property
    def repeated(self) -> int | None:
        """The number of layers that are like the repeated one; None where none is repeated."""

    @property
    def few(self) -> Model:
        """The same model with few of its layers."""

    def program(self, dtype: str) -> Captured:
        """Capture the model."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run.

    ``shape.layers`` are the model's. ``group``: runs that differ in nothing but the
    configuration, all of whose configurations were measured. ``assumed`` are the cells that
    the row does not state. ``program`` and ``assumptions``: how the source's program trains.
    """

    name: str
    source: str
    shape: Model
    cluster: Cluster
    configuration: Configuration
    measured_seconds: float | None
    measured_bytes: float | None = None
    out_of_memory: bool = False
    quality: str = "A"
    group: str = ""
    assumed: tuple[str, ...] = ()
    program: Program = field(default_factory=Program)
    assumptions: CostAssumptions = RUNTIME

    @property
    def rows(self) -> int:
        """Rows of a micro-batch on one data-parallel rank."""
        return self.configuration.microbatch_size // self.configuration.dp


@dataclass(frozen=True, slots=True)
class Skipped:
    """A row that is not priced, and why."""

    name: str
    source: str
    reason: str
    quality: str = "A"


def read(path: Path, parse: Callable[[Row, int], Run]) -> list[Run | Skipped]:
    """Every row of a file. Raises OSError where it cannot be read."""
    found: list[Run | Skipped] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        for number, cells in enumerate(csv.DictReader(file), start=2):
            row = {
                (k or "").strip(" #"): (v or "").strip()
                for k, v in cells.items()
                if not isinstance(v, list)
            }
            name = row.get("row_id") or f"line {number}"
            quality = row.get("quality") or "A"
            try:
                found.append(parse(row, number))
            except ValueError as error:
                found.append(Skipped(name, row.get("source") or path.stem, str(error), quality))
    return found


def number(row: Row, name: str, *, default: int | None = None) -> int:
    """A positive whole number of a cell; text after it is left out ("8 (stated)")."""
    words = row.get(name, "").replace(",", "").split()
    if not words and default is not None:
        return default
    try:
        value = float(words[0]) if words else 0.0
    except ValueError:
        value = 0.0
    if value < 1 or value != int(value):
        raise UnusableRowError(f"{name} is {row.get(name, '')!r}, not a positive whole number")
    return int(value)


def has_eight_bits(row: Row) -> bool:
    """Tells whether products are computed in 8 or 4 bits."""
    text = row.get("precision", "").lower()
    return any(name in text for name in ("fp8", "float8", "nvfp4"))


def scaling(row: Row) -> Scaling:
    """Return how such products are scaled: by tensor, unless the row says otherwise."""
    text = row.get("precision", "").lower()
    found: tuple[Scaling, ...] = ("mxfp8", "nvfp4", "rowwise")
    return next((each for each in found if each in text), "tensorwise")


def measured(text: str, what: str) -> float:
    """A positive measured figure."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UnusableRowError(f"{what} is {text!r}, not a measured figure")
    return value


def padded(vocab: int, tp: int) -> int:
    """The vocabulary as Megatron-LM pads it.

    >>> padded(50257, 2)
    50432
    """
    part = VOCAB_PART * tp
    return -(-vocab // part) * part


def half_policy(gradient_bytes: int, gathered_bytes: int = 2) -> PrecisionPolicy:
    """Adam in mixed precision as Megatron-LM has it: gathered + gradient + 12 bytes per
    parameter."""
    return replace(
        policy("bf16", "adamw"), gradient_bytes=gradient_bytes, gathered_bytes=gathered_bytes
    )


def check_degrees(shape: Shape, own: Configuration, num_devices: int) -> None:
    """Raises where the degrees do not make the devices or do not divide the model."""
    if own.num_devices != num_devices:
        raise UnusableRowError(
            f"tp {own.tp} × dp {own.dp} × pp {own.pp} × cp {own.cp} is not {num_devices} devices"
        )
    if shape.heads % own.tp or shape.hidden % shape.heads or shape.ffn % own.tp:
        raise UnusableRowError(f"tp {own.tp} does not divide {shape.heads} heads")
    if shape.layers < own.num_stages and own.layers is None:
        raise UnusableRowError(f"{shape.layers} layers for {own.num_stages} stages")


def microbatches(global_batch: int, dp: int, rows: int) -> int:
    """How many micro-batches a step has."""
    if global_batch % (dp * rows):
        raise UnusableRowError(
            f"a batch of {global_batch} is not dp {dp} × micro-batches of {rows}"
        )
    return global_batch // (dp * rows)
