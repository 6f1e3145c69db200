"""A profile as a value: measurements of one environment, asked for by op or collective.

In: an ``OpCase``, or a collective's kind, bytes and group. Out: seconds, whether they are
measured or interpolated, and the relative error to expect; None where neither holds, for the
caller to fall back on its analytic model.

An op that was measured answers with its median. Otherwise its speed depends on features by its
family: a matmul on (batch, m, n, k) of its product, attention on (batch·heads, queries,
keys, head size), a normalization on rows and columns, a convolution on FLOPs and bytes, all
others on bytes. It is interpolated among the samples of the same op, called with the same
switches, in the same dtype; if these are too few or too far away, among those of the other
ops of its family, where the error is that of predicting each op from the others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ..collectives.collectives import Group
from .case import OpCase
from .database import Database
from .environment import Environment, difference, nearest
from .interpolation import MAX_EXTRAPOLATION, MIN_SAMPLES, Curve, Sample
from .records import Measurement, Transfer
from .transfers import (
    MessageSource,
    TransferCurve,
    fit_link,
    link_points,
    overlapped,
    transfer_curve,
)
from .transfers import level_of as level_of

_DATA = Path(__file__).with_name("data")
_SWITCHES = re.compile(r'true|"dtype":"\w+"')


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds of an op, measured or interpolated (``source``). ``error`` is relative: for measured
    seconds the half-width of the median's confidence interval, for interpolated seconds the error
    with which measured ops are predicted from each other."""

    forward_seconds: float
    backward_seconds: float
    source: Literal["measured", "interpolated"]
    error: float


