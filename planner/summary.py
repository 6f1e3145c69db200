"""Summary of a configuration in one line: ``dp=4 tp=2 pp=2 · ZeRO 1 · 1F1B · 16 × 4``.

In: the mesh, ZeRO stage and blocks of each pipeline rank, and the schedule. Out: the parallel
degrees, the ZeRO stage, recomputation if any, the schedule if there is a pipeline, and the number
of micro-batches times their size. Reports, plan files and the search's reasons use this line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ..cost_model.ops.memory import Offload
from .graph.layout import Mesh
from .plan import Plan, Recompute, ServerPlan, rows_text

SEPARATOR = " · "

SCHEDULE_TITLES = {
    "1f1b": "1F1B",
    "eager-1f1b": "eager-1F1B",
    "gpipe": "GPipe",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
    "zbv": "ZBV",
    "bfs": "BFS",
    "dualpipev": "DualPipeV",
    "chimera": "Chimera",
    "terapipe": "TeraPipe",
    "pipedream": "PipeDream",
    "pipedream-2bw": "PipeDream-2BW",
    "ampnet": "AMPNet",
}
"""Usual spelling of schedule names; it differs from the option's value only in case."""


RECOMPUTE_TITLES: dict[Recompute, str] = {
    "full": "full recompute",
    "attention": "recompute all but attention",
    "attention-offloaded": "offload, recompute all but attention",
    "selective": "selective recompute",
    "none-offloaded": "offload activations",
}
"""Texts of the modes of blocks that are recomputed or offloaded; first those that run tiles."""

HOST_STATES: dict[Offload, str] = {
    "optimizer": "masters and optimizer states",
    "gradients": "masters, optimizer states and gradients",
    "parameters": "masters, optimizer states, gradients and parameters",
}
"""Names of the states that are in host memory."""


@dataclass(frozen=True, slots=True)
class RankSummary:
    """Facts of one pipeline rank: its mesh, its ZeRO stage and ``shard_degree``, and its blocks.

    ``modes``: those of its blocks that are recomputed or offloaded. ``shares``: samples of a
    micro-batch at each index along mesh axis 0, () if they are equal. ``ep`` ranks of the mesh hold
    different experts, ``etp`` ranks slices of the same experts. ``tiles``: most tiles in which
    recomputation runs the last ops of a block.
    """

    mesh: Mesh
    zero: int
    num_blocks: int
    modes: tuple[Recompute, ...] = ()
    shares: tuple[int, ...] = ()
    ep: int = 1
    etp: int = 1
    tiles: int = 1
    shard_degree: int = 0


def plan_summary(plan: Plan) -> str:
    """Return the configuration of a plan (degrees, ZeRO, schedule, micro-batches) as one line."""
    if plan.servers is not None:
        parts = (servers_text(plan.servers), f"{plan.num_microbatches} × {plan.microbatch_size}")
        return SEPARATOR.join(parts)
    return summary_text(
        rank_summaries(plan),
        schedule_text(plan.schedule, plan.num_chunks, len(plan.slices)),
        plan.num_microbatches,
        plan.microbatch_size,
        plan.offload,
    )


def servers_text(servers: ServerPlan) -> str:
    """Format the configuration of parameter servers.

    >>> servers_text(ServerPlan((0, 1), (2, 3), (1, 1), "ssp", 2))
    '2 workers, 2 servers · SSP 2'
    """
    beside = " beside them" if set(servers.servers) <= set(servers.workers) else ""
    bound = f" {servers.staleness}" if servers.consistency == "ssp" else ""
    counts = f"{len(servers.workers)} workers, {len(servers.servers)} servers{beside}"
    return f"{counts}{SEPARATOR}{servers.consistency.upper()}{bound}"


def rank_summaries(plan: Plan) -> list[RankSummary]:
    """Return a summary of each pipeline rank; stages on the same devices share a rank."""
    ranks: dict[tuple[int, ...], RankSummary] = {}
    for stage in plan.stages:
        modes = tuple(b.recompute for b in stage.blocks if b.recompute != "none")
        before = ranks.get(stage.devices, RankSummary(stage.mesh, stage.zero, 0))
        ranks[stage.devices] = replace(
            before,
            num_blocks=before.num_blocks + len(stage.blocks),
            modes=before.modes + modes,
            shares=stage.shares,
            ep=max(before.ep, stage.expert_degree),
            etp=max(before.etp, stage.slice_degree),
            tiles=plan.most_tiles,
            shard_degree=stage.shard_degree,
        )
    return list(ranks.values())


def summary_text(
    ranks: Sequence[RankSummary],
    schedule: str,
    num_microbatches: int,
    microbatch_size: int,
    offload: Offload = "none",
) -> str:
    """Format the summary line of a plan; ``schedule`` is left out for a single rank.

    >>> rank = RankSummary(Mesh(("dp", "tp"), (4, 2)), zero=1, num_blocks=8)
    >>> summary_text([rank, rank], "1F1B", 16, 4)
    'dp=4 tp=2 pp=2 · ZeRO 1 · 1F1B · 16 × 4'
    >>> wide = RankSummary(Mesh(("dp", "tp"), (2, 8)), zero=1, num_blocks=8, modes=("full",) * 6)
    >>> summary_text([wide, rank], "GPipe", 16, 4)
    '2 stages: dp=2 tp=8 | dp=4 tp=2 · ZeRO 1 · full recompute 6/16 blocks · GPipe · 16 × 4'
    """
    parts = [*strategy_parts(ranks, schedule), *offload_text(offload)]
    return SEPARATOR.join((*parts, f"{num_microbatches} × {microbatch_size}"))


