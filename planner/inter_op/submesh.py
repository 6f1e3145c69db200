"""Meshes to try with an axis "cp" or "ep": dp × cp × tp and dp × ep × tp.

In: the positions and experts of a graph, a submesh, the rows of a micro-batch. Out: meshes besides
dp × tp. The free axis "tp" already splits positions or experts if that is best, so only meshes that
it cannot represent are proposed, and only if they may win:

- "cp" splits only the ranks that rows leave undivided: of D = dp·cp ranks, dp = gcd(D, rows). With
  dp·k and cp/k instead, a rank has as many positions, no fewer parameters, and fewer keys and
  values to gather. It is tried for sequences of ``LONG_POSITIONS``, and if the batch has fewer rows
  than there are hosts (groups of ranks that "tp" stays in).
- "ep" replaces sums of experts' gradients over D ranks by tokens that travel twice forward and
  twice backward. It is tried if a step's tokens are fewer bytes: 4·t against 2·g·(1 − 1/ep), with
  t the bytes of tokens that a rank exchanges in one direction, g the bytes of its experts'
  gradients. With tp = 1 inside a host the free axis does the same.

Sources: Dubey et al. 2024, Llama 3 (arXiv:2407.21783), section 3.3.2, for context parallelism
that gathers keys and values; Lepikhin et al. 2020, GShard (arXiv:2006.16668), for experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from ...cost_model.cluster.cluster import Cluster
from ...cost_model.ops.memory import policy
from ..costs.choices import Restriction
from ..graph.expert_dims import expert_dims, is_expert_layer
from ..graph.graph import Graph, Node
from ..graph.layout import AxisStrategy, Mesh
from ..graph.positions import Strategies
from ..graph.state_sharding import joint_groups
from ..ops import Rules
from ..ops.attention import is_attention
from ..requests.request import Forced, Request, divisors, folded_axes
from .heterogeneous import run_sizes

FEW_DEVICES = 4
"""Number of devices of a host up to which a stage may have any number of them."""

LONG_POSITIONS = 16_384
"""Sequence length from which one sequence may keep several hosts busy, or fill their memory."""

SHORTEST_POSITIONS = 64
"""Minimum positions per rank; with fewer, products are too thin to gain by more ranks."""

WEIGHT_DIMS = 3
"""Number of dimensions of a weight of experts."""

EXCHANGES = 4
"""Transfers of tokens per step: to the experts and back, and the same for the tokens' gradients."""

SUMS = 2
"""Bytes that an all-reduce sends per reduced byte (Patarasuk & Yuan 2009)."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a graph. ``number``: greatest common divisor of the layers' numbers of experts,
    which an axis "ep" must divide. ``gradients``: bytes of the gradients of all expert weights;
    ``exchanged``: bytes of tokens per sample and direction that are sent to experts.
    """

    number: int
    gradients: float
    exchanged: float


def longest_attention(graph: Graph) -> int:
    """Return the sequence length of the graph's longest self-attention; 0 without attention."""
    return max((_positions(node, graph) for node in graph), default=0)


def _positions(node: Node, graph: Graph) -> int:
    if not is_attention(node):
        return 0
    return min(graph.spec(ref).shape[-2] for ref in node.inputs[:2])


def experts_of(graph: Graph, strategies: Strategies, *, gradient_bytes: int) -> Experts | None:
    """Return the experts of a graph, or None. ``strategies`` returns an op's sharding strategies on
    an axis of two ranks; ``gradient_bytes``: bytes of one element of a gradient."""
    if not any(len(node.spec.shape) == WEIGHT_DIMS for node in graph.parameters):
        return None
    found = expert_dims(graph, strategies)
    if not found.weights:
        return None
    exchanged = 0.0
    for node in graph:
        if node.kind != "op" or not any(ref in found.views for ref in node.inputs):
            continue
        if is_expert_layer(node):
            tokens, ids = graph.spec(node.inputs[0]), graph.spec(node.inputs[1])
            exchanged += tokens.num_bytes * ids.shape[-1]
        elif not any(ref in found.dims and ref not in found.views for ref in node.inputs):
            data = (ref for ref in node.inputs if ref not in found.views)
            exchanged += sum(graph.spec(ref).num_bytes for ref in data)
    rows = graph.batch_size
    numel = sum(graph[name].spec.numel for name in found.weights)
    number = gcd(*found.weights.values())
    return Experts(number, float(numel * gradient_bytes), exchanged / rows)


