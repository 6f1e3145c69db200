"""Options of the search's outer loop (batch and stages), checked against the request.

In: a request, a graph, a cluster. Out: micro-batch sizes and numbers of stages to try, or a
``UsageError`` that names the option that cannot be met.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, log2

from ...cost_model.cluster.cluster import Cluster
from ..dims.batch import meeting, meeting_text
from ..errors import UsageError
from ..graph.expert_dims import experts_of_layers, is_expert_layer
from ..graph.graph import Graph
from ..graph.layout import SLICED, Mesh
from ..graph.state_sharding import joint_groups
from ..ops.experts import sent_strategies
from ..schedules.schedules import (
    LOOPED,
    REGISTERED,
    build_schedule,
    compute_orders,
    find_schedule,
    registered_schedule,
)
from .request import CHUNKED_NAMES, Forced, Request, divisors, folded_axes


def check_degrees(forced: Forced, cluster: Cluster, graph: Graph | None = None) -> None:
    """Raise UsageError AP127 if the forced degrees of parallelism cannot use every device of the
    cluster exactly once, or ``ep`` does not divide the experts of a layer of ``graph``; AP191 for
    parameters in host memory that they cannot shard."""
    check_experts(forced, () if graph is None else experts_of_layers(graph))
    if graph is not None and (forced.etp or 1) > 1:
        _check_slices(forced, graph)
    degrees = {
        name: value
        for name in ("dp", "ep", "cp", "tp", "pp")
        if (value := getattr(forced, name)) is not None and (name != "ep" or forced.dp is None)
    }
    product = 1
    for value in degrees.values():
        product *= value
    total = cluster.num_devices
    said = " × ".join(f"{name}={value}" for name, value in degrees.items())
    if {"dp", "tp", "pp"} <= set(degrees) and product != total:
        raise UsageError(
            "AP127",
            f"{said} is {product} devices, the cluster has {total}",
            fix=f"degrees whose product is {total}",
        )
    if product > total or (len(set(_host_sizes(cluster))) == 1 and total % product):
        raise UsageError(
            "AP127",
            f"{said} does not divide the cluster's {total} devices",
            fix=f"degrees whose product divides {total}: {', '.join(map(str, divisors(total)))}",
        )
    check_shard(forced, total)
    ranks = total // ((forced.tp or 1) * (forced.pp or 1))
    ranks = ranks if forced.dp is None else forced.dp * (forced.cp or 1)
    if forced.offload == "parameters" and ranks == 1:
        raise UsageError(
            "AP191",
            "offload=parameters where no ranks share parameters",
            why="it is the shards of ZeRO 3 that host memory can hold",
            where="--parallel",
            fix="dp=2 or more, or offload=gradients",
        )


def check_shard(forced: Forced, num_devices: int, mesh: Mesh | None = None) -> None:
    """Raise UsageError AP127 if groups of ``shard`` neighbours cannot divide the data-parallel
    ranks, or those of ``mesh`` in their order."""
    given, shard = [forced.dp, forced.cp, forced.tp, forced.pp], forced.shard or 1
    dp, cp, tp, pp = (degree or 1 for degree in given)
    said, ranks = f"the {num_devices // (tp * pp)} ranks left for it", num_devices // (tp * pp)
    if forced.dp is not None:
        said, ranks = f"dp={dp}" + (f" × cp={cp}" if cp > 1 else ""), dp * cp
    possible = [each for each in divisors(ranks) if mesh is None or joint_groups(mesh, each)]
    if shard not in possible:
        raise UsageError(
            "AP127",
            f"shard={shard} does not divide {said}",
            why="ZeRO shards states over groups of equally many neighbouring ranks",
            where="--parallel",
            fix=f"shard= one of {', '.join(map(str, possible[1:]))}, or leave shard out",
        )


def check_experts(forced: Forced, numbers: Sequence[int] = ()) -> None:
    """Raise UsageError AP127 if ``etp`` ranks cannot split each expert, or ``ep`` ranks cannot hold
    different experts at the forced degrees, or if ``ep`` does not divide one of ``numbers``, the
    numbers of experts of the layers."""
    dp, ep, tp, cp, etp = forced.dp, forced.ep, forced.tp or 1, forced.cp or 1, forced.etp
    if etp not in (None, 1, tp):
        raise UsageError(
            "AP127",
            f"etp={etp} beside tp={tp}",
            why="all tensor-parallel ranks split each expert, or none do",
            where="--parallel",
            fix=f"etp=1, tp={etp},etp={etp}, or leave etp out",
        )
    if ep is None:
        return
    possible = [
        each
        for each in divisors(gcd(*numbers) or ep)
        if dp is None or dp % folded_axes(each, dp, tp, cp, etp)[1] == 0
    ]
    fix = f"ep= one of {', '.join(map(str, possible))}"
    if dp is not None and dp % folded_axes(ep, dp, tp, cp, etp)[1]:
        why = "experts are spread over data-parallel ranks, or over tp= and cp= ranks first"
        raise UsageError("AP127", f"ep={ep} does not divide dp={dp}", why=why, fix=fix)
    for number in numbers:
        if number % ep:
            what = f"ep={ep} does not divide the {number} experts of a layer"
            raise UsageError("AP127", what, fix=fix)


def _check_slices(forced: Forced, graph: Graph) -> None:
    """Raise UsageError AP127 if ``etp`` ranks cannot split each expert of a layer by its inner
    width, or no layer has experts."""
    layers = list(filter(is_expert_layer, graph))
    etp, where = forced.etp or 1, "--parallel"
    if not layers:
        what = f"etp={etp} in a model without a layer of experts"
        raise UsageError("AP127", what, where=where, fix="leave etp out")
    for node in layers:
        inputs = [graph.spec(ref) for ref in node.inputs]
        if all(each.label != SLICED for each in sent_strategies(node, inputs, etp)):
            raise UsageError(
                "AP127",
                f"etp={etp} cannot split the experts of {node.module or node.name}",
                why="it does not divide their inner width, or their activation mixes columns of it "
                "in an unknown way",
                where=where,
                fix="etp=1, or leave etp out",
            )


def _host_sizes(cluster: Cluster) -> tuple[int, ...]:
    return tuple(host.num_devices for host in cluster.hosts)


def microbatch_rows(graph: Graph, request: Request, cluster: Cluster) -> tuple[int, ...]:
    """Return the possible rows (samples) of a micro-batch over all data-parallel ranks, the most
    promising first. Raises UsageError AP124 or AP125 if the request allows none.

    If rows interact (``batch_norm``), only the whole batch as one micro-batch is exact; it is the
    only size unless the request sets a number of micro-batches.
    """
    batch, forced = request.global_batch, request.forced
    if forced.num_microbatches is not None and batch % forced.num_microbatches:
        raise UsageError(
            "AP124",
            f"a global batch of {batch} samples cannot be split into {forced.num_microbatches} "
            "micro-batches",
            fix=f"a divisor of {batch}: {', '.join(map(str, divisors(batch)))}",
        )
    if not graph.batch_dims:
        return _captured_rows(graph, request)
    is_one = graph.accumulation.mixing and forced.num_microbatches is None
    rows = (batch,) if is_one else divisors(batch)
    parts = forced.row_parts
    if request.microbatch_size is not None:
        ranks = range(parts, cluster.num_devices + 1, parts)
        possible = {request.microbatch_size * number for number in ranks}
        rows = tuple(each for each in rows if each in possible)
    if forced.num_microbatches is not None:
        rows = tuple(each for each in rows if each * forced.num_microbatches == batch)
    rows = tuple(each for each in rows if each % parts == 0)
    if not rows:
        raise UsageError(
            "AP124",
            f"a global batch of {batch} samples cannot be split as requested",
            why=_asked(request),
            fix=fix_of_split(batch, forced, request.microbatch_size),
        )
    middle = log2(2 * cluster.num_devices)
    return tuple(sorted(rows, key=lambda each: (abs(log2(each) - middle), each)))


def _captured_rows(graph: Graph, request: Request) -> tuple[int, ...]:
    count = request.forced.num_microbatches
    if request.global_batch != graph.batch_size or count not in (None, 1):
        is_batch = request.global_batch != graph.batch_size
        fix = (
            f"--global-batch {graph.batch_size}" if is_batch else "microbatches=1, or leave it out"
        )
        node = meeting(graph)
        raise UsageError(
            "AP125",
            f"this model can only be planned with its captured batch, "
            f"{graph.batch_size} samples in one micro-batch",
            why="the model takes another path for fewer samples"
            if node is None
            else f"{meeting_text(node)}: each of its results depends on several of them",
            where="" if node is None else node.source,
            fix=fix,
        )
    return (graph.batch_size,)


def _asked(request: Request) -> str:
    forced = request.forced
    asked = {
        "micro-batch size": request.microbatch_size,
        "number of micro-batches": forced.num_microbatches,
        "dp": forced.dp,
        "ep": forced.ep,
    }
    return ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)


def fix_of_split(batch: int, forced: Forced, rows: int | None) -> str:
    """Return a remedy for an error message: a batch, micro-batch size or number of micro-batches
    that ``forced`` allows. ``rows``: the user's micro-batch size per data-parallel rank.

    >>> fix_of_split(6, Forced(dp=4), None)
    'a --global-batch that is a multiple of dp=4, such as 8'
    >>> fix_of_split(8, Forced(dp=2), 3)
    'a size that divides 8 / (dp=2): --micro-batch 1, 2 or 4'
    >>> fix_of_split(8, Forced(dp=2, num_microbatches=8), None)
    'microbatches= one of 1, 2, 4'
    >>> fix_of_split(8, Forced(dp=2, num_microbatches=8), 2)
    'microbatches=2, or leave it out'
    """
    parts, by = forced.row_parts, _split_by(forced)
    if batch % parts:
        least = -(-batch // parts) * parts
        return f"a --global-batch that is a multiple of {by}, such as {least}"
    if rows is None:
        return f"microbatches= one of {', '.join(map(str, divisors(batch // parts)))}"
    if batch // parts % rows:
        sizes = [str(each) for each in divisors(batch // parts)]
        said = " or ".join(filter(None, (", ".join(sizes[:-1]), sizes[-1])))
        return f"a size that divides {batch} / ({by}): --micro-batch {said}"
    return f"microbatches={batch // (rows * parts)}, or leave it out"


def _split_by(forced: Forced) -> str:
    """Return the forced degree that splits the batch ("dp=8" or "ep=4"), as text for errors.

    >>> _split_by(Forced(dp=8, ep=4)), _split_by(Forced(ep=4)), _split_by(Forced())
    ('dp=8', 'ep=4', 'dp=1')
    """
    return f"ep={forced.ep}" if forced.dp is None and forced.ep else f"dp={forced.dp or 1}"


def _several(request: Request, num_devices: int, num_blocks: int) -> tuple[int, ...]:
    """Return the possible numbers of pipeline ranks for a schedule with several stages per rank.
    Raises UsageError AP546 if devices or blocks do not suffice for two."""
    least = request.forced.least_chunks
    most = min(num_devices, num_blocks // least)
    if most < 2:
        raise UsageError(
            "AP546",
            f"schedule={request.forced.schedule} needs two ranks or more, each with {least} "
            f"blocks or more: there are devices and blocks for {most}",
            where="--parallel",
            fix="a schedule of one stage per rank, fewer chunks, or smaller degrees",
        )
    return tuple(range(2, most + 1))


def stage_numbers(
    request: Request, cluster: Cluster, num_blocks: int, *, least_stages: int = 1
) -> tuple[int, ...]:
    """Return the numbers of pipeline ranks to try; ``least_stages`` is the minimum that
    ``--stage-at`` requires, ``num_blocks`` the maximum.

    Raises UsageError AP128, AP183, AP186 or AP546 if the request allows none.
    """
    forced, least = request.forced.pp, least_stages
    asked = request.forced
    degrees = asked.row_parts * (asked.tp or 1) * (asked.cp or 1)
    most = cluster.num_devices // degrees
    if forced is not None and forced < least:
        raise UsageError(
            "AP183",
            f"--stage-at needs {least} stages, but pp={forced} is fixed",
            fix=f"pp={least}, or fewer --stage-at",
        )
    if least > 1 and not request.features.allows("pp"):
        raise UsageError(
            "AP186",
            f"--stage-at needs {least} stages, but pp is denied",
            fix="remove one of the two",
        )
    if forced is not None and forced > num_blocks:
        raise UsageError(
            "AP128",
            f"pp={forced} needs at least as many blocks, but the model has {num_blocks}",
            fix=f"pp= one of {', '.join(map(str, _possible_stages(most, cluster, num_blocks)))}",
        )
    if forced is not None:
        return (forced,)
    if not request.features.allows("pp"):
        if request.forces_chunks:
            raise UsageError(
                "AP186",
                f"schedule={asked.schedule} needs a pipeline, but pp is denied",
                fix="remove one of the two",
            )
        return (1,)
    if request.forces_chunks:
        return _several(request, most, num_blocks)
    found = tuple(range(least, min(most, num_blocks) + 1))
    if not found:
        raise UsageError(
            "AP183",
            f"--stage-at needs {least} stages, but the cluster's devices allow {most}",
            fix="fewer --stage-at",
        )
    return found


def _possible_stages(most: int, cluster: Cluster, num_blocks: int) -> tuple[int, ...]:
    """Return the numbers of stages, up to ``most`` and ``num_blocks``, that an error may suggest;
    only divisors of ``most`` if all hosts have equally many devices."""
    are_equal = len(set(_host_sizes(cluster))) == 1
    numbers = divisors(most) if are_equal else range(1, most + 1)
    return tuple(number for number in numbers if number <= num_blocks)


def check_forced_schedule(request: Request, num_blocks: int) -> None:
    """Raise UsageError if a forced schedule is impossible with other forced choices: AP546 for its
    number of stages per rank, AP153 for its number of ranks or micro-batches, AP549 if both
    TeraPipe and ``cp`` split sequences."""
    forced = request.forced
    _check_chunks(request)
    if request.forces_chunks and forced.pp is not None:
        _check_ranks(forced.schedule, forced.pp)
        if forced.pp * forced.least_chunks > num_blocks:
            raise refused(
                f"pp={forced.pp} × chunks={forced.least_chunks} stages, but the model has "
                f"{num_blocks} blocks",
                "fewer chunks",
            )
    own = registered_schedule(forced.schedule)
    if own is not None and forced.pp is not None and forced.num_microbatches is not None:
        chunks = forced.least_chunks
        compute_orders(own.name, forced.pp * chunks, forced.num_microbatches, chunks)
    if forced.schedule == "chimera":
        _check_ranks(forced.schedule, forced.pp or 1)
        build_schedule("chimera", forced.pp or 1, 2)
    if forced.schedule == "terapipe" and (forced.cp or 1) > 1:
        raise UsageError(
            "AP549",
            "cp and schedule=terapipe both split the positions of sequences",
            where="--parallel",
            fix="remove cp",
        )


def _check_chunks(request: Request) -> None:
    forced = request.forced
    count = forced.least_chunks
    if count > 1 and forced.schedule not in (*LOOPED, *CHUNKED_NAMES, *REGISTERED):
        raise refused(
            f"chunks={forced.chunks} with schedule={forced.schedule or 'not given'}",
            f"schedule=, one of {', '.join(LOOPED)}",
        )
    if count > 1 and forced.schedule is not None:
        low, high = find_schedule(forced.schedule).chunks
        if not low <= count <= high:
            raise refused(f"chunks={count} with schedule={forced.schedule}", f"chunks={high}")


def _check_ranks(schedule: str | None, num_ranks: int) -> None:
    if num_ranks < 2:
        raise refused(f"schedule={schedule} needs a pipeline of several ranks", "pp=2 or more")


def refused(what: str, fix: str) -> UsageError:
    """Return error AP546: an option cannot be met under a schedule of several stages per rank."""
    return UsageError("AP546", what, where="--parallel", fix=fix)
