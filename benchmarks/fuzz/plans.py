"""Random plans and ways of training, from a seed.

``Plan.parallel`` is the text of the option ``parallel``, None for the planner's own choice.
With ``--long`` plans also have what the search offers for long sequences and several hosts: modes
of recomputation that keep attention's results or move values to host memory, ways of attention
over split positions, and states that are sharded within groups of ranks.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace

from benchmarks.fuzz.draw import Model

SCHEDULES = ("1f1b", "gpipe", "zb-h1")

MICROBATCHES = re.compile(r",microbatches=\d+")
"""Batch norm takes its statistics from each micro-batch if micro-batches are asked for."""

LONG_MODES = ("attention", "attention-offloaded", "none-offloaded")
WAYS = ("gather", "ring", "ulysses")

TWO = ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "tp=2")
FOUR = (
    "dp=4",
    "dp=4,zero=1",
    "dp=4,zero=2",
    "dp=4,zero=3",
    "dp=2,tp=2",
    "dp=2,tp=2,zero=3",
    "tp=4",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan's text and how the model is trained by it."""

    parallel: str | None
    stepped: bool
    """Whether ``autoparallel.Step`` trains it; else a loop of backwards."""
    dtype: str
    optimizer: str
    max_norm: float | None
    accumulate: int
    allow: str | None = None
    """A way of attention that is allowed alone, over axes that split positions."""

    def __str__(self) -> str:
        way = "Step" if self.stepped else "loop"
        more = [f"allow={self.allow}"] if self.allow else []
        more += [f"max_norm={self.max_norm}"] if self.max_norm else []
        more += [f"accumulate={self.accumulate}"] if self.accumulate > 1 else []
        return ", ".join((f"parallel={self.parallel!r}", way, self.dtype, self.optimizer, *more))


def draw_plan(seed: int | str, model: Model, num_ranks: int) -> Plan:
    """Return the random plan of a seed for a model."""
    rng = random.Random(f"plan {seed} {num_ranks}")
    n = num_ranks
    simple = TWO if n == 2 else FOUR
    kind = rng.choices(("simple", "micro", "pipeline", "context", "own"), (5, 1.2, 2, 1, 1.5))[0]
    if kind == "context" and model.domain != "seq":
        kind = "pipeline"
    if kind == "micro" and not model.returns_loss:
        kind = "simple"
    parallel: str | None
    if kind == "simple":
        parallel = rng.choice(simple)
    elif kind == "micro":
        parallel = rng.choice(simple) + f",microbatches={rng.choice((2, 2, 4))}"
    elif kind == "context":
        parallel = rng.choice(
            ("cp=2", "cp=2,zero=3") if n == 2 else ("cp=2,dp=2", "cp=4", "cp=2,tp=2")
        )
    elif kind == "pipeline":
        ranks = ("pp=2",) if n == 2 else ("pp=2,dp=2", "pp=2,dp=2,zero=1", "pp=2,tp=2", "pp=4")
        parallel = f"{rng.choice(ranks)}" + rng.choice(("", ",microbatches=2", ",microbatches=4"))
        if rng.random() < 0.5:
            parallel += f",schedule={rng.choice(SCHEDULES)}"
    else:
        parallel = None
    if parallel is not None and "BatchNorm" in model.source():
        parallel = MICROBATCHES.sub("", parallel)
    if parallel is not None and rng.random() < 0.2:
        parallel += f",recompute={rng.choice(('full', 'selective'))}"
    stepped = kind == "pipeline" or rng.random() < 0.35
    dtype = rng.choices(("float64", "float32", "bfloat16"), (8, 1.5, 0.5))[0]
    optimizer = rng.choice(("sgd", "sgd", "adamw")) if dtype == "float64" else "sgd"
    max_norm = 0.5 if rng.random() < 0.2 else None
    accumulate = 2 if rng.random() < 0.15 else 1
    return Plan(parallel, stepped, dtype, optimizer, max_norm, accumulate)


def with_long(seed: int | str, plan: Plan) -> Plan:
    """Return the plan with random options for long sequences; every plan with ``cp`` has a way of
    attention. The planner's own choice stays as it is."""
    rng, parallel = random.Random(f"long {seed}"), plan.parallel
    if parallel is None:
        return plan
    if "recompute" not in parallel:
        parallel += f",recompute={rng.choice(LONG_MODES)}"
    if "dp=4" in parallel and "zero" in parallel:
        parallel += ",shard=2"
    allow = rng.choice(WAYS) if "cp=" in parallel else None
    return replace(plan, parallel=parallel, allow=allow)
