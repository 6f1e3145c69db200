"""A batch of shorter sequences than planned, padded to the planned length.

In: the global batch, the same on every rank. Out: the batch as the plan has it, which gives the
same loss and gradients; or a refusal on every rank, before any of them has sent a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...planner.errors import UsageError
from ...planner.graph import Graph
from ...planner.padding import Padding, find_padding


class SequencePadding:
    """Pads the batches of one model; ``graph`` has the shapes of a micro-batch."""

    def __init__(
        self,
        graph: Graph,
        check: Callable[[int, Mapping[str, Padding]], None] = lambda length, paddings: None,
    ) -> None:
        """``check`` is called with the length of the first batch that is padded."""
        self._graph, self._check = graph, check
        self._is_checked = False
        self._found: tuple[int, Mapping[str, Padding]] | None = None

    @property
    def planned(self) -> int:
        """The planned length."""
        if self._found is None:
            self._found = find_padding(self._graph)
        return self._found[0]

    def length(self, batch: Mapping[str, Tensor]) -> int | None:
        """How many positions a batch has that is shorter than planned; None for others.

        Raises as a call does.
        """
        if not any(self._is_shorter(name, tensor) for name, tensor in batch.items()):
            return None
        if self._found is None:
            self._found = find_padding(self._graph)
        length, paddings = self._found
        sizes = {
            name: {batch[name].shape[dim] for dim in padding.dims}
            for name, padding in paddings.items()
            if name in batch and batch[name].dim() > max(padding.dims)
        }
        lengths = set().union(*sizes.values())
        if len(lengths) != 1 or max(lengths) > length:
            raise _uneven(sizes, length)
        given = lengths.pop()
        if not self._is_checked:
            self._check(given, paddings)
            self._is_checked = True
        return given

    def __call__(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The batch with sequences of the planned length.

        Raises PlanError AP560 where a padded batch would train another way than a shorter one,
        and UsageError AP130 where its inputs are of several lengths. A batch that has other
        shapes for another reason comes back as it is.
        """
        if self.length(batch) is None:
            return batch
        assert self._found is not None
        length, paddings = self._found
        return {
            name: padded(tensor, paddings[name], length) if name in paddings else tensor
            for name, tensor in batch.items()
        }

    def _is_shorter(self, name: str, tensor: Tensor) -> bool:
        """Whether a dimension has fewer entries than planned that counts no rows."""
        known = self._graph.by_name.get(name)
        if known is None or tensor.dim() != len(known.spec.shape):
            return False
        rows = self._graph.batch_dims.get(name, (None,))[0]
        return any(
            have < want
            for dim, (have, want) in enumerate(zip(tensor.shape, known.spec.shape, strict=True))
            if dim != rows
        )


def padded(tensor: Tensor, padding: Padding, length: int) -> Tensor:
    """``tensor`` with ``length`` entries along the dimensions of ``padding``."""
    for dim in padding.dims:
        shape = [*tensor.shape]
        shape[dim] = length - shape[dim]
        tensor = torch.cat([tensor, tensor.new_full(shape, padding.value)], dim)
    return tensor


def _uneven(sizes: Mapping[str, set[int]], length: int) -> UsageError:
    words = ", ".join(
        f"{name} {' and '.join(map(str, sorted(found)))}" for name, found in sorted(sizes.items())
    )
    return UsageError(
        "AP130",
        "the inputs of the batch have sequences of several lengths",
        why=f"{words}; the plan is for {length}",
        fix="pass all inputs with the same number of positions",
    )