@dataclass(frozen=True, slots=True)
class Proposals:
    """Proposer of meshes that have an axis "cp" or "ep" beside dp and tp. ``positions``: sequence
    length of the longest attention; ``experts``: None in a model without experts."""

    positions: int
    experts: Experts | None
    cluster: Cluster
    request: Request

    def meshes(self, num_devices: int, host_size: int, rows: int) -> Iterator[Mesh]:
        """Yield the meshes to try on ``num_devices`` devices, of which ``host_size`` neighbours are
        on one host; ``rows``: samples of a micro-batch."""
        forced = self.request.forced
        no_positions = self.positions < SHORTEST_POSITIONS or forced.schedule == "terapipe"
        if no_positions and self.experts is None:
            return
        degrees: dict[tuple[int, int, int, int], None] = {}
        for tp in divisors(num_devices):
            if host_size > 1 and host_size % tp:
                continue
            parts = num_devices // tp
            if not no_positions and forced.cp is None and (forced.ep or 1) == 1:
                degrees |= dict.fromkeys(self._positions_split(parts, tp, rows))
            if forced.ep is None and (forced.cp or 1) == 1:
                degrees |= dict.fromkeys(self._experts_split(parts, tp, rows, host_size))
        for dp, tp, cp, ep in degrees:
            mesh = mesh_of(dp, tp, cp, ep)
            if _shards(mesh, forced) and forced.dp in (None, dp * ep) and forced.tp in (None, tp):
                yield mesh

    def _positions_split(
        self, parts: int, tp: int, rows: int
    ) -> Iterator[tuple[int, int, int, int]]:
        positions = self.positions
        few_rows = self.request.global_batch < len(self.cluster.hosts)
        dp = gcd(parts, rows)
        cp = parts // dp
        fits = positions % cp == 0 and positions // cp >= SHORTEST_POSITIONS
        if cp > 1 and fits and (few_rows or positions >= LONG_POSITIONS):
            yield dp, tp, cp, 1

    def _experts_split(
        self, parts: int, tp: int, rows: int, host_size: int
    ) -> Iterator[tuple[int, int, int, int]]:
        experts = self.experts
        if experts is None or rows % parts:
            return
        whole = gcd(experts.number, parts)
        within = gcd(experts.number, parts, max(1, host_size // tp))
        for ep in dict.fromkeys((whole, within)):
            is_free = tp == 1 and host_size % ep == 0
            if ep > 1 and not is_free and self._saves(experts, parts // ep, ep, tp):
                yield parts // ep, tp, 1, ep

    def _saves(self, experts: Experts, dp: int, ep: int, tp: int) -> bool:
        """Return whether splitting experts over "ep" sends fewer bytes per step: the tokens
        exchanged are fewer bytes than the gradients that need no all-reduce."""
        tokens = self.request.global_batch / (dp * ep) * experts.exchanged
        return EXCHANGES * tokens < SUMS * experts.gradients / tp * (1 - 1 / ep)


def proposals(graph: Graph, cluster: Cluster, request: Request, rules: Rules) -> Proposals:
    """Return the proposer of meshes for a graph, with the graph's sequence length and experts."""
    gradient_bytes = policy(request.precision, request.optimizer, request.states).gradient_bytes

    def strategies(node: Node) -> tuple[AxisStrategy, ...]:
        return rules.axis_strategies(node, graph, 2)

    experts = experts_of(graph, strategies, gradient_bytes=gradient_bytes)
    return Proposals(longest_attention(graph), experts, cluster, request)


def submesh_sizes(cluster: Cluster, first: int) -> tuple[int, ...]:
    """Return the possible numbers of ranks of a stage that starts at rank ``first``.

    >>> from autoparallel.cost_model.cluster.shorthand import parse_cluster
    >>> submesh_sizes(parse_cluster("2x6xH100"), 0), submesh_sizes(parse_cluster("2x6xH100"), 2)
    ((1, 2, 3, 6, 12), (1, 2, 3))

    On hosts of more than ``FEW_DEVICES``, a stage that takes a part of a host has a number of
    devices that divides the host's: few dimensions of tensors are divisible by others.
    """
    if len({host.num_devices for host in cluster.hosts}) > 1:
        return run_sizes(cluster, first)
    size = cluster.hosts[0].num_devices
    host, offset = divmod(first, size)
    parts = [part for part in range(1, size) if size <= FEW_DEVICES or size % part == 0]
    if offset:
        return tuple(part for part in parts if part <= size - offset)
    return (*parts, *(size * count for count in range(1, len(cluster.hosts) - host + 1)))


def meshes(num_devices: int, host_size: int, forced: Forced) -> tuple[Mesh, ...]:
    """Return the dp × tp meshes (and the forced cp, ep) of ``num_devices`` devices that the forced
    degrees allow, in ascending order of tp.

    Unless forced, "tp" stays within a host if hosts have several devices: groups of ``host_size``
    neighbours never cross hosts.

    >>> [mesh.shape for mesh in meshes(4, 4, Forced())]
    [(4,), (2, 2), (4,)]
    """
    found = []
    cp, ep = forced.cp or 1, forced.ep or 1
    for tp in divisors(num_devices // cp) if num_devices % cp == 0 else ():
        dp = num_devices // (tp * cp)
        data_ep = ep if forced.dp is None else folded_axes(ep, dp, tp, cp, forced.etp)[1]
        if forced.dp not in (None, dp) or forced.tp not in (None, tp) or dp % data_ep:
            continue
        if host_size > 1 and host_size % tp and forced.tp is None and forced.dp is None:
            continue
        mesh = mesh_of(dp // data_ep, tp, cp, data_ep)
        if _shards(mesh, forced):
            found.append(mesh)
    return tuple(found)


def _shards(mesh: Mesh, forced: Forced) -> bool:
    """Return whether ZeRO can shard states on a mesh in the forced groups of ranks, and at all if
    parameters are to be in host memory."""
    in_groups = forced.shard is None or joint_groups(mesh, forced.shard) is not None
    return in_groups and (forced.offload != "parameters" or mesh.num_ranks(mesh.joint_axes) > 1)


def mesh_of(dp: int, tp: int, cp: int = 1, ep: int = 1) -> Mesh:
    """Return the mesh with these degrees, in the order dp, ep, cp, tp, without axes of size 1.

    >>> mesh_of(1, 1), mesh_of(1, 4)
    (Mesh(axes=('dp',), shape=(1,)), Mesh(axes=('tp',), shape=(4,)))
    >>> mesh_of(2, 4, 2)
    Mesh(axes=('dp', 'cp', 'tp'), shape=(2, 2, 4))
    """
    degrees = (("dp", dp), ("ep", ep), ("cp", cp), ("tp", tp))
    sizes = {name: size for name, size in degrees if size > 1} or {"dp": 1}
    return Mesh(tuple(sizes), tuple(sizes.values()))


def restriction(mesh: Mesh, forced: Forced) -> Restriction:
    """Return the uses (batch, parameters, positions, experts) that a plan may make of each mesh
    axis: the use that the axis is named for."""
    of = {name: axis for axis, name in enumerate(mesh.axes) if mesh.shape[axis] > 1}

    def axis_of(name: str) -> tuple[int, ...]:
        return (of[name],) if name in of else ()

    cp, ep = axis_of("cp"), axis_of("ep")
    folded: tuple[int, ...] | None = None
    sliced = (forced.etp or 1) > 1
    if forced.ep is not None or sliced:
        sizes = dict(zip(mesh.axes, mesh.shape, strict=True))
        dp = sizes.get("dp", 1) * sizes.get("ep", 1)
        degrees = (forced.ep or 1, dp, sizes.get("tp", 1), sizes.get("cp", 1))
        names, _ = folded_axes(*degrees, forced.etp)
        folded = tuple(of[name] for name in names)
    return Restriction(
        axis_of("dp"),
        () if forced.tp is None else tuple(i for i, n in enumerate(mesh.axes) if n == "tp"),
        forced.sequence_parallel,
        cp,
        split_experts=ep,
        folded=folded,
        sliced=axis_of("tp") if sliced else (),
    )
