"""Where the ranks of a launch meet: at a file, with no port open beyond the loopback interface."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.runtime.launch.launch import launch
from autoparallel.runtime.launch.membership import join, join_as
from autoparallel.runtime.launch.process import Worker, agree_on_name, current_worker
from autoparallel.runtime.messages.shared_objects import gather_values

ALONE = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}


def uses_groups(worker: Worker) -> dict[str, Any]:
    """What listens in every rank after groups and a mesh were made and used."""
    join_as(worker, parse_cluster("cpu:4"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    value = torch.full((), 1.0 + worker.rank)
    dist.all_reduce(value, group=mesh["tp"].get_group())
    half = [worker.rank % 2, worker.rank % 2 + 2]
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    dist.all_reduce(value, group=groups[worker.rank % 2])
    listening = [
        tuple(each.laddr)
        for each in psutil.Process().net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    ]
    store = dist.distributed_c10d._get_default_store()
    while not isinstance(store, dist.FileStore):
        store = store.underlying_store
    path = store.path
    own = {
        "sum": value.item(),
        "half": half,
        "listening": listening,
        "store": type(store).__name__,
        "mode": Path(path).parent.stat().st_mode & 0o777,
    }
    ranks = gather_values(own)
    return {"ranks": ranks}


def test_local_ranks_listen_on_the_loopback_interface_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An outer address would let others end the run, or send it objects to unpickle."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    found = launch("test_meeting:uses_groups", {}, num_processes=4, environment=ALONE)["ranks"]
    assert [rank["sum"] for rank in found] == [10.0] * 4
    assert {rank["store"] for rank in found} == {"FileStore"}
    assert {rank["mode"] for rank in found} == {0o700}
    addresses = [address for rank in found for address, _ in rank["listening"]]
    assert addresses  # gloo's own
    assert set(addresses) <= {"127.0.0.1", "::1"}


def store_of_nccl(worker: Worker) -> str:
    """How the group of GPUs is asked for, whose communicator's name goes through the store."""
    asked: dict[str, Any] = {}
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    dist.init_process_group = lambda backend, **how: asked.update(how, backend=backend)
    dist.all_reduce = lambda tensor: None
    zeros = torch.zeros
    torch.zeros = lambda *size, device: zeros(*size)
    join("cuda", 0, 100.0, worker.meet)
    assert asked["timeout"] == timedelta(seconds=160)
    asked["store"].set("name", "of a communicator")
    same = dist.FileStore(asked["store"].path, 1)
    return f"{asked['backend']} {asked['rank']}/{asked['world_size']} {same.get('name').decode()}"


def test_the_group_of_gpus_meets_at_the_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    found = launch("test_meeting:store_of_nccl", {}, num_processes=1, environment=ALONE)
    assert found == "nccl 0/1 of a communicator"


def test_ranks_agree_on_a_name_whatever_earlier_ones_have_left() -> None:
    """As after a restart: tokens, answers and addresses of processes that have ended lie there."""
    store = dist.HashStore()
    names = []
    for _ in range(3):
        with ThreadPoolExecutor(4) as ranks:
            found = set(ranks.map(partial(agree_on_name, store), range(4), [4] * 4))
        assert len(found) == 1
        names += found
    assert len(set(names)) == 3


def test_a_process_without_an_agent_meets_where_the_environment_says() -> None:
    environment: Mapping[str, str] = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert current_worker(environment, 10.0).meet() == {}
