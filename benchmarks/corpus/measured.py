"""Writes ``measured.sqlite``, the measurements of the case ``measured-4xH100``.

They are made up, so that they hold on every machine: of every op that planning the case asks for,
but each fourth, what FLOPs and bytes take on a device of round figures, times a factor between
0.8 and 1.4 that follows from the op's text; of collectives a latency and a rate.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoparallel.cost_model.profile.case import OpCase
from autoparallel.cost_model.profile.database import Database
from autoparallel.cost_model.profile.environment import Environment
from autoparallel.cost_model.profile.lookup import level_of
from autoparallel.cost_model.profile.records import Measurement, Transfer
from autoparallel.options.plan_options import plan_options
from autoparallel.planner.configured.profiling_targets import ProfilingTargets, asked_cases
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import find_cluster, request_of
from autoparallel.target.load import load_target
from benchmarks.corpus.cases import BY_NAME

FILE = Path(__file__).resolve().parent / "measured.sqlite"
MADE_UP = Environment("H100", "", "2.13.0", 0)
FLOPS_PER_SECOND, BYTES_PER_SECOND, LAUNCH_SECONDS = 300e12, 2e12, 5e-6
LINK_SECONDS, LINK_BYTES_PER_SECOND = 2e-5, 1.5e11
SIZES = (1 << 10, 1 << 16, 1 << 22, 1 << 28)


def main() -> None:
    case = BY_NAME["measured-4xH100"]
    options = plan_options(case.global_batch, case.seq, **{**case.options, "profile": "analytic"})
    target = load_target(case.target, case.settings)
    program = capture_target(target, options)
    wanted = asked_cases(
        program.graph,
        program.blocks,
        find_cluster(case.cluster),
        request_of(program, target, options),
    )
    FILE.unlink(missing_ok=True)
    with Database(FILE) as database:
        for index, op in enumerate(sorted(wanted.ops, key=lambda op: op.case.key())):
            if index % 4:
                database.put(MADE_UP, op.case, measurement(op.case))
        for transfer in transfers(wanted):
            database.put_transfer(MADE_UP, transfer)


def measurement(case: OpCase) -> Measurement:
    """The made-up seconds of an op."""
    factor = 0.8 + 0.6 * hashlib.sha256(case.key().encode()).digest()[0] / 255
    forward, backward = (
        factor * (LAUNCH_SECONDS + max(flops / FLOPS_PER_SECOND, size / BYTES_PER_SECOND))
        for flops, size in zip(case.flops, case.num_bytes, strict=True)
    )
    return Measurement(forward, backward, 9, 0.02)


def transfers(wanted: ProfilingTargets) -> Iterator[Transfer]:
    """The made-up seconds of every collective on every kind of group."""
    for each in wanted.transfers:
        group = each.group
        for size in SIZES:
            yield Transfer(
                level_of(group),
                group.library,
                each.kind,
                group.num_ranks,
                group.num_hosts,
                size,
                LINK_SECONDS + size / LINK_BYTES_PER_SECOND,
                9,
            )


if __name__ == "__main__":
    main()
