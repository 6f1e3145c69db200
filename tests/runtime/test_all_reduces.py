"""All-reduces of gradients over messages: right sums, the same bits on every rank, in order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from marks import slow
from processes import run_processes
from torch.distributed.device_mesh import DeviceMesh

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.collectives.algorithms import ALGORITHMS, find_table
from autoparallel.runtime.messages.all_reduces import AllReduces, TableMessages, TaskThread
from autoparallel.runtime.messages.groups import gloo_group_beside
from autoparallel.runtime.update.gradients import Bucket

SIZES = (1, 5, 1000, 4097)


def _summed(layouts: list[tuple[int, ...]]) -> list[bytes]:
    """The bits of this rank's results of every algorithm, after a comparison with the true sums."""
    found = []
    rank, n = dist.get_rank(), dist.get_world_size()
    for hosts in layouts:
        for name in ALGORITHMS["all_reduce"]:
            for pieces in (1, 3) if name == "tree" else (1,):
                table = find_table("all_reduce", name, hosts, num_pieces=pieces)
                for size in SIZES if table is not None else ():
                    assert table is not None
                    parts = [
                        torch.randn(size, generator=torch.Generator().manual_seed(7 * size + r))
                        for r in range(n)
                    ]
                    expected = sum(part.double() for part in parts)
                    own = parts[rank].clone()
                    group = dist.group.WORLD
                    assert group is not None
                    reduce = TableMessages(table, size, group)
                    reduce(own)
                    torch.testing.assert_close(own.double(), expected, rtol=0, atol=1e-5)
                    found.append(own.numpy().tobytes())
                    own = parts[rank].clone()  # once more, in memory that was used
                    reduce(own)
                    assert own.numpy().tobytes() == found[-1]
    return found


@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [(2, [(2,), (1, 1)]), (3, [(3,), (2, 1)]), slow(4, [(4,), (2, 2), (1, 3)])],
)
def test_every_algorithm_leaves_the_same_bits_on_every_rank(
    num_ranks: int, layouts: list[tuple[int, ...]]
) -> None:
    first, *others = run_processes(num_ranks, _summed, layouts)
    assert len(first) >= 5 * len(SIZES)
    assert all(other == first for other in others)


def _in_turn() -> list[float]:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    across, along = mesh.get_group(0), mesh.get_group(1)
    reduces = AllReduces([across, along], parse_cluster("cpu:4"))
    rank = dist.get_rank()
    tensors = [torch.full((3,), float(rank + 10 * number)) for number in range(4)]
    works = [
        reduces.start("library", tensors[0], (across,)),
        reduces.start("tree", tensors[1], (across, along)),
        reduces.start("ring", tensors[2], (along,)),
        reduces.start("library", tensors[3], (along, across)),
    ]
    works[-1].wait()  # those before it are done then
    return [float(tensor[2]) for tensor in tensors]


def test_sums_run_in_the_order_in_which_they_are_started_over_the_groups_of_the_mesh() -> None:
    """Ranks 0 to 3 are 2 x 2: 0 and 2 differ on the first axis, 0 and 1 on the second."""
    for rank, found in enumerate(run_processes(4, _in_turn)):
        across, along = (0 + 2, 1 + 3), (0 + 1, 2 + 3)
        assert found == [
            across[rank % 2],
            6 + 40,
            along[rank // 2] + 40,
            6 + 120,
        ]


def _over_hosts() -> list[float]:
    everybody = dist.group.WORLD
    assert everybody is not None
    reduces = AllReduces([everybody], parse_cluster("2x2xH100"))
    tensors = [torch.full((5,), 2.0 ** dist.get_rank()) for _ in range(3)]
    names = ("hierarchical", "hierarchical_doubling", "tree")
    for name, tensor in zip(names, tensors, strict=True):
        reduces.start(name, tensor, (everybody,)).wait()
    return [float(tensor[4]) for tensor in tensors]


def test_algorithms_over_hosts_take_the_hosts_of_the_cluster() -> None:
    assert run_processes(4, _over_hosts) == [[15.0] * 3] * 4


def test_what_a_sum_raises_is_raised_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise ValueError("a peer is gone")

    lane, ran = TaskThread(), []
    failing, after = lane.submit(fail), lane.submit(lambda: ran.append(1))
    with pytest.raises(ValueError, match="a peer is gone"):
        failing.wait()
    after.wait()
    assert ran == [1]


def _beside_in_different_numbers_of_groups() -> float:
    rank = dist.get_rank()
    dist.new_group([0, 1])
    group = dist.new_group([1, 2])
    if rank == 0:
        return 3.0
    assert isinstance(group, dist.ProcessGroup)
    value = torch.tensor([float(rank)])
    for _ in range(2):  # a second one is another group
        beside = gloo_group_beside(group)
    beside.allreduce([value]).wait()
    return value.item()


def test_ranks_that_are_in_different_numbers_of_groups_make_one_together() -> None:
    """Rank 1 is in a group that rank 2 is not in, as ranks of earlier plans are."""
    assert run_processes(3, _beside_in_different_numbers_of_groups) == [3.0, 3.0, 3.0]


def test_gradients_are_placed_in_their_bucket_and_missing_ones_are_zero() -> None:
    slots = {"missing": torch.ones(2), "elsewhere": torch.ones(2)}
    missing = SimpleNamespace(name="missing", gradient=None)
    elsewhere = SimpleNamespace(name="elsewhere", gradient=torch.full((2,), 3.0))
    Bucket.place(SimpleNamespace(slots=slots), [missing, elsewhere])
    assert slots["missing"].tolist() == [0.0, 0.0]
    assert slots["elsewhere"].tolist() == [3.0, 3.0]
    assert elsewhere.gradient.data_ptr() == slots["elsewhere"].data_ptr()
