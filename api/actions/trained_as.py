"""Whose training ``simulate`` prices: what a system assumes, and what options say otherwise.

In: the values of ``--as``, ``--kernels``, ``--dispatcher`` and the others of their table. Out:
``CostAssumptions``, and what the configuration takes from them. Raises ``UsageError`` AP112 where a
value is unknown, or two contradict each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from autoparallel.cost_model.collectives.dispatch import DISPATCHERS
from autoparallel.options.parse import choice_error
from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.errors import UsageError
from autoparallel.planner.pricing.basis import SCALINGS, CostAssumptions
from autoparallel.planner.pricing.systems import (
    SYSTEMS,
    Kernels,
    SystemName,
    assumptions_of,
    system,
)
from autoparallel.planner.replay import RECOMPUTED_PARTS, RecomputedPart
from autoparallel.planner.rules.expert_traffic import ExpertKernels

EXPERTS: Mapping[Kernels, ExpertKernels] = {
    "eager": "separate",
    "compiled": "activation",
    "fused": "one",
}
"""Values of ``--kernels``, with the kernels that each has between the products of experts."""

Choice = TypeVar("Choice", bound=str)


@dataclass(frozen=True, slots=True)
class TrainedAs:
    """A system, the assumptions of its prices, and its kernels."""

    name: SystemName
    assumptions: CostAssumptions
    kernels: Kernels
    has_parts: bool

    def configured(self, own: Configuration) -> Configuration:
        """Return a configuration as the system runs it."""
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
    """Return whose training is priced, and how."""
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
    """Return the parts of a layer that ``--recompute-parts`` names.

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
    """Return an option's value, which is one of those known."""
    for each in known:
        if each == value:
            return each
    raise choice_error("AP112", f"{option}:", value, known, where=option)
