"""Cost of a stage with given layouts: seconds per micro-batch and per step, and bytes.

In: the decisions of a stage and the choice of each. Out: ``StageCost``, for any number of equal
blocks, any ZeRO stage and any recomputation policy. A cost is a sum over rows (kinds of blocks,
edges between blocks), each weighted by its occurrences in blocks of each mode: ``Σ_row Σ_mode
occurrences[row, mode] · seconds[row, mode]``. The cost of a row is the sum of its terms, computed
once per choice of layouts (``RowCost``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import numpy as np

from ...cost_model.simulator.stage_costs import Buckets
from ..costs.host_memory import COPY_SECONDS, host_link
from ..costs.kept_bytes import Part
from ..costs.seconds import (
    HELD,
    Groups,
    Resource,
    Seconds,
    State,
    group_blocks,
    seconds_of_passes,
)
from ..kernels.recompute import BLOCK_MODES, has_tiles, without_offload
from ..plan import Recompute
from ..schedules.held import held_bytes
from .kind_model import RowCost
from .recompute_policy import (
    MOST_POLICIES,
    USUAL_MODES,
    Policies,
    RecomputeCosts,
    efficient_policies,
    num_policies,
    policies,
)
from .stage_model import CostRow, StageModel
from .stage_problem import StageOptions, StageProblem, constant_bytes, context_bytes
from .structure import Run
from .terms import (
    CONVERTED,
    KEPT,
    KEPT_MODES,
    NUM_AMOUNTS,
    RECEIVED,
    SECONDS,
    Floats,
    total,
)

N = TypeVar("N", int, float)

TRANSIENT = ("transient", "reserve", "communicators")
"""Memory categories that the stages of a rank use in turn, or hold once. The search counts the
communicators of a stage's mesh in its reserve, and ignores communicators of messages."""


@dataclass(frozen=True)
class StageCost:
    """Seconds and bytes of a stage. ``seconds`` per micro-batch and per step: see ``Seconds``.
    ``receive_seconds``: transfers from earlier stages (forward, backward), per micro-batch.
    ``memory_bytes``: per device, by category. ``activation_bytes``: of one micro-batch.
    ``late_seconds``: part of the backward for deferred weight gradients, None if unknown.
    Collectives of states overlap the compute of the blocks in ``groups``, and other collectives
    unless both use the same links (``shares_links``). Without groups the stage counts as one block.
    ``hidden_exchanges``: seconds per micro-batch of exchanges with experts beside compute, for a
    plan's report. ``offloaded_bytes``: of one micro-batch in the host's memory;
    ``host_copies``: seconds of copying them in one direction; ``exposed_copies``: part of the
    communication in which the stage waits for copies.
    """

    seconds: Seconds
    receive_seconds: tuple[float, float]
    memory_bytes: Mapping[str, float]
    activation_bytes: float
    late_seconds: float | None = None
    groups: Groups | None = field(default=None, compare=False)
    shares_links: bool = True
    hidden_exchanges: float = field(default=0.0, compare=False)
    offloaded_bytes: float = field(default=0.0, compare=False)
    exposed_copies: float = field(default=0.0, compare=False)
    host_copies: float = field(default=0.0, compare=False)

    @property
    def compute_seconds(self) -> tuple[float, float]:
        """Return (forward, backward): seconds to launch and compute all blocks of a micro-batch."""
        own = self.seconds
        forward = max(own.forward_compute, own.forward_issue)
        return forward, max(own.backward_compute, own.backward_issue)

    @property
    def forward_seconds(self) -> float:
        return self._passes[0]

    @property
    def backward_seconds(self) -> float:
        return self._passes[1]

    @property
    def step_seconds(self) -> float:
        """Return the seconds per step of the optimizer and of exposed gathers and gradient sums."""
        return self._passes[2] + self._passes[3]

    @property
    def end_seconds(self) -> float:
        """Return the part of ``step_seconds`` that follows the last backward."""
        return self._passes[3]

    @cached_property
    def _passes(self) -> tuple[float, float, float, float]:
        forward, backward = self.compute_seconds
        both = self.seconds._replace(forward_compute=forward, backward_compute=backward)
        return self._with_exposed(both, self.issued_groups)

    def _with_exposed(self, seconds: Seconds, groups: Groups) -> tuple[float, float, float, float]:
        """Return seconds: (forward, backward, gathers before the first forward, step's end)."""
        found = seconds_of_passes(np.array(seconds), groups, self.shares_links)
        forward, backward, gather, end = map(float, found)
        return forward, backward, gather, end

    @property
    def _groups(self) -> Groups:
        return self.groups or Groups(np.array([self.seconds]), np.ones(1, dtype=np.int64))

    @cached_property
    def issued_groups(self) -> Groups:
        """Return the seconds by block, with compute at least as long as its launch by the host."""
        seconds = self._groups.seconds.copy()
        for compute, issue in ISSUED:
            seconds[:, compute] = np.maximum(seconds[:, compute], seconds[:, issue])
        return self._groups._replace(seconds=seconds)

    @cached_property
    def buckets(self) -> Buckets:
        """Return each block's fraction of the stage's compute and of its collectives per step."""
        groups = self.issued_groups
        every = np.repeat(groups.seconds, groups.counts, axis=0)
        return Buckets(*(_shares(every[:, resource]) for resource in IN_PARTS))

    @property
    def exposed_states(self) -> tuple[float, float]:
        """Return (forward, backward): seconds of ZeRO's collectives that compute does not hide."""
        own = self.seconds
        forward, backward = self.compute_seconds
        return (
            max(0.0, self.forward_seconds - forward - own.forward_communication),
            max(0.0, self.backward_seconds - backward - own.backward_communication),
        )

    @property
    def slowed_share(self) -> float:
        """Return the fraction of compute lost while the collectives of a whole step run."""
        own = self.seconds
        collectives = own.parameter_gather + own.gradient_sync
        slowed = own.gather_slowed + own.sync_slowed
        return min(1.0, slowed / collectives) if collectives else 0.0

    def objective(self, num_microbatches: int) -> float:
        """Return the seconds per micro-batch that solvers minimize, with a share of the step's.

        It counts the device alone: the host's time to issue a pass is not a sum over ops.
        """
        forward, backward, gather, end = self._with_exposed(self.seconds, self._groups)
        return forward + backward + (gather + end) / num_microbatches + sum(self.receive_seconds)

    def warmup_and_steady(self, num_microbatches: int) -> tuple[float, float]:
        """Return (q, m): seconds of the first micro-batch, and further seconds of the step if this
        stage is the slowest. Messages overlap the compute of other micro-batches."""
        micro = self.forward_seconds + self.backward_seconds
        rest = (num_microbatches - 1) * micro + self.step_seconds
        return micro + sum(self.receive_seconds), rest

    @property
    def total_bytes(self) -> float:
        return sum(self.memory_bytes.values())


