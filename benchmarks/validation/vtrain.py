"""The rows of vTrain's validation data: Megatron-DeepSpeed's GPT in fp16 on A100, 1F1B.

In: a row of GPUs, batch, shape, degrees and the iteration's time. Out: a ``Run``.

Rows of one node are composed of one traced layer: wherever hidden size, tensor and data
parallelism and micro-batch are equal, the time is linear in micro-batches and in layers to
the last digit. Their slopes are one forward and one backward, nothing recomputed; a rank has
vocabulary / tp words, rounded down and not padded; the tied weights are not summed between
stages. Rows of several nodes are whole iterations, with every layer recomputed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf

from autoparallel.cost_model.cluster.cluster import Cluster
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.costs.basis import CostAssumptions
from autoparallel.planner.plan import Recompute

from .clusters import make_cluster
from .models import Kernels, Shape
from .sources import VTRAIN_MULTI, VTRAIN_SINGLE, Source
from .tables import Row, Run, check_degrees, half_policy, measured, microbatches, number, padded

VOCAB = 50257
"""GPT-2's; not in the data, but the speed of the head's products shows it (see the README)."""

SOFTMAX_BATCH = 4
"""Megatron-LM's softmax kernel takes rows of heads in multiples of this, or does not run."""

CELLS = {
    "gpus": "GPUs",
    "batch": "global batch",
    "rows": "micro batch",
    "hidden": "hidden size",
    "heads": "attention heads",
    "layers": "layers",
    "seq": "sequence length",
    "tp": "tensor parallelism",
    "dp": "data parallelism",
    "pp": "pipeline parallelism",
}
GROUP = ("gpus", "batch", "hidden", "heads", "layers", "seq")


@cache
def cluster_of(source: Source, num_devices: int) -> Cluster:
    """A100-80GB with NVLink 3; hosts of 8 with 4x 200 Gb/s, as vTrain's paper says."""
    hosts = max(1, -(-num_devices // 8))
    text = "NVLink3; 4x200Gb/s HDR IB per node"
    return source.seen(
        make_cluster("A100-80GB-SXM4", num_devices, -(-num_devices // hosts), text)[0]
    )


def single_node(row: Row, line: int) -> Run:
    """A row of one node."""
    n = {key: number(row, name) for key, name in CELLS.items()}
    shape = replace(_shape(n), vocab=VOCAB // n["tp"] * n["tp"])
    return _run(row, line, shape, VTRAIN_SINGLE, "none")


def multi_node(row: Row, line: int) -> Run:
    """A row of several nodes."""
    n = {key: number(row, name) for key, name in CELLS.items()}
    shape = replace(_shape(n), vocab=padded(VOCAB, n["tp"]), tied=True)
    return _run(row, line, shape, VTRAIN_MULTI, "full")


def _shape(n: dict[str, int]) -> Shape:
    fits = n["rows"] * n["heads"] // n["tp"] % SOFTMAX_BATCH == 0
    kernels: Kernels = "unfused" if fits else "apart"
    return Shape(
        "gpt",
        n["hidden"],
        n["heads"],
        n["heads"],
        4 * n["hidden"],
        n["layers"],
        n["seq"],
        VOCAB,
        kernels,
        0.1,
    )


def _run(row: Row, line: int, shape: Shape, source: Source, recompute: Recompute) -> Run:
    n = {key: number(row, name) for key, name in CELLS.items()}
    num_microbatches = microbatches(n["batch"], n["dp"], n["rows"])
    program = source.program
    if num_microbatches == 1:
        program = replace(program, accumulation=0.0)
    configuration = Configuration(
        dp=n["dp"],
        tp=n["tp"],
        pp=n["pp"],
        recompute=recompute,
        microbatch_size=n["rows"] * n["dp"],
        num_microbatches=num_microbatches,
        sequence_parallel=False,
        precision="bf16",
        recomputes_ends=False,
    )
    check_degrees(shape, configuration, n["gpus"])
    seconds = measured(row.get("iteration time (ms)", ""), "iteration time") / 1e3
    return Run(
        f"line {line}",
        source.name,
        shape,
        cluster_of(source, n["gpus"]),
        configuration,
        seconds,
        group="/".join(str(n[key]) for key in GROUP),
        assumed=("vocab",),
        program=program,
        assumptions=CostAssumptions(half_policy(2), slowdown=inf),
    )