class Factor(NamedTuple):
    """Factors on an op's forward and backward seconds by which the ops of a block (layer) add up to
    the measured seconds of the whole block. ``num_bytes``: bytes that the op read and wrote
    then."""

    forward: float
    backward: float
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Profile:
    """Measured times from one ``environment`` (device, driver, torch). ``mismatch`` is a clause
    that says how it differs from the wanted environment, "" if it does not. ``factors``, by node of
    the model's graph, scale the seconds of its op, so that the ops of a block (layer) add up to the
    block's measured seconds (see ``planner.costs.whole_block``); ``rest`` are the mean factors
    (forward, backward), for blocks that were not measured. ``update`` is the name of the model's
    own optimizer if its step was measured, else ""."""

    environment: Environment
    ops: Mapping[OpCase, Measurement]
    transfers: tuple[Transfer, ...] = ()
    mismatch: str = ""
    factors: Mapping[str, Factor] = field(default_factory=dict, repr=False)
    rest: tuple[float, float] = (1.0, 1.0)
    update: str = ""
    _answers: dict[OpCase, Estimate | None] = field(default_factory=dict, repr=False)
    _curves: dict[Any, Any] = field(default_factory=dict, repr=False)

    def op(self, case: OpCase) -> Estimate | None:
        """Return the seconds of an op: measured, or else interpolated from other sizes of the same
        op or, without these, of its family. None if no similar sizes are measured."""
        measured = self.ops.get(case)
        if measured is not None:
            return Estimate(
                measured.forward_seconds, measured.backward_seconds, "measured", measured.spread
            )
        if case not in self._answers:
            self._answers[case] = self._interpolated(case)
        return self._answers[case]

    def _interpolated(self, case: OpCase) -> Estimate | None:
        forward = self._direction(case, 0)
        backward = self._direction(case, 1) if case.has_backward else (0.0, 0.0)
        if case.family == "view" or forward is None or backward is None:
            return None
        total = forward[0] + backward[0]
        if total <= 0:
            return None
        error = (forward[0] * forward[1] + backward[0] * backward[1]) / total
        return Estimate(forward[0], backward[0], "interpolated", error)

    def _direction(self, case: OpCase, direction: int) -> tuple[float, float] | None:
        """Return (seconds, relative error) of an op's forward (``direction`` 0) or backward (1),
        interpolated from samples of the same op or, without these, of its family; None if too
        few."""
        flops, num_bytes = case.flops[direction], case.num_bytes[direction]
        if not (flops or num_bytes):
            return 0.0, 0.0
        kind, features = _features(case, direction)
        for op in (_label(case), None):
            curve = self._curve(case.family, case.dtype, kind, direction, op)
            if curve is None or (op is None and _label(case) in _ops(curve)):
                continue
            found = curve.estimate(features, flops, num_bytes)
            if found is not None:
                return found
        return None

    def _curve(
        self, family: str, dtype: str, kind: str, direction: int, op: str | None
    ) -> Curve | None:
        """Return the interpolation between the samples of ``op``, or of all ops of its family if
        ``op`` is None; None if there are too few samples. ``kind``: kind of sizes that the speed
        depends on ("product", "bytes", …); ``direction``: 0 forward, 1 backward."""
        key = (family, dtype, kind, direction, op)
        if key not in self._curves:
            samples = [
                sample
                for sample in self._samples.get((family, dtype, kind, direction), ())
                if op is None or sample.op == op
            ]
            enough = len(samples) >= MIN_SAMPLES
            several = op is not None or len({sample.op for sample in samples}) > 1
            made = Curve(tuple(samples), pooled=op is None) if enough and several else None
            self._curves[key] = made
        found: Curve | None = self._curves[key]
        return found

    @cached_property
    def _samples(self) -> Mapping[tuple[str, str, str, int], list[Sample]]:
        """Samples of all measured ops, by (family, dtype, kind of sizes, 0 forward or 1
        backward)."""
        samples: dict[tuple[str, str, str, int], list[Sample]] = defaultdict(list)
        for case, measurement in self.ops.items():
            times = (measurement.forward_seconds, measurement.backward_seconds)
            for direction, seconds in enumerate(times):
                sample = _sample(case, direction, seconds)
                if sample is not None:
                    kind = _features(case, direction)[0]
                    samples[case.family, case.dtype, kind, direction].append(sample)
        return samples

    def interpolation_error(self, family: str) -> float | None:
        """Return the root mean square of the relative errors with which the measured samples of a
        family are each predicted from other samples of the same op; None if these are too few."""
        errors = []
        for (of, dtype, kind, direction), samples in self._samples.items():
            for op in {sample.op for sample in samples} if of == family else ():
                curve = self._curve(family, dtype, kind, direction, op)
                if curve is not None:
                    errors.append(curve.left_out[~np.isnan(curve.left_out)])
        joined = np.concatenate(errors) if errors else np.array([])
        return float(np.sqrt((joined**2).mean())) if len(joined) else None

    def collective(
        self, kind: str, num_bytes: float, group: Group
    ) -> tuple[float, MessageSource] | None:
        """Return (seconds, "measured" or "interpolated") of a collective, from measurements in a
        group of the same links and numbers of ranks and hosts. None if there are no measurements,
        or only of one size that is much smaller than ``num_bytes``. ``num_bytes``: see
        ``collectives.collective_seconds``."""
        if group.num_ranks <= 1 or num_bytes <= 0:
            return None
        return self._transfer(_place_of(kind, group), num_bytes)

    def slowed_share(self, kind: str, group: Group) -> float | None:
        """Return the share of compute speed (0 to 1) that a device loses while a collective of this
        kind runs, from the largest that was measured beside compute; None without such a
        measurement."""
        place = _place_of(overlapped(kind), group)
        key = "slowed share", place
        if key not in self._curves:
            sizes = [each.num_bytes for each in self.transfers if _place(each) == place]
            most = max(sizes, default=0)
            lost, alone = (self.collective(each, most, group) for each in (overlapped(kind), kind))
            self._curves[key] = min(1.0, lost[0] / alone[0]) if lost and alone else None
        share: float | None = self._curves[key]
        return share

    def p2p(self, num_bytes: float, group: Group) -> tuple[float, MessageSource] | None:
        """Return (seconds, "measured" or "interpolated") of a message of ``num_bytes`` between two
        ranks while as many pairs of ranks as ``group`` has send at once: measured with that number
        of pairs, or else the next larger, or the largest. None if none was measured."""
        level, library, kind, wanted, hosts = _place_of("p2p", group)
        known = self._message_ranks.get((level, library), (wanted,))
        nearest = next((ranks for ranks in known if ranks >= wanted), known[-1])
        return self._transfer((level, library, kind, nearest, hosts), num_bytes)

    @cached_property
    def _message_ranks(self) -> Mapping[tuple[str, str], list[int]]:
        """Numbers of ranks that sent measured messages at once, ascending, by (kind of link,
        library)."""
        found: dict[tuple[str, str], set[int]] = defaultdict(set)
        for each in self.transfers:
            if each.kind == "p2p":
                found[each.level, each.library].add(each.num_ranks)
        return {place: sorted(ranks) for place, ranks in found.items()}

    def _transfer(
        self, at: tuple[str, str, str, int, int], num_bytes: float
    ) -> tuple[float, MessageSource] | None:
        if at not in self._curves:
            found = [each for each in self.transfers if _place(each) == at]
            self._curves[at] = transfer_curve(found) if found else None
        curve: TransferCurve | None = self._curves[at]
        if curve is None:
            return None
        sizes = curve.num_bytes
        if len(sizes) == 1 and num_bytes > MAX_EXTRAPOLATION * sizes[0]:
            return None  # one small size is mostly latency, and says nothing of a rate
        return curve.at(num_bytes)

    def link(self, level: str, library: str) -> tuple[float, float] | None:
        """Return (latency in seconds, rate in bytes per second) of the kind of link ``level`` (such
        as "intra:nvlink4"), fitted to measured transfers; None for fewer than two sizes."""
        points = link_points(
            each for each in self.transfers if (each.level, each.library) == (level, library)
        )
        if len({point.num_bytes / point.num_messages for point in points}) < 2:
            return None
        return fit_link(points)


