"""The runs of blocks that hand-written stages are: so many layers, with or without the ends.

In: a graph's structure, how many layers each stage has. Out: one ``Run`` per stage. A graph
captured with few layers stands for a deeper one of the same layers: a run that needs more of
them than there are repeats an inner one, whose edges are those of every inner layer. So the
price of a stage grows with its layers exactly as that of the deeper model's stage does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from ..errors import UsageError
from ..pricing.structure import Run, Structure
from ..requests.pins import plain_kind

FEWEST_LAYERS = 4
"""Layers of which a captured graph can stand for any deeper one, at every place of a stage."""


@dataclass(frozen=True)
class Layers:
    """Where the repeated blocks of a graph are: ``start`` to ``stop`` (exclusive)."""

    start: int
    stop: int
    kind: str

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class LayersFirst(Run):
    """A run whose recomputed blocks are its layers; ``layer_kind`` says which they are."""

    layer_kind: str = ""

    @cached_property
    def recompute_order(self) -> tuple[int, ...]:
        is_layer = [plain_kind(kind) == self.layer_kind for kind in self.kinds]
        layers = [offset for offset, found in enumerate(is_layer) if found]
        return (*layers, *(offset for offset, found in enumerate(is_layer) if not found))

    @property
    def num_layers(self) -> int:
        return sum(plain_kind(kind) == self.layer_kind for kind in self.kinds)


def find_layers(structure: Structure) -> Layers:
    """The longest run of blocks that are equal but for what is pinned in them."""
    kinds = [plain_kind(block.kind) for block in structure.blocks.blocks]
    kind = Counter(kinds).most_common(1)[0][0]
    start = best = position = 0
    while position < len(kinds):
        end = position
        while end < len(kinds) and kinds[end] == kind:
            end += 1
        if end - position > best:
            start, best = position, end - position
        position = max(end, position + 1)
    return Layers(start, start + best, kind)


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage; what is left over goes to the inner stages, then to the first.

    >>> even_layers(8, 4), even_layers(10, 4), even_layers(3, 4)
    ((2, 2, 2, 2), (2, 3, 3, 2), (1, 1, 1, 0))
    """
    each, left = divmod(num_layers, num_stages)
    inner = [*range(1, num_stages - 1), 0, num_stages - 1]
    if each == 0:
        inner = list(range(num_stages))
    more = set(inner[:left])
    return tuple(each + (stage in more) for stage in range(num_stages))


def stage_runs(structure: Structure, layers_of_stage: Sequence[int]) -> tuple[LayersFirst, ...]:
    """A run per stage: the first has what precedes the layers, the last what follows them.

    The layers must be those of the graph, or it must have ``FEWEST_LAYERS`` and stand for
    more. Raises ``UsageError`` AP128 otherwise.
    """
    layers = find_layers(structure)
    wanted = sum(layers_of_stage)
    if wanted != layers.count and (wanted < layers.count or layers.count < FEWEST_LAYERS):
        raise UsageError(
            "AP128",
            f"the stages have {wanted} layers, but the model has {layers.count}",
            fix=f"stages with {layers.count} layers in total",
        )
    last = len(layers_of_stage) - 1
    is_deeper = wanted > layers.count
    found, done = [], 0
    for stage, count in enumerate(layers_of_stage):
        ends = (stage == 0, stage == last)
        start = layers.start + done
        if is_deeper:
            found.append(_deeper(structure, layers, ends, count))
        else:
            found.append(_between(structure, layers, ends, start, start + count))
        done += count
    return tuple(found)


def _between(
    structure: Structure, layers: Layers, ends: tuple[bool, bool], start: int, stop: int
) -> LayersFirst:
    first, last = ends
    run = structure.run(0 if first else start, len(structure.blocks.blocks) if last else stop)
    return _layers_first(structure, run, layers.kind, ())


def _deeper(
    structure: Structure, layers: Layers, ends: tuple[bool, bool], count: int
) -> LayersFirst:
    """A stage of ``count`` layers of a deeper model, from the few layers that there are."""
    first, last = ends
    if first and last:
        start, stop = layers.start, layers.stop
    elif first:
        start, stop = layers.start, layers.start + min(count, layers.count - 1)
    elif last:
        start, stop = layers.stop - min(count, layers.count - 1), layers.stop
    else:
        start, stop = layers.start + 1, layers.start + 1 + min(count, layers.count - 2)
    begin = 0 if first else start
    run = structure.run(begin, len(structure.blocks.blocks) if last else stop)
    more = count - (stop - start)
    inner = start + 1 - begin
    return _layers_first(structure, run, layers.kind, (inner,) * more)


def _layers_first(
    structure: Structure, run: Run, kind: str, repeats: tuple[int, ...]
) -> LayersFirst:
    """``run`` with the blocks at ``repeats`` (all one offset) once more each, numbered anew."""
    values = {item.name: getattr(run, item.name) for item in fields(Run) if item.init}
    if repeats:
        at = repeats[0] + 1
        kinds, edges = run.kinds, run.edges_of
        values["kinds"] = (*kinds[:at], *(kinds[i] for i in repeats), *kinds[at:])
        values["edges_of"] = (*edges[:at], *(edges[i] for i in repeats), *edges[at:])
        values["stop"] = run.stop + len(repeats)
    values["_weights"] = {}
    found = LayersFirst(**values, layer_kind=kind)
    numbers = structure._numbers
    key = numbers.setdefault(("key", found.full_key), len(numbers))
    family = numbers.setdefault(("family", found.full_family), len(numbers))
    return LayersFirst(**{**values, "_weights": {}, "key": key, "family": family}, layer_kind=kind)
