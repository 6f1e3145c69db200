"""Lengths of documents: a text file with the number of positions of one on each line.

In: a file, and a captured program. Out: the program, whose attention within packed documents is
priced as documents of one length. The documents fill sequences of L positions in the order of the
file; the end of a sequence cuts a document. A position is then in a document of
sum(l²) / sum(l) positions in the mean, and attention computes half of this number of pairs for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from autoparallel.passes.programs.program import Program
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.graph import Node
from autoparallel.planner.ops.attention_limits import DOCUMENT_LENGTH, is_packed


def with_lengths(program: Program, path: str | None) -> Program:
    """Return a program whose packed documents are priced by the lengths in the file ``path``; the
    program itself without a file.

    Raises UsageError AP379 for a file without lengths, and AP178 if the model packs no documents.
    """
    if path is None:
        return program
    lengths, graph = read_lengths(Path(path)), program.graph
    if not any(map(is_packed, graph)):
        raise UsageError(
            "AP178",
            "the model has no attention within packed documents",
            why="only masks that compare numbers of documents, as from position_ids that restart "
            "with each, are found",
            where=f"--lengths {path}",
            fix="leave --lengths out",
        )

    def priced(node: Node) -> Node:
        if not is_packed(node):
            return node
        positions = graph.spec(node.inputs[1]).shape[-2]
        mean = round(mean_length(lengths, positions))
        is_short = 2 * mean <= positions
        return replace(node, kwargs={**node.kwargs, DOCUMENT_LENGTH: mean}) if is_short else node

    return replace(program, graph=replace(graph, nodes=tuple(map(priced, graph))))


def mean_length(lengths: Iterable[int], positions: int) -> float:
    """Return the mean, over the positions of packed sequences, of the length of their document.

    >>> mean_length([2, 2, 4], 4), mean_length([6], 4)
    (3.0, 3.3333333333333335)
    """
    left, pairs, total = positions, 0, 0
    for length in lengths:
        while length:
            part = min(length, left)
            pairs, total = pairs + part * part, total + part
            length, left = length - part, (left - part) or positions
    return pairs / total


def read_lengths(path: Path) -> list[int]:
    """Read lengths, one positive integer on each line; empty lines and those that begin with # are
    left out. Raises UsageError AP379 for another line, and for a file without lengths."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _unread(path, str(error)) from error
    found = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        if not line.isdecimal() or not int(line):
            raise _unread(path, f"line {number} is {line[:40]!r}, not a number of positions")
        found.append(int(line))
    if not found:
        raise _unread(path, "it has no line with a number")
    return found


def _unread(path: Path, why: str) -> UsageError:
    return UsageError(
        "AP379",
        f"cannot read lengths from {path}",
        why=why,
        where=str(path),
        fix="a text file with the number of positions of one sequence on each line",
    )