IN_PARTS = (
    Resource.FORWARD_COMPUTE,
    Resource.PARAMETER_GATHER,
    Resource.BACKWARD_COMPUTE,
    Resource.GRADIENT_SYNC,
)
"""Resources whose shares ``Buckets`` has, in the order of its fields."""

ISSUED = (
    (Resource.FORWARD_COMPUTE, Resource.FORWARD_ISSUE),
    (Resource.BACKWARD_COMPUTE, Resource.BACKWARD_ISSUE),
)
"""Per direction: the resource of the device's compute, and of the host's issue of kernels."""


def _size(parts: Iterable[Part]) -> float:
    return float(sum(size for _, size in parts))


def _shares(values: Floats) -> tuple[float, ...]:
    """Return each value's fraction of the sum; equal fractions if the sum is 0."""
    total = values.sum()
    equal = np.full(len(values), 1 / len(values))
    return tuple((values / total if total > 0 else equal).tolist())


def combine_bytes(stages: Iterable[Mapping[str, N]], once: Collection[str]) -> dict[str, N]:
    """Add up the bytes of a rank's stages by category; for categories in ``once`` take the maximum.

    >>> combine_bytes(({"parameters": 3, "transient": 2}, {"parameters": 1, "transient": 4}),
    ...          once=("transient",))
    {'parameters': 4, 'transient': 4}
    """
    found: dict[str, N] = {}
    for stage in stages:
        for name, size in stage.items():
            if name in found:
                found[name] = max(found[name], size) if name in once else found[name] + size
            else:
                found[name] = size
    return found


@dataclass(frozen=True, slots=True)
class PolicyCosts:
    """Cost that each recomputation policy adds to a stage. By policy: additional ``seconds`` and
    ``kept_bytes`` of a micro-batch (negative for savings), its ``host_bytes``, and total
    ``transient_bytes[zero, policy]``."""

    policies: Policies
    seconds: Floats
    kept_bytes: Floats
    transient_bytes: Floats
    host_bytes: Floats


