"""Training system whose steps ``simulate`` prices: its assumptions, changed by options.

In: the values of ``--as``, ``--kernels``, ``--dispatcher`` and the related options. Out:
``CostAssumptions``, and the changes to the configuration. Raises ``UsageError`` AP112 if a value is
unknown, or two values contradict each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from autoparallel.cost_model.collectives.dispatch import DISPATCHERS
from autoparallel.options.parse import choice_error
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.costs.basis import (
    SCALINGS,
    SYSTEMS,
    CostAssumptions,
    Kernels,
    SystemName,
    assumptions_of,
    system,
)
from autoparallel.planner.errors import UsageError
from autoparallel.planner.kernels.recompute import RECOMPUTED_PARTS, RecomputedPart
from autoparallel.planner.ops.experts import ExpertKernels

EXPERTS: Mapping[Kernels, ExpertKernels] = {
    "eager": "separate",
    "compiled": "activation",
    "fused": "one",
}
"""Fusion of the ops between experts' matrix products, for each value of ``--kernels``."""

Choice = TypeVar("Choice", bound=str)


@dataclass(frozen=True, slots=True)
class TrainedAs:
    """Training system whose steps are priced (``--as``: this package, Megatron-LM, …), with the
    assumptions about its costs, and its kernels (eager, compiled or fused).

    ``has_parts`` says that the user chose the parts of a layer to recompute.
    """

    name: SystemName
    assumptions: CostAssumptions
    kernels: Kernels
    has_parts: bool

    def configured(self, own: Configuration) -> Configuration:
        """Return ``own`` with the choices that this system makes: recomputation, sequence-parallel
        norms, and compiled or fused kernels."""
        if self.has_parts:
            own = replace(own, recompute="selective")
        if system(self.name).splits_sequences and own.tp > 1:
            own = replace(own, sequence_parallel=True)
        is_fused = self.kernels == "fused"
        return replace(own, compiled=self.kernels != "eager", fuses_products=is_fused)


def trained_as(
    name: str,
    options: PlanOptions,
    *,
    slowdown: float | None,
    dispatcher: str | None,
    imbalance: float,
    scaling: str | None,
    kernels: str | None,
    parts: str | None,
) -> TrainedAs:
    """Return the training system ``name``, with its cost assumptions replaced by the given options.

    ``slowdown`` is the factor by which an overlapped collective slows compute; ``imbalance`` the
    tokens of the busiest expert rank over the mean; ``dispatcher``, ``scaling``, ``kernels`` and
    ``parts`` are texts of options, None for the system's own choice.
    """
    whose = check_choice("--as", name, SYSTEMS)
    asked: dict[str, Any] = {"slowdown": slowdown, "imbalance": imbalance}
    if dispatcher is not None:
        asked["dispatcher"] = check_choice("--dispatcher", dispatcher, DISPATCHERS)
    runs = system(whose).kernels
    if kernels is not None:
        runs = check_choice("--kernels", kernels, tuple(EXPERTS))
        asked["expert_kernels"] = EXPERTS[runs]
    if parts is not None:
        asked["recomputed"] = parse_parts(parts, options.forced.recompute)
    if scaling is not None:
        asked["scaling"] = check_choice("--scaling", scaling, tuple(SCALINGS))
    if scaling is not None and options.precision != "fp8":
        raise UsageError(
            "AP112",
            f"--scaling {scaling}: nothing is scaled in {options.precision}",
            where="--scaling",
            fix="--precision fp8, or leave --scaling out",
        )
    assumed = replace(assumptions_of(whose, options.precision), **asked)
    return TrainedAs(whose, assumed, runs, parts is not None)


def parse_parts(text: str, recompute: str | None) -> tuple[RecomputedPart, ...]:
    """Parse the parts of a layer in ``--recompute-parts``. Raises UsageError AP112 for an unknown
    part, or if ``recompute`` (of ``--parallel``) is another mode than "selective".

    >>> parse_parts("mla_up_proj, mlp", None)
    ('mla_up_proj', 'mlp')
    """
    if recompute not in (None, "selective"):
        raise UsageError(
            "AP112",
            f"--recompute-parts {text} beside recompute={recompute}",
            where="--recompute-parts",
            fix="recompute=selective, or leave one of them out",
        )
    names = (name.strip() for name in text.split(","))
    return tuple(check_choice("--recompute-parts", name, RECOMPUTED_PARTS) for name in names)


def check_choice(option: str, value: str, known: tuple[Choice, ...]) -> Choice:
    """Return ``value`` if it is in ``known``, else raise UsageError AP112."""
    for each in known:
        if each == value:
            return each
    raise choice_error("AP112", f"{option}:", value, known, where=option)
