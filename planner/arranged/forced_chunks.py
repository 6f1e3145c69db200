"""What is asked of a plan of several stages per rank, where its schedule is forced.

In: what is forced, and a plan of one stage per rank. Out: how many stages a rank has, on how many
ranks, of how many micro-batches; the same plan on ranks that are alike; and whether it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from ..errors import InfeasibleError, UsageError
from ..graph import Blocks, Graph
from ..plan import Alternative, Plan
from ..pricing.run_classes import stage_begins
from ..requests.features import Features
from ..requests.request import CHUNKED_NAMES, Forced, Request, divisors
from ..schedules.schedules import LOOPED, build_schedule, find_schedule


def num_chunks(forced: Forced) -> int:
    """The stages per rank that are asked for. Raises UsageError AP546 where that cannot be."""
    count = forced.least_chunks
    if count > 1 and forced.schedule not in (*LOOPED, *CHUNKED_NAMES):
        raise refused(
            f"chunks={forced.chunks} with schedule={forced.schedule or 'not given'}",
            f"schedule=, one of {', '.join(LOOPED)}",
        )
    if count > 1 and forced.schedule is not None:
        low, high = find_schedule(forced.schedule).chunks
        if not low <= count <= high:
            raise refused(f"chunks={count} with schedule={forced.schedule}", f"chunks={high}")
    return count


def num_ranks(forced: Forced, count: int, num_blocks: int) -> int:
    """The ranks of a pipeline of so many stages each. Raises UsageError AP546."""
    if forced.pp is None or forced.pp < 2:
        raise refused(
            f"schedule={forced.schedule} needs a pipeline of several ranks", "pp=2 or more"
        )
    if forced.pp * count > num_blocks:
        raise refused(
            f"pp={forced.pp} × chunks={count} stages, but the model has {num_blocks} blocks",
            "fewer chunks",
        )
    return forced.pp


def refused(what: str, fix: str) -> UsageError:
    """AP546: what cannot be of several stages per rank."""
    return UsageError("AP546", what, where="--parallel", fix=fix)


def none_found(
    request: Request, lost: Sequence[Alternative], limit_bytes: int
) -> UsageError | InfeasibleError:
    """Why no pipeline could be cut: what was ``lost`` does not fit, or none can be run so."""
    excess = min((each.peak_memory_bytes - limit_bytes for each in lost), default=0)
    if excess > 0:
        return _too_large("the chunks of a rank", excess)
    forced, asked = request.forced, "the schedules that are allowed"
    if forced.schedule is not None:
        names = {
            "schedule": forced.schedule, "chunks": forced.chunks,
            "microbatches": forced.num_microbatches,
        }  # fmt: skip
        asked = ",".join(f"{name}={value}" for name, value in names.items() if value is not None)
    return refused(
        f"no pipeline that was found can run under {asked}",
        "another number of chunks or micro-batches, or a schedule of one stage per rank",
    )


def of_one_mesh(base: Plan, found: Callable[[Request], Plan], asked: Request) -> Plan:
    """``base``, or if its stages' meshes differ what is found for stages of one size, and if these
    differ too what is found with the degrees of the largest stage."""
    if _are_alike(base):
        return base
    try:
        denied = asked.features.denied | {"mixed-stages"}
        base = found(replace(asked, features=Features(denied)))
    except (InfeasibleError, UsageError) as error:  # too large, or there are none
        raise _unlike() from error
    if _are_alike(base):
        return base
    largest = max(base.stages, key=lambda stage: len(stage.blocks)).mesh
    degrees = dict(zip(largest.axes, largest.shape, strict=True))
    if set(degrees) <= {"dp", "ep", "cp", "tp"}:
        dp, tp, cp = degrees.get("dp", 1), degrees.get("tp", 1), degrees.get("cp")
        own = replace(asked.forced, dp=dp, tp=tp, cp=cp, ep=degrees.get("ep"))
        base = found(replace(asked, forced=own))
    if not _are_alike(base):
        raise _unlike()
    return base


def _are_alike(base: Plan) -> bool:
    return len({stage.mesh for stage in base.stages}) == 1


def _unlike() -> UsageError:
    return refused("the ranks of the pipeline have different meshes", "dp= and tp=")


def fitting_microbatches(request: Request, found: int, ranks: int, count: int) -> int:
    """The number that was found if the schedule can run it, else the next larger it can."""
    name = request.forced.schedule
    assert name is not None
    is_free = request.forced.num_microbatches is None and request.microbatch_size is None
    for number in divisors(request.global_batch) if is_free else ():
        if number >= found:
            try:
                build_schedule(name, ranks * count, number, num_chunks=count)
            except UsageError:
                continue
            return number
    build_schedule(name, ranks * count, found, num_chunks=count)
    return found


def check_begins(found: Plan, graph: Graph, blocks: Blocks, request: Request) -> None:
    """Raises UsageError AP183 where no stage begins with a block that one was to begin with."""
    starts = set(accumulate((len(stage.blocks) for stage in found.stages), initial=0))
    for position in stage_begins(graph, blocks, request.stage_at):
        if position not in starts:
            raise UsageError(
                "AP183",
                f"--stage-at {blocks.blocks[position].name}: no stage starts there",
                why="with several stages per rank, stage boundaries follow FLOPs alone",
                fix="a schedule of one stage per rank, or remove --stage-at",
            )


def usable_bytes(found: Plan, request: Request) -> int:
    """What a plan may take of each device."""
    ranks = [rank for stage in found.stages for rank in stage.devices]
    limit = min(found.cluster.device(rank).usable_memory_bytes for rank in ranks)
    return request.memory_limit_bytes or limit


def check_memory(found: Plan, request: Request, what: str) -> None:
    """Raises InfeasibleError AP301 where ``what``, together, do not fit a rank."""
    excess = found.prediction.peak_memory_bytes - usable_bytes(found, request)
    if excess > 0:
        raise _too_large(what, excess)


def _too_large(what: str, excess_bytes: int) -> InfeasibleError:
    return InfeasibleError(
        "AP301",
        f"{what} do not fit: they need {excess_bytes / 1e9:.3g} GB more",
        fix="fewer chunks, recompute=full, or zero=1 or more",
    )
