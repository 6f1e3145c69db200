"""The collectives on real processes equal what one process computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from processes import run_processes
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

from autoparallel.passes.ops.experts import Sending, Slices, sent_experts
from autoparallel.runtime.messages import device_queue
from autoparallel.runtime.messages.communicator import ProcessCommunicator
from autoparallel.runtime.messages.device_queue import HostCopy, HostQueue, Waitable


def _tensor(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 8, (4, 6, 2), generator=generator).to(dtype)


def _check(dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    communicator = ProcessCommunicator(mesh)
    rank = dist.get_rank()
    for axis in range(2):
        mine = rank // 2 if axis == 0 else rank % 2
        peers = (rank % 2, rank % 2 + 2) if axis == 0 else (rank // 2 * 2, rank // 2 * 2 + 1)
        parts = [_tensor(peer, dtype) for peer in peers]
        own = _tensor(rank, dtype)
        assert communicator.size(axis) == 2
        assert communicator.coordinate(axis) == mine
        for dim in range(3):
            gathered = communicator.all_gather(own, axis, dim)
            assert torch.equal(gathered, torch.cat(parts, dim))
            transposed = communicator.all_gather(own.transpose(0, 1), axis, dim)
            assert torch.equal(transposed, torch.cat([p.transpose(0, 1) for p in parts], dim))
            for other in range(3):
                exchanged = communicator.all_to_all(own, axis, dim, other)
                expected = torch.cat([part.chunk(2, dim)[mine] for part in parts], other)
                assert torch.equal(exchanged, expected)
            if dtype != torch.bool:
                scattered = communicator.reduce_scatter(own, axis, dim)
                assert torch.equal(scattered, (parts[0] + parts[1]).chunk(2, dim)[mine])
        assert torch.equal(communicator.swap(own, axis), parts[1 - mine])
        transposed = communicator.swap(own.transpose(0, 1), axis)
        assert torch.equal(transposed, parts[1 - mine].transpose(0, 1))
        maximum = communicator.all_reduce(own, axis, "max")
        assert torch.equal(maximum, torch.maximum(parts[0].long(), parts[1].long()).to(dtype))
        if dtype != torch.bool:
            assert torch.equal(communicator.all_reduce(own, axis), parts[0] + parts[1])
        else:  # Compared as bytes: 2 would be true, and not equal to true.
            either = communicator.all_reduce(own, axis).view(torch.uint8)
            assert torch.equal(either, (parts[0] | parts[1]).view(torch.uint8))
        assert torch.equal(own, _tensor(rank, dtype)), "a collective wrote into its input"


def _check_all() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool):
        _check(dtype)


def test_every_collective_equals_its_definition_on_each_axis_and_dimension() -> None:
    run_processes(4, _check_all)


def _check_swap_of_three() -> None:
    rank = dist.get_rank()
    communicator = ProcessCommunicator(init_device_mesh("cpu", (3,)))
    assert torch.equal(
        communicator.swap(_tensor(rank, torch.float64), 0), _tensor(2 - rank, torch.float64)
    )


def test_the_rank_in_the_middle_swaps_with_itself() -> None:
    run_processes(3, _check_swap_of_three)


LOG: list[str] = []


class Told:
    """The event of a copy that the host waits for."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        LOG.append("wait")


class BehindQueue(HostQueue):
    def to_host(self, tensor: torch.Tensor, work: Waitable | None) -> HostCopy | None:
        LOG.append("copy")
        return HostCopy(tensor.clone(), Told())


class Logged(TorchFunctionMode):
    """Logs where rows are put in order, and where the six numbers of rows are read."""

    CALLS: ClassVar = {
        (torch.Tensor.__getitem__, (8, 4)): "order",
        (torch.Tensor.tolist, (1, 6)): "read",
    }

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        shape = tuple(getattr(args[0], "shape", ())) if args else ()
        if (function, shape) in self.CALLS:
            LOG.append(self.CALLS[function, shape])
        return function(*args, **(kwargs or {}))


def _log_of_experts() -> list[str]:
    """Two experts on the first axis, each split over the second, 4 tokens of width 4 on a rank."""
    device_queue.QUEUES["cpu"] = BehindQueue  # type: ignore[index]
    device_queue.queue_of.cache_clear()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    rank: Any = SimpleNamespace(communicator=ProcessCommunicator(mesh))
    x, scores, up, down = (
        torch.randn(size, dtype=torch.float64).requires_grad_()
        for size in ((4, 4), (4, 2), (1, 6, 4), (1, 4, 6))
    )
    ids, text = torch.tensor([[0, 1]] * 4), '[["torch.relu", [{"at": 0}], {}]]'
    options: Any = {"activation": text, "transposed": False, "axes": (0,)}
    options |= {"slices": Slices((1,), (1,)), "sending": Sending((0,), (0,), (1,))}
    with Logged():
        made = sent_experts(rank, x, ids, scores, up, down, **options)
    LOG.append("backward")
    with Logged():
        made.sum().backward()
    return LOG


def test_the_host_waits_once_for_all_sizes_of_experts_after_rows_were_put_in_order() -> None:
    for log in run_processes(4, _log_of_experts):
        assert log == ["copy", "order", "wait", "read", "backward"]
