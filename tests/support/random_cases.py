"""Random small models, clusters and memory limits to plan, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import prod

from small_graphs import leaf, op, weight, with_batch

from autoparallel.cost_model.cluster.cluster import Cluster, Device, Host, Link
from autoparallel.planner.graph.graph import Block, Blocks, Graph, Node, Ref
from autoparallel.planner.ops import axis_strategies
from autoparallel.planner.requests.request import Request

MOST_LAYOUTS = 5_000

LONG_SECONDS = 3600.0
"""No search ends early, on however slow a machine."""


@dataclass(frozen=True)
class Case:
    """A planning job. ``memory_share``: of what the fastest plan without a limit takes."""

    seed: int
    graph: Graph
    blocks: Blocks
    cluster: Cluster
    request: Request
    memory_share: float | None

    @property
    def is_mixed(self) -> bool:
        return len({host.device.name for host in self.cluster.hosts}) > 1

    def limited(self, num_bytes: int) -> Case:
        return replace(self, request=replace(self.request, memory_limit_bytes=num_bytes))


def random_case(seed: int, *, mixed: bool | None = None) -> Case:
    """2 to 5 blocks of 1 to 4 ops on 1 to 4 devices, few enough layouts to try them all."""
    rng = random.Random(seed)
    batch = rng.choice((2, 4, 4, 8))
    graph, blocks = random_model(rng, batch)
    while num_layouts(graph, blocks) > MOST_LAYOUTS:
        graph, blocks = random_model(rng, batch)
    on = random_cluster(rng, mixed=rng.random() < 0.3 if mixed is None else mixed)
    share = rng.choice((None, None, 0.95, 0.8, 0.65, 0.5))
    request = Request(batch, time_limit_seconds=LONG_SECONDS)
    return Case(seed, graph, blocks, on, request, share)


def random_pipeline_case(seed: int) -> Case:
    """4 or 5 blocks on 2 or 3 equal devices: of 2, ranks may have two stages.

    In every other case compute counts more than messages. Memory is tight in some cases of 2
    devices and 4 blocks, whose recomputations are few.
    """
    rng = random.Random(seed)
    batch, devices = rng.choice((2, 4, 4, 8)), rng.choice((2, 2, 3))
    graph, blocks = random_model(rng, batch)
    while len(blocks.blocks) < 4:
        graph, blocks = random_model(rng, batch)
    on = random_cluster(rng, mixed=False)
    while on.num_devices != devices:
        on = random_cluster(rng, mixed=False)
    is_tight = devices == 2 and len(blocks.blocks) == 4 and rng.random() < 0.5
    share = rng.choice((0.95, 0.8, 0.65)) if is_tight else None
    request = Request(batch, time_limit_seconds=LONG_SECONDS)
    case = Case(seed, graph, blocks, on, request, share)
    return where_compute_counts(case) if seed % 2 else case


def where_compute_counts(case: Case) -> Case:
    """Links a thousand times as fast, devices a hundredth, so that it is worth sharing out."""

    def quick(link: Link) -> Link:
        bandwidth = link.bytes_per_second * 1000
        return replace(link, bytes_per_second=bandwidth, alpha_seconds=link.alpha_seconds / 1000)

    def slow(device: Device) -> Device:
        peaks = {name: peak / 100 for name, peak in device.peak_flops.items()}
        return replace(device, peak_flops=peaks, memory_bytes_per_second=1e12)

    hosts = tuple(
        replace(each, link=quick(each.link), device=slow(each.device))
        for each in case.cluster.hosts
    )
    links = quick(case.cluster.inter_link)
    return replace(case, cluster=replace(case.cluster, hosts=hosts, inter_link=links))


def num_layouts(graph: Graph, blocks: Blocks) -> int:
    """Assignments of strategies to the kinds' nodes on one axis of two ranks."""
    nodes = [graph[name] for block in blocks.kinds.values() for name in block.nodes]
    return prod(len(axis_strategies(node, graph, 2)) for node in nodes)