def load_profile(database: Database, environment: Environment) -> Profile | None:
    """Return the measurements from ``environment`` or, without any, from the least different
    environment with the same device. None if nothing was measured on this device."""
    found = nearest(database.environments(), environment)
    if found is None:
        return None
    return Profile(
        found,
        database.all(found),
        database.all_transfers(found),
        difference(found, environment),
    )


def load_shipped(name: str) -> Profile | None:
    """Return the measurements that the package includes for a device ("H200"); None if there are
    none."""
    path = _DATA / f"{name}.jsonl"
    if not path.is_file():
        return None
    with Database(":memory:") as database:
        database.import_file(path)
        (environment,) = database.environments()
        return load_profile(database, environment)


def _label(case: OpCase) -> str:
    """Return the name of an op without namespace and overload, followed by its arguments that are
    True or dtypes: they tell apart causal and full attention, and casts to different dtypes."""
    name = case.op.split(".")[1] if "." in case.op else case.op
    return " ".join([name, *_SWITCHES.findall(case.arguments)])


def _ops(curve: Curve) -> frozenset[str]:
    return frozenset(sample.op for sample in curve.samples)


def _place_of(kind: str, group: Group) -> tuple[str, str, str, int, int]:
    ranks = group.num_pairs * group.num_ranks
    return level_of(group), group.library, kind, ranks, group.num_hosts


_place = attrgetter("level", "library", "kind", "num_ranks", "num_hosts")
"""Function that returns a transfer's level, library, kind, and numbers of ranks and hosts."""


def _sample(case: OpCase, direction: int, seconds: float) -> Sample | None:
    flops, num_bytes = case.flops[direction], case.num_bytes[direction]
    if seconds <= 0 or case.family == "view" or not (flops or num_bytes):
        return None
    features = _features(case, direction)[1]
    return Sample(features, flops, num_bytes, seconds, _label(case))


def _features(case: OpCase, direction: int) -> tuple[str, tuple[float, ...]]:
    """Return the kind of sizes that the speed of an op depends on ("product", "work", "rows" or
    "bytes", by its family), and the values of these sizes. ``direction``: 0 forward, 1 backward."""
    if case.family in ("matmul", "attention") and case.products:
        return "product", tuple(map(float, max(case.products, key=prod)))
    if case.family in ("matmul", "attention", "conv"):
        return "work", (case.flops[direction], case.num_bytes[direction])
    if case.family == "norm" and case.tensors and case.tensors[0].shape:
        columns = max(1, case.tensors[0].shape[-1])
        return "rows", (case.tensors[0].numel / columns, float(columns))
    return "bytes", (case.num_bytes[direction],)
