"""Fits the constants of links to published times, and says how well they predict others'.

``python benchmarks/collectives/calibrate.py`` prints, per kind of link, the constants that
``cost_model/cluster/links.toml`` holds rounded; then, for each source, the error of constants
fitted without it. Fitted: the mean over sources of the mean |log(predicted/measured)|, by
changing one constant at a time by a factor that shrinks. Start values follow from data
sheets alone, so that nothing of a source that was left out is known. A kind of link of which
nothing else is left gets the constants of its nearest relative, at the same share of its
specified rate.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from cases import Case, Error, error, grouped, predicted_seconds, read_cases

from autoparallel.cost_model.cluster.cluster import Link
from autoparallel.cost_model.cluster.presets import Protocols

STEP_SECONDS = {"nvlink": 1e-6, "infiniband": 5e-6}
"""Not fitted: the tuning logs of NCCL 2.27.5 (meta-pytorch/autoparallel@a54c252)."""


@dataclass(frozen=True, slots=True)
class Model:
    """The constants of one kind of link."""

    link: Link
    protocols: Protocols

    def with_value(self, name: str, value: float) -> Model:
        """The same with another value of one constant."""
        if hasattr(self.link, name):
            return replace(self, link=replace(self.link, **{name: value}))
        return replace(self, protocols=replace(self.protocols, **{name: value}))

    def value(self, name: str) -> float:
        """One constant."""
        found: float = getattr(self.link if hasattr(self.link, name) else self.protocols, name)
        return found


Models = dict[str, Model]

_RATE = ("bytes_per_second",)
_PROTOCOL = ("short_share", "long_alpha_seconds")
_EXCHANGE = ("exchange_seconds", "exchange_share")
_SWITCH = ("reduction_bytes_per_second", "switch_fill_seconds")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of link: its specified rate, what is fitted, and its nearest relative."""

    spec: float
    free: tuple[str, ...]
    relative: str


KINDS = {
    "nvlink2": Kind(150e9, ("bytes_per_second",), "nvlink3"),
    "nvlink3": Kind(300e9, ("base_seconds", *_RATE, *_PROTOCOL, *_EXCHANGE), "nvlink4"),
    "nvlink4": Kind(450e9, ("base_seconds", *_RATE, *_PROTOCOL, *_EXCHANGE, *_SWITCH), "nvlink3"),
    "nvlink5": Kind(900e9, ("base_seconds", *_RATE, *_PROTOCOL, *_SWITCH), "nvlink4"),
    "infiniband-ndr": Kind(50e9, (*_RATE, *_PROTOCOL), "efa-p5"),
    "efa-p5": Kind(50e9, ("alpha_seconds", *_RATE, *_PROTOCOL), "infiniband-ndr"),
    "efa-p4d": Kind(6.25e9, ("alpha_seconds", *_RATE, *_PROTOCOL), "efa-p5"),
    "gpudirect-tcpxo": Kind(25e9, ("alpha_seconds", *_RATE, *_PROTOCOL), "efa-p5"),
    "infiniband-xdr": Kind(100e9, (*_RATE, *_PROTOCOL), "infiniband-ndr"),
}
LONG_BYTES = 2**28
FITTED_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def start(name: str) -> Model:
    """What one would assume of a kind of link from its data sheet."""
    kind, within = KINDS[name], name.startswith("nvlink")
    step = next((s for text, s in STEP_SECONDS.items() if name.startswith(text)), 20e-6)
    has_switch = name in ("nvlink4", "nvlink5")
    link = Link(
        name,
        step,
        kind.spec * (0.8 if within else 0.95),
        base_seconds=30e-6,
        reduction_bytes_per_second=0.6 * kind.spec if has_switch else 0.0,
    )
    protocols = Protocols(
        short_share=0.5,
        long_alpha_seconds=5e-6 if within else 100e-6,
        switch_fill_seconds=50e-6 if has_switch else 0.0,
        exchange_seconds=50e-6 if within else 0.0,
        exchange_share=0.9 if within else 1.0,
    )
    return Model(link, protocols)