class StageTable:
    """Costs of all stages of the same kinds of blocks, with given layouts of their nodes: the terms
    of a stage's cost at given choices.

    ``choices``: for each decision (nodes laid out together), its choice.
    """

    def __init__(self, problem: StageProblem, choices: tuple[int, ...]) -> None:
        self.model: StageModel = problem.model
        self.problem = problem
        self.choices = choices
        self.kinds = {kind: self._kind(kind) for kind in problem.run.counts}
        self.rows: dict[CostRow, RowCost] = {}
        self._policy_costs: dict[tuple[object, ...], PolicyCosts] = {}
        self._weight_grads: dict[str, tuple[Floats, float]] = {}
        self._priced: dict[tuple[int, StageOptions], StageCost] = {}

    def row(self, row: CostRow) -> RowCost:
        """Return the cost of one block, shared parameter, edge (value that a block reads) or
        boundary (value that the stage sends or receives)."""
        if row not in self.rows:
            self.rows[row] = self._row(row)
        return self.rows[row]

    def _row(self, row: CostRow) -> RowCost:
        if isinstance(row, str):
            own = self.kinds.get(row)
            return own or RowCost(self.model.shared(row).amounts.total((self.choice(row),)))
        terms = [
            term.placed(lambda side: (self.problem.position(side.node), side.classes))
            for term in self.model.terms(row)
        ]
        amounts = total(terms, self.choices)
        return RowCost(np.broadcast_to(amounts, (len(self.model.prices.shardings), NUM_AMOUNTS)))

    def choice(self, name: str) -> int:
        """Return the choice of the decision that lays out node ``name``."""
        return self.choices[self.problem.position(name)]

    def _kind(self, kind: str) -> RowCost:
        model = self.model.kind(kind)
        choices = self.choices[self.problem.start[kind] :][: len(model.decisions)]
        if choices not in model.costs:
            model.costs[choices] = self._kind_cost(kind, choices)
        return model.costs[choices]

    def _kind_cost(self, kind: str, choices: tuple[int, ...]) -> RowCost:
        model = self.model.kind(kind)
        amounts = model.amounts.total(np.add(model.starts, choices).tolist())
        amounts += total(self.model.placed_terms(kind), choices)
        amounts[:, SECONDS] += model.constant
        held = [model.held(number, choice) for number, choice in enumerate(choices)]
        kept = {mode: {part for own in held for part in own.kept(mode)} for mode in KEPT_MODES}
        amounts[:, KEPT] = [_size(own) for own in kept.values()]
        again = {part for own in held for part in own.again}
        working = float(max((own.working_bytes for own in held), default=0))
        tiled = float(max((own.working_again for own in held), default=0))
        saved = kept["none"]
        whole = {mode: _size(saved - own) for mode, own in kept.items()} | {"full": _size(saved)}
        made = whole | {"full": _size(again), "attention": _size(again - kept["attention"])}
        every = [without_offload(mode) for mode in BLOCK_MODES]
        largest = np.array([tiled if has_tiles(mode) else working for mode in every])
        both = (np.array([own[mode] for mode in every]) for own in (made, whole))
        return RowCost(amounts, largest, *both)

    def policy_costs(
        self, run: Run, *, splits: bool = False, modes: tuple[Recompute, ...] = USUAL_MODES
    ) -> PolicyCosts:
        """Return the costs of all recomputation policies to try on a stage ``run``; ``splits``: its
        backwards are split; ``modes``: modes of the policies. Cached."""
        key = run.key, splits, modes
        if key not in self._policy_costs:
            kinds = self._kinds_of(run, splits=splits)
            costs, counts = self._recompute_costs(run, kinds), (*run.class_counts, modes)
            is_short = num_policies(*counts) <= MOST_POLICIES
            some = policies if is_short else partial(efficient_policies, costs=costs)
            listed = some(*counts)
            self._policy_costs[key] = PolicyCosts(
                listed,
                listed.sums(costs.seconds),
                listed.sums(costs.kept_bytes),
                self._transient_bytes(run, kinds, listed, costs),
                listed.sums(costs.host_bytes),
            )
        return self._policy_costs[key]

    def _kinds_of(self, run: Run, *, splits: bool) -> list[RowCost]:
        """Return the costs of a block of each class; no op runs tile by tile in split backwards,
        which defer gradients of its weights."""
        kinds = [self.kinds[own.kind] for own in run.block_classes]
        return [kind.whole for kind in kinds] if splits else kinds

    def _recompute_costs(self, run: Run, kinds: Sequence[RowCost]) -> RecomputeCosts:
        """Return the cost that recomputing a block adds, by class of equal blocks of a stage.
        ``kinds``: the costs of a block of each class."""
        rows = [
            [kind, *map(self.row, own.edges)]
            for kind, own in zip(kinds, run.block_classes, strict=True)
        ]
        kept = np.array([sum(row.kept_bytes for row in own) for own in rows])
        again = np.array([sum(row.recompute_seconds for row in own) for own in rows])
        host = np.array([sum(row.host_bytes for row in own) for own in rows]).T
        transient = np.array([kind.transient_bytes[1:] for kind in kinds]).transpose(1, 2, 0)
        exposed = self._exposed(kinds, host)[:, 1:]
        return RecomputeCosts(
            again.T[1:] + exposed.sum(axis=0),
            (kept[:, 1:] - kept[:, :1]).T,
            transient + host[1:, None],
            host[1:],
            exposed,
        )

    def _exposed(self, kinds: Sequence[RowCost], host_bytes: Floats) -> Floats:
        """Return ``[direction, mode, class]``: seconds in which a forward and a backward wait for
        copies of ``host_bytes[mode, class]``, as the compute of a block is shorter."""
        compute = np.array([kind.seconds[:, 0] for kind in kinds]).transpose(2, 1, 0)
        hidden = compute[[Resource.FORWARD_COMPUTE, Resource.BACKWARD_COMPUTE]]
        copied = host_bytes / host_link(self.model.prices.device)
        exposed: Floats = np.maximum(copied - hidden, 0.0) + COPY_SECONDS * (host_bytes > 0)
        return exposed

    def _transient_bytes(
        self, run: Run, kinds: Sequence[RowCost], listed: Policies, costs: RecomputeCosts
    ) -> Floats:
        """Return ``[zero, policy]``: bytes of the largest op plus gathered or recomputed values,
        and the offloaded values of the running block and of another that are on their way."""
        working = np.array([kind.working_bytes for kind in kinds]).T
        rest = listed.rest(run.class_counts[0]) * working[0]
        most = np.maximum(rest.max(axis=1), listed.largest(working[1:]))
        largest = listed.largest(costs.transient_bytes)
        transient: Floats = most + np.maximum(self._gathered[:, None], largest)
        return transient + listed.largest(costs.host_bytes)

    @property
    def transient_bytes(self) -> Floats:
        """Return, by ZeRO stage, the bytes of the largest op plus gathered parameters."""
        return self._working_bytes + self._gathered

    @cached_property
    def _working_bytes(self) -> float:
        return max(float(kind.working_bytes[0]) for kind in self.kinds.values())

    @property
    def tiled_bytes(self) -> float:
        """Return the bytes of the largest op that running ops tile by tile saves, where all
        blocks are fully recomputed."""
        least = max(float(kind.working_bytes[1:].min()) for kind in self.kinds.values())
        return self._working_bytes - least

    @cached_property
    def _gathered(self) -> Floats:
        largest: Floats = np.max([kind.transient_bytes[0] for kind in self.kinds.values()], axis=0)
        return largest

    def seconds_per_byte(self, modes: Sequence[Recompute]) -> tuple[float, float]:
        """Return the least seconds per saved byte of recomputing or offloading a block in one of
        ``modes``, and the largest fraction of a block's bytes it saves. Values from outside are
        ignored."""
        rates, shares = [], []
        for kind in self.kinds.values():
            kept, host = kind.kept_bytes, kind.host_bytes[:, None]
            added = kind.recompute_seconds + self._exposed([kind], host).sum(axis=(0, 2))
            for number, mode in enumerate(BLOCK_MODES):
                saves = float(kept[0] - kept[number])
                if mode in modes and saves > 0:
                    rates.append(float(added[number]) / saves)
                    shares.append(saves / kept[0])
        return min(rates, default=0.0), max(shares, default=0.0)

    def price(self, run: Run, setting: StageOptions) -> StageCost:
        """Return the cost of a stage of the blocks ``run``, which are of this table's kinds."""
        cost = self._priced.get((run.key, setting))
        if cost is None:
            cost = self._priced[run.key, setting] = self._price(run, setting)
        return cost

    def _price(self, run: Run, setting: StageOptions) -> StageCost:
        seconds, states, kept = np.zeros(len(Resource)), np.zeros(len(State)), 0.0
        of_kind, received = dict[str, Floats](), np.zeros(2)
        for row, occurrences in self.model.rows(run, setting.policy):
            cost, weights = self.row(row), np.array(occurrences, dtype=np.float64)
            of_modes = cost.seconds[:, setting.zero]
            if row in self.kinds:
                of_modes = self._issued(str(row), of_modes, splits=bool(setting.halves))
                of_kind[str(row)] = of_modes
            seconds += weights @ of_modes
            states += sum(occurrences) * cost.states[setting.zero]
            kept += float(weights @ cost.kept_bytes)
            received += sum(occurrences) * cost.amounts[setting.zero, RECEIVED]
        forced = Policies.of(setting.policy, len(run.block_classes))
        kinds = self._kinds_of(run, splits=bool(setting.halves))
        costs = self._recompute_costs(run, kinds)
        exposed = [float(forced.sums(own)[0]) for own in costs.exposed_seconds]
        seconds[list(CONVERTED)] += exposed
        host_bytes = float(forced.sums(costs.host_bytes)[0])
        memory = {state.name.lower(): float(states[state]) for state in list(State)[HELD]}
        memory["activations"] = kept * setting.in_flight
        late = None
        if setting.halves:
            late, late_bytes = self.weight_grads(run)
            memory["activations"] = held_bytes(setting.halves, kept, late_bytes)
        transient = self._transient_bytes(run, kinds, forced, costs)[setting.zero]
        memory["transient"] = float(transient[0])
        memory["buffers"] = float(constant_bytes(self.model, run))
        memory["reserve"] = float(context_bytes(self.model))
        return StageCost(
            Seconds(*seconds.tolist()),
            (float(received[0]), float(received[1])),
            memory,
            kept,
            late,
            self._groups_of(run, setting, of_kind, costs.host_bytes),
            self.model.prices.shares_links(self.model.prices.shardings[setting.zero].degree),
            offloaded_bytes=host_bytes,
            exposed_copies=sum(exposed),
            host_copies=host_bytes / host_link(self.model.prices.device),
        )

    def _groups_of(
        self, run: Run, setting: StageOptions, of_kind: Mapping[str, Floats], host_bytes: Floats
    ) -> Groups:
        """Return the seconds by block; a parameter of several blocks counts with the first.
        ``host_bytes[mode, class]``: a block's offloaded values in all modes but the first."""
        modes = [BLOCK_MODES.index(mode) for mode in run.modes(setting.policy)]
        moves = self.model.prices.policy.moves_gradients and host_bytes.any()
        classes = run.classes[1] if moves else (0,) * len(modes)
        entries, counts = group_blocks([*zip(run.kinds, modes, classes, strict=True)])
        seconds = np.array([of_kind[kind][mode] for kind, mode, _ in entries])
        for name in run.shared:
            seconds[0] += self.row(name).seconds[0, setting.zero]
        moved = [host_bytes[mode - 1, own] if mode and moves else 0.0 for _, mode, own in entries]
        return Groups(seconds, counts, np.array(moved) / host_link(self.model.prices.device))

    def _issued(self, kind: str, seconds: Floats, *, splits: bool) -> Floats:
        """Return a block's ``seconds[mode, RESOURCE]`` with the host's time of each pass (or half
        of a split backward) raised to the device's."""
        seconds = seconds.copy()
        forward, backward = map(list, ISSUED)
        deferred = self._weight_grads_of(kind)[0] if splits else np.zeros(2)
        inputs = (seconds[:, backward] - deferred).max(axis=1)
        seconds[:, Resource.FORWARD_ISSUE] = seconds[:, forward].max(axis=1)
        seconds[:, Resource.BACKWARD_ISSUE] = inputs + deferred.max()
        return seconds

    def weight_grads(self, run: Run) -> tuple[float, float]:
        """Return the seconds of a micro-batch's weight gradients, and the bytes kept for them."""
        own = [(count, *self._weight_grads_of(kind)) for kind, count in run.counts.items()]
        seconds = sum(count * float(each.max()) for count, each, _ in own)
        return seconds, sum(count * size for count, _, size in own)

    def _weight_grads_of(self, kind: str) -> tuple[Floats, float]:
        """Return (device, host) seconds of a block's weight gradients, and bytes kept for them."""
        if kind not in self._weight_grads:
            start, number = self.problem.start[kind], len(self.model.kind(kind).decisions)
            choices = enumerate(self.choices[start : start + number])
            found = [self.model.weight_grads(kind, at, choice) for at, choice in choices]
            parts = {part for _, _, own in found for part in own}
            seconds = np.array([own[:2] for own in found]).sum(axis=0)
            self._weight_grads[kind] = seconds, float(sum(size for _, size in parts))
        return self._weight_grads[kind]
