"""What a configuration changes in a stage's cost: attention run again, gathers hidden.

In: a stage's cost and the answer it came from. Out: the cost as the configuration has it.

Selective recomputation runs the core of attention again in the backward and keeps nothing of
it: the ops on values that count positions twice (scores), or attention as one op (Korthikanti
et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 5).
Gathering and scattering of ZeRO 2 and 3 goes block by block beside the compute of the other
blocks, which it slows down; the first block's is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...cost_model.stage_costs import Overlap
from ..graph import Block, Graph, Ref
from ..intra_op.intra_op import StageAnswer
from ..positions import Dims
from ..pricing.stage_cost import StageCost
from .stage_runs import LayersFirst


def attention_core(graph: Graph, block: Block, dims: Dims) -> frozenset[str]:
    """The nodes of a block that make or read a value with two dimensions of positions."""

    def is_square(ref: Ref) -> bool:
        batch = graph.batch_dims[ref.name][ref.index] if graph.batch_dims else None
        return len(dims.get(ref, frozenset()) - {batch}) >= 2

    return frozenset(
        name
        for name in block.nodes
        if graph[name].op.startswith("aten.scaled_dot_product_attention")
        or any(is_square(ref) for ref in graph[name].inputs)
        or any(is_square(Ref(name, index)) for index in range(len(graph[name].outputs)))
    )


def selective(cost: StageCost, run: LayersFirst, answer: StageAnswer, dims: Dims) -> StageCost:
    """The cost with the attention core of every layer run again in the backward."""
    if not run.num_layers:
        return cost
    model, kind = answer.figures.model, run.layer_kind
    graph, block = model.structure.graph, model.structure.blocks.kinds[kind]
    core = attention_core(graph, block, dims)
    tables, again = model.kind(kind), np.zeros(2)
    before = np.zeros(2)
    dropped: dict[tuple[str, int], None] = {}
    for position, choice in enumerate(answer.solution[kind]):
        decision = tables.decisions[position]
        before += decision.seconds[0, choice, [2, 9]]
        if core.isdisjoint(decision.members):
            continue
        again += decision.seconds[0, choice, [0, 8]]
        for name, num_bytes in tables.held(position, choice)[0]:
            if name.rsplit(":", 1)[0] in core:
                dropped[name, num_bytes] = None
    less = float(sum(size for _, size in dropped))
    seconds = cost.seconds._replace(
        backward_compute=cost.seconds.backward_compute + run.num_layers * float(again[0]),
        backward_issue=cost.seconds.backward_issue
        + run.num_layers * float(max(before + again) - max(before)),
    )
    memory = _moved(cost.memory_bytes, run.num_layers * less, less)
    kept = cost.activation_bytes - run.num_layers * less
    return replace(cost, seconds=seconds, memory_bytes=memory, activation_bytes=kept)


def _moved(memory: Mapping[str, float], less: float, again: float) -> Mapping[str, float]:
    return {
        **memory,
        "activations": memory["activations"] - less,
        "transient": memory["transient"] + again,
    }


def beside_compute(cost: StageCost, num_blocks: int, overlap: Overlap) -> StageCost:
    """The cost with the states' collectives beside the compute of the other blocks."""
    own = cost.seconds
    forward = _exposed(
        own.forward_states, own.forward_compute + own.forward_communication, num_blocks, overlap
    )
    backward = _exposed(
        own.backward_states, own.backward_compute + own.backward_communication, num_blocks, overlap
    )
    return replace(cost, seconds=own._replace(forward_states=forward, backward_states=backward))


def _exposed(states: float, compute: float, num_blocks: int, overlap: Overlap) -> float:
    """Seconds that collectives of ``states`` seconds add to a pass of ``compute`` seconds.

    The first block's are waited for. While the others run, compute goes at 1/slowdown: it
    either outlasts them, (slowdown − 1)/slowdown of their time longer, or ends before them.

    >>> _exposed(4.0, 12.0, 4, Overlap(1.5)), _exposed(4.0, 1.0, 4, Overlap(1.5))
    (2.0, 3.0)
    """
    first = states / num_blocks
    rest = states - first
    slowed = rest * (overlap.slowdown - 1) / overlap.slowdown
    return first + max(slowed, rest - compute)