def predict(case: Case, models: Models) -> float:
    """What the cost model says with these constants."""
    group = case.group
    intra, inter = models[group.intra.name].link, models.get(group.inter.name)
    if not group.intra.reduction_bytes_per_second:
        intra = replace(intra, reduction_bytes_per_second=0.0)
    moved = replace(group, intra=intra, inter=inter.link if inter else group.inter)
    protocols = {name: model.protocols for name, model in models.items()}
    return predicted_seconds(replace(case, group=moved), protocols)


def objective(cases: Sequence[Case], models: Models) -> float:
    """The mean over sources of their mean |log error|."""
    sources = grouped(cases, lambda case: (case.source,)).values()
    return sum(error(c, lambda case: predict(case, models)).mean_abs_log for c in sources) / len(
        sources
    )


def fit_link(name: str, cases: Sequence[Case], models: Models) -> Models:
    """``models`` with the constants of one kind of link fitted to ``cases``, which are of it.

    Rates first, to the long messages that tell them; then what the short ones cost more.
    """
    free = KINDS[name].free
    rates = [constant for constant in free if "bytes_per_second" in constant]
    long = [case for case in cases if case.num_bytes >= LONG_BYTES] or cases
    models = _descend(name, long, models, rates)
    return _descend(name, cases, models, [constant for constant in free if constant not in rates])


def _descend(name: str, cases: Sequence[Case], models: Models, constants: Sequence[str]) -> Models:
    best, step = objective(cases, models), 1.5
    while step > 1.005:
        has_moved = False
        for constant in constants:
            for factor in (step, 1 / step):
                value = models[name].value(constant) * factor
                if constant.endswith("share") and value > 1:
                    continue
                changed = {**models, name: models[name].with_value(constant, value)}
                found = objective(cases, changed)
                if found < best - 1e-7:
                    best, models, has_moved = found, changed, True
        if not has_moved:
            step = step**0.5
    return models


def fit(cases: Sequence[Case]) -> Models:
    """The constants of every kind of link, those within hosts first."""
    models: Models = {name: start(name) for name in KINDS}
    missing = []
    for name in KINDS:
        own = [case for case in cases if case.network == name and case.kind in FITTED_KINDS]
        if own:
            models = fit_link(name, own, models)
        else:
            missing.append(name)
    for name in missing:
        models[name] = _as_relative(name, models)
    return models


def _as_relative(name: str, models: Models) -> Model:
    relative = models[KINDS[name].relative]
    scale = KINDS[name].spec / KINDS[KINDS[name].relative].spec
    link = relative.link
    reduction = link.reduction_bytes_per_second if name in ("nvlink4", "nvlink5") else 0.0
    moved = replace(
        link,
        name=name,
        bytes_per_second=link.bytes_per_second * scale,
        reduction_bytes_per_second=reduction * scale,
    )
    return Model(moved, relative.protocols)


def leave_one_out(cases: Sequence[Case]) -> dict[str, Error]:
    """For each source, the error on it of constants fitted to all other sources."""
    fitted = [case for case in cases if case.kind in FITTED_KINDS]
    errors = {}
    for (source,), held in grouped(fitted, lambda case: (case.source,)).items():
        models = fit([case for case in fitted if case.source != source])
        errors[source] = error(held, lambda case, models=models: predict(case, models))  # type: ignore[misc]
    return errors


def main() -> None:
    """Prints the fit and the errors of leaving a source out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the constants as JSON")
    arguments = parser.parse_args()
    cases, _ = read_cases()
    models = fit(cases)
    if arguments.json:
        print(json.dumps({name: asdict(model) for name, model in models.items()}, indent=1))
        return
    for name, model in models.items():
        values = ", ".join(f"{c} {model.value(c):.3g}" for c in KINDS[name].free)
        own = [case for case in cases if case.network == name and case.kind in FITTED_KINDS]
        print(f"{name:16s} {error(own, lambda c: predict(c, models)).text()}   {values}")
    print("\nleft out: cases, mean factor of error, bias")
    errors = leave_one_out(cases)
    for source, found in errors.items():
        print(f"{found.text()}  {source}")
    total = sum(found.num_cases for found in errors.values())
    mean = sum(found.num_cases * found.mean_abs_log for found in errors.values()) / total
    bias = sum(found.num_cases * found.bias for found in errors.values()) / total
    print(
        f"{Error(total, mean, bias).text()}  all cases, each by constants that never saw its source"
    )


if __name__ == "__main__":
    main()
