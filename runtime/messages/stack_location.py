"""In which block and collective a thread is, read from its stack when somebody asks.

In: the thread's innermost frame. Out: words such as ``in block layers.1, all_gather over tp``, or
none. Nothing is told while training goes on, so it costs nothing; but in a backward, where autograd
calls no block, each block says when its backward begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch.distributed import _functional_collectives, distributed_c10d

from .communicator import ProcessCommunicator

_COLLECTIVE_FILES = (distributed_c10d.__file__, _functional_collectives.__file__)


class BackwardPosition:
    """The block whose backward autograd has begun last, of one stage."""

    def __init__(self) -> None:
        self.block = ""


def whereabouts(frame: FrameType | None) -> str:
    """The block and the collective that a thread is in; "" where it is in neither.

    The innermost of each counts; the collective by the name that the outermost caller of
    ``torch.distributed`` calls it by, and with the mesh axis where it is a stage's.
    """
    block = collective = ""
    is_backward = False
    for each in _outwards(frame):
        owner, name = each.f_locals.get("self"), each.f_code.co_name
        if each.f_code.co_filename in _COLLECTIVE_FILES and not name.startswith("_"):
            collective = name
        elif isinstance(owner, ProcessCommunicator):
            axis = each.f_locals.get("axis")
            names = owner.device_mesh.mesh_dim_names or ()
            on = f" over {names[axis]}" if isinstance(axis, int) and axis < len(names) else ""
            collective = f"{name}{on}"
        elif name in _SHARDED and type(owner).__name__ == "FSDPParamGroup":
            collective, block = collective or _SHARDED[name], block or _block_of(owner)
        block = block or getattr(owner, "block_name", "")
        position = getattr(getattr(owner, "stage", None), "backward_position", None)
        if name == "_run_backward" and position is not None:
            is_backward = True
            block = block or position.block
    way = "the backward of block" if is_backward else "block"
    return ", ".join(part for part in (f"in {way} {block}" if block else "", collective) if part)


_SHARDED = {
    "wait_for_unshard": "all-gather of its parameters",
    "unshard": "all-gather of its parameters",
    "post_backward": "reduce-scatter of its gradients",
}


def _block_of(group: Any) -> str:
    """The blocks whose parameters ``fully_shard`` keeps in a group."""
    names = (getattr(module, "block_name", "") for module in group.modules)
    return ", ".join(name for name in names if name)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