def strategy_parts(ranks: Sequence[RankSummary], schedule: str) -> list[str]:
    """Return the parts of a plan's summary line that precede the micro-batches, as texts."""
    has_one_zero = len({zero_text(rank.zero, rank.shard_degree) for rank in ranks}) == 1
    texts = [_rank_text(rank, with_zero=not has_one_zero) for rank in ranks]
    if len(set(texts)) == 1:
        pipeline = [f"pp={len(ranks)}"] if len(ranks) > 1 else []
        parts = [" ".join([texts[0], *pipeline]).strip() or "one device"]
    else:
        parts = [f"{len(ranks)} stages: {' | '.join(_counted(texts))}"]
    if has_one_zero:
        parts.append(zero_text(ranks[0].zero, ranks[0].shard_degree))
    parts += _recompute_parts(ranks)
    return [*parts, schedule] if len(ranks) > 1 else parts


def zero_text(zero: int, shard_degree: int = 0) -> str:
    """Format a ZeRO stage, and the number of ranks that shard states if not all do.

    >>> zero_text(1), zero_text(3, 8)
    ('ZeRO 1', 'ZeRO 3 within 8')
    """
    return f"ZeRO {sharding_text(zero, shard_degree)}"


def sharding_text(zero: int, shard_degree: int = 0) -> str:
    """Format a ZeRO stage as ``zero_text`` does, for a cell under the heading ZeRO.

    >>> sharding_text(1), sharding_text(3, 8)
    ('1', '3 within 8')
    """
    return f"{zero}" + (f" within {shard_degree}" if zero and shard_degree else "")


def offload_text(offload: Offload) -> tuple[str, ...]:
    """Return the part of a plan's summary line about offloading to host memory.

    >>> offload_text("gradients"), offload_text("none")
    (('optimizer and gradients offloaded',), ())
    """
    texts = {"gradients": "optimizer and gradients", "parameters": "all states"}
    return () if offload == "none" else (f"{texts.get(offload, offload)} offloaded",)


def schedule_text(name: str, num_chunks: int = 1, num_slices: int = 0) -> str:
    """Format a schedule's name with its chunks and slices.

    >>> schedule_text("1f1b"), schedule_text("interleaved", num_chunks=2)
    ('1F1B', 'interleaved × 2 chunks')
    """
    chunks = f" × {num_chunks} chunks" if num_chunks > 1 else ""
    slices = f" × {num_slices} slices" if num_slices > 1 else ""
    return f"{SCHEDULE_TITLES.get(name, name)}{chunks}{slices}"


def mesh_text(mesh: Mesh, ep: int = 1, etp: int = 1) -> str:
    """Format the degrees of a mesh that exceed 1; "dp" counts "ep" too, as both split the batch.
    ``ep``: number of ranks that hold different experts, if other axes than "ep" spread them too;
    ``etp``: number of ranks that hold slices of the same experts.

    >>> mesh_text(Mesh(("dp", "tp"), (4, 2))), mesh_text(Mesh(("dp", "ep"), (2, 4)))
    ('dp=4 tp=2', 'dp=8 ep=4')
    >>> mesh_text(Mesh(("dp", "tp"), (4, 2)), ep=8)
    'dp=4 ep=8 tp=2'
    >>> mesh_text(Mesh(("ep", "tp"), (4, 2)), etp=2)
    'dp=4 ep=4 tp=2 etp=2'
    >>> mesh_text(Mesh(("dp", "tp"), (1, 1)))
    'one device'
    """
    return _degrees(mesh, ep, etp) or "one device"


def _degrees(mesh: Mesh, ep: int, etp: int) -> str:
    sizes = dict(zip(mesh.axes, mesh.shape, strict=True))
    spread = {"dp": mesh.row_parts, "ep": max(ep, sizes.get("ep", 1))}
    sizes = {**spread, **{axis: n for axis, n in sizes.items() if axis not in spread}, "etp": etp}
    return " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)


def _rank_text(rank: RankSummary, *, with_zero: bool) -> str:
    degrees = _degrees(rank.mesh, rank.ep, rank.etp)
    parts = [degrees or ("one device" if with_zero or rank.shares else "")]
    parts += [f"samples {rows_text(rank.shares)}"] if rank.shares else []
    parts += [zero_text(rank.zero, rank.shard_degree)] if with_zero else []
    return " ".join(parts)


def _counted(texts: Iterable[str]) -> list[str]:
    """Replace equal neighbours by one text that begins with their number ("2 × dp=4")."""
    runs = [(text or "one device", len(list(run))) for text, run in groupby(texts)]
    return [f"{count} × {text}" if count > 1 else text for text, count in runs]


def _recompute_parts(ranks: Sequence[RankSummary]) -> list[str]:
    total = sum(rank.num_blocks for rank in ranks)
    counts = Counter(mode for rank in ranks for mode in rank.modes)
    tiles = max(rank.tiles for rank in ranks)
    parts = [
        text + ("" if counts[mode] == total else f" {counts[mode]}/{total} blocks")
        for mode, text in RECOMPUTE_TITLES.items()
        if counts[mode]
    ]
    if parts and tiles > 1:
        parts[0] += f", last ops in {tiles} tiles"
    return parts
