"""Input for planning a script's model, with its initial weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoparallel.options.plan_options import PlanOptions
from autoparallel.target.target import Target

if TYPE_CHECKING:
    from autoparallel.passes.initialization.deferred_init import Deferred


@dataclass(frozen=True, slots=True)
class PlanJob:
    """Model, cluster and options that ``parallelize`` was given, from which the model is planned.

    ``deferred`` is the recorded construction of a model without weights; None if it has weights.
    ``weights`` is a file or folder of initial weights (see ``runtime.parameters.pretrained``).
    """

    target: Target
    cluster: str
    options: PlanOptions
    deferred: Deferred | None = None
    weights: str | Path | None = None
    weights_partial: bool = False
    allow_idle: bool = False
    check_first_step: bool | None = None
