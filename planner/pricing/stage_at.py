"""Blocks that the user wants a stage to begin with: ``--stage-at layers.16``.

In: paths of modules or names of blocks. Out: positions of blocks; classes of runs without those
that have such a block inside.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..errors import UsageError
from ..graph import Block, Blocks, Graph
from ..requests.pins import nearest
from .run_classes import NO_RUN, RunClasses


def stage_begins(graph: Graph, blocks: Blocks, asked: Sequence[str]) -> tuple[int, ...]:
    """The positions of the blocks that begin stages, ascending.

    Raises ``UsageError`` AP181 for what is not there, AP183 for what begins inside a block.
    """
    return tuple(sorted({_position(graph, blocks, path) for path in asked}))


def _position(graph: Graph, blocks: Blocks, path: str) -> int:
    names = [block.name for block in blocks.blocks]
    if path in names:
        return names.index(path)
    for position, block in enumerate(blocks.blocks):
        inside = [name for name in block.nodes if _is_under(graph[name].module, path)]
        if inside and inside[0] == _first_of_a_module(graph, block):
            return position
        if inside:
            raise UsageError(
                "AP183", f"--stage-at {path}: no stage can start there",
                why=f"it is inside the block {block.name}, and blocks are not divided",
                fix=f"--stage-at {block.name}",
            )  # fmt: skip
    raise UsageError(
        "AP181", f"--stage-at {path}: no such block or module",
        fix=nearest(path, [*names, *(node.module for node in graph if node.module)])
        or f"the blocks are {', '.join(names[:8])}{' …' if names[8:] else ''}",
    )  # fmt: skip


def _is_under(module: str, path: str) -> bool:
    return module == path or module.startswith(f"{path}.")


def _first_of_a_module(graph: Graph, block: Block) -> str:
    """The first op of a block that a submodule makes; ops of the model itself come before."""
    own = [name for name in block.nodes if graph[name].module]
    return (own or list(block.nodes))[0]


def without_inner(classes: RunClasses, begins: Collection[int]) -> RunClasses:
    """The classes without the runs that have one of these blocks after their first."""
    if not begins:
        return classes
    numbers = classes.numbers.copy()
    for position in begins:
        numbers[:position, position + 1 :] = NO_RUN
    return replace(classes, numbers=numbers)