class _Builder:
    """Nodes and blocks in order; values are matrices of ``rows`` by their width."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.nodes: list[Node] = []
        self.blocks: list[Block] = []
        self.widths: dict[str, int] = {}
        self.first_user: dict[str, str] = {}
        self.block: list[str] = []
        self.owned: list[str] = []

    def add(self, path: str, args: tuple[object, ...], width: int) -> str:
        """An op on values (by name) and literals."""
        name = f"op{len(self.nodes)}"
        refs = tuple(Ref(each) if isinstance(each, str) else each for each in args)
        self.nodes.append(op(name, path, refs, self.rows, width))
        self.widths[name] = width
        self.block.append(name)
        return name

    def linear(self, value: str, width: int, parameter: str = "") -> str:
        """By a new weight, or by one that there is."""
        if not parameter:
            parameter = f"w{len(self.nodes)}"
            self.nodes.append(weight(parameter, width, self.widths[value]))
            self.owned.append(parameter)
        return self.add("linear.default", (value, parameter), width)

    def end_block(self, kind: str) -> None:
        name = f"block{len(self.blocks)}"
        self.blocks.append(Block(name, kind, tuple(self.block), tuple(self.owned)))
        self.block, self.owned = [], []


def random_model(rng: random.Random, rows: int) -> tuple[Graph, Blocks]:
    """Stem, layers (equal or not), a head that may share the stem's weight; mean as loss."""
    build = _Builder(rows)
    width = rng.choice((4, 8, 16))
    build.nodes.append(leaf("x", rows, width))
    build.widths["x"] = width
    stem = value = build.linear("x", width)
    shared = build.owned[0]
    if rng.random() < 0.4:
        value = build.add("relu.default", (value,), width)
    build.end_block("stem")
    num_layers = rng.choice((0, 1, 1, 2, 3))
    shape = rng.choice(("one", "activated", "residual", "mlp"))
    for number in range(num_layers):
        value = _layer(build, shape, value, width)
        build.end_block("layer" if shape != "one" or number < 2 else "other")
    if rng.random() < 0.3:
        value = build.add("add.Tensor", (value, stem), width)
    match rng.choice(("mean", "tied", "linear")):
        case "tied":
            value = build.linear(value, width, shared)
        case "linear":
            value = build.linear(value, rng.choice((4, 32)))
    build.nodes.append(op("loss", "mean.default", (Ref(value),)))
    build.block.append("loss")
    build.end_block("head")
    return with_batch(Graph(tuple(build.nodes), Ref("loss"), rows)), Blocks(tuple(build.blocks))


def _layer(build: _Builder, shape: str, value: str, width: int) -> str:
    start = value
    match shape:
        case "one":
            return build.linear(value, width)
        case "activated":
            return build.add("relu.default", (build.linear(value, width),), width)
        case "residual":
            value = build.linear(value, width)
            return build.add("add.Tensor", (start, value), width)
    value = build.add("gelu.default", (build.linear(value, 2 * width),), 2 * width)
    return build.linear(value, width)


def random_cluster(rng: random.Random, *, mixed: bool) -> Cluster:
    """1 to 4 devices in one host or two; ``mixed``: two hosts whose devices differ."""
    sizes = rng.choice(((1,), (2,), (2,), (3,), (4,), (4,), (1, 1), (2, 2)))
    if mixed:
        sizes = rng.choice(((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1)))
    flops, memory = rng.choice((1e8, 1e9, 1e10)), rng.choice((1e8, 1e10))
    names = ("small", "big") if mixed else ("toy", "toy")
    hosts = []
    for number, size in enumerate(sizes):
        faster = rng.choice((0.3, 2.0, 5.0)) if mixed and number else 1.0
        device = Device(
            names[number],
            "cpu",
            10**12,
            10**12,
            memory * faster,
            {"float32": flops * faster, "float64": flops * faster},
            launch_seconds=0.0,
        )
        wire = Link("wire", rng.choice((1e-7, 1e-6, 1e-5)), rng.choice((1e6, 1e7, 1e8, 1e9)))
        if number and not mixed:
            wire = hosts[0].link
        hosts.append(Host(device, size, wire))
    between = Link("slow wire", rng.choice((1e-6, 1e-5)), rng.choice((1e6, 1e7, 1e8)))
    return Cluster("toys", tuple(hosts), between)
