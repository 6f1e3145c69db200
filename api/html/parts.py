"""Values for a page's drawings: a plan's cluster, blocks and weights.

Each function takes a plan and returns plain values for a template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from autoparallel.analysis.sharding import mesh_splits, stored_text
from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.html.charts import box
from autoparallel.options.words import names_text, ranks_text, rate_text
from autoparallel.planner.graph.layout import Layout, Mesh
from autoparallel.planner.plan import Plan
from autoparallel.planner.summary import mesh_text
from autoparallel.planner.variants.replicas import stages_of_ranks

MOST_STRIPS = 8
"""Largest number of parts into which a side of a weight's drawing is divided."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """Group of equal adjacent hosts. ``devices`` has the pipeline rank of each device of a host,
    None if the device is idle."""

    names: str
    number: int
    device: str
    devices: tuple[int | None, ...]
    link: str
    rack: str


def cluster_hosts(plan: Plan) -> list[Hosts]:
    """Return a plan's hosts in order; equal adjacent hosts are merged."""
    rank_of: dict[int, int] = {}
    for rank, stages in enumerate(stages_of_ranks(plan)):
        for device in plan.stages[stages[0]].devices:
            rank_of.setdefault(device, rank)
    cluster = plan.cluster
    rows = [
        (
            host.device.name,
            tuple(rank_of.get(first + slot) for slot in range(host.num_devices)),
            link_text(host.link.name, host.link.bytes_per_second) if host.num_devices > 1 else "",
            host.rack,
        )
        for host, first in zip(cluster.hosts, cluster.first_ranks, strict=True)
    ]
    found, at = [], 0
    for (name, ranks, link, rack), same in groupby(rows):
        count = len(list(same))
        found.append(Hosts(ranks_text(range(at, at + count)), count, name, ranks, link, rack))
        at += count
    return found


def link_text(name: str, bytes_per_second: float) -> str:
    return f"{name}, {rate_text(bytes_per_second, 'B/s')} per device"


def between_hosts(cluster: Cluster) -> list[str]:
    """Describe the links between hosts and between racks."""
    if len(cluster.hosts) < 2:
        return []
    links = [("between hosts", cluster.inter_link)]
    if cluster.rack_link is not None:
        links.append(("between racks", cluster.rack_link))
    return [f"{where}: {link_text(link.name, link.bytes_per_second)}" for where, link in links]


@dataclass(frozen=True, slots=True)
class BlockCell:
    """Drawn cell of adjacent blocks of a stage with equal recomputation: columns ``start`` to
    ``start`` + ``length``, a column per block."""

    start: int
    length: int
    rank: int
    stage: int
    recompute: str
    label: str
    title: str

    def path(self, left: float, unit: float, y: float, height: float) -> str:
        """Return the cell as an SVG path: a box per block, or one box if columns (``unit`` wide)
        are too narrow for gaps."""
        gap = 1.5 if unit > 4 else 0.0
        if not gap:
            return box(left + self.start * unit, y, max(0.5, self.length * unit), height)
        places = range(self.start, self.start + self.length)
        return "".join(box(left + place * unit, y, unit - gap, height) for place in places)


def block_cells(plan: Plan) -> list[BlockCell]:
    """Return the drawn cells of all blocks, in the model's order."""
    rank_of = {stage: rank for rank, stages in enumerate(stages_of_ranks(plan)) for stage in stages}
    found, at = [], 0
    for index, stage in enumerate(plan.stages):
        for mode, run in groupby(stage.blocks, key=lambda block: block.recompute):
            names = [block.name for block in run]
            again = "" if mode == "none" else f", {mode} recomputation"
            title = f"{names_text(names)}: stage {index}, pipeline rank {rank_of[index]}{again}"
            label = names_text(names)
            found.append(BlockCell(at, len(names), rank_of[index], index, mode, label, title))
            at += len(names)
    return found


@dataclass(frozen=True, slots=True)
class Weight:
    """Drawing of a parameter's layout: the numbers of parts of its two sides, layout in words, and
    shapes if the model is known."""

    name: str
    rows: int
    columns: int
    layout: str
    shape: str
    local_shape: str
    num_copies: int


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Drawn weights of all blocks of one kind (equal layers) on equal meshes; ``count`` blocks."""

    blocks: str
    count: int
    mesh: str
    stored: str
    weights: tuple[Weight, ...]


def weight_groups(plan: Plan, shapes: Mapping[str, Sequence[int]]) -> list[WeightGroup]:
    """Return drawn weight layouts of each kind of block; ``shapes`` maps names to known shapes."""
    found = []
    for mesh, members, splits in mesh_splits(plan):
        stored = stored_text(members.values())
        for split in splits:
            prefix = f"{split.first}." if split.first else ""
            weights = [
                _weight(name, text, split.layouts[text], mesh, shapes.get(prefix + name, ()))
                for text, names in split.groups.items()
                for name in names
            ]
            blocks = names_text(split.blocks) or "shared"
            count = max(1, len(split.blocks))
            found.append(WeightGroup(blocks, count, mesh_text(mesh), stored, tuple(weights)))
    return found


def _weight(
    name: str, layout_text: str, layout: Layout, mesh: Mesh, shape: Sequence[int]
) -> Weight:
    parts: dict[int, int] = {}
    for placement, size in zip(layout, mesh.shape, strict=True):
        if placement.is_shard:
            parts[placement.dim] = parts.get(placement.dim, 1) * size
    local = [size // parts.get(dim, 1) for dim, size in enumerate(shape)]
    num_parts = 1
    for size in parts.values():
        num_parts *= size
    # a matrix is drawn as it is; all dimensions after the first are one side
    columns = 1
    for dim, size in parts.items():
        columns *= size if dim else 1
    return Weight(
        name,
        min(parts.get(0, 1), MOST_STRIPS),
        min(columns, MOST_STRIPS),
        layout_text,
        " × ".join(f"{size:,}" for size in shape),
        " × ".join(f"{size:,}" for size in local),
        mesh.size // num_parts,
    )
