"""The cluster that a launcher's processes are, from what each says of its device."""

from __future__ import annotations

import pytest
import torch

from autoparallel.cost_model.cluster.cluster import ClusterError
from autoparallel.cost_model.cluster.detect import (
    ProcessDevice,
    joined_cluster,
    own_process_device,
)

H100 = "NVIDIA H100 80GB HBM3"


def gpus(
    host: str, count: int, name: str = H100, reaches: bool | None = True
) -> list[ProcessDevice]:
    return [ProcessDevice(host, "cuda", name, 85 * 10**9, reaches)] * count


def test_two_hosts_of_eight_are_sixteen_devices_joined_by_a_network() -> None:
    cluster = joined_cluster([*gpus("a", 8), *gpus("b", 8)])
    assert [host.num_devices for host in cluster.hosts] == [8, 8]
    assert cluster.link(0, 7).name == "nvlink4"
    assert cluster.link(7, 8).name == "infiniband-ndr"
    assert cluster.device(0).memory_bytes == 85 * 10**9


def test_two_processes_on_a_host_of_eight_are_two_devices() -> None:
    assert joined_cluster(gpus("a", 2)).num_devices == 2


def test_unlike_gpus_and_hosts_keep_the_order_of_ranks() -> None:
    mixed = [*gpus("a", 2), *gpus("a", 2, "NVIDIA H100 PCIe"), *gpus("b", 1, "NVIDIA H100 NVL")]
    cluster = joined_cluster(mixed)
    names = [cluster.device(rank).name for rank in range(5)]
    assert names == ["H100", "H100", "H100-PCIe", "H100-PCIe", "H100-NVL"]


def test_gpus_that_do_not_reach_each_other_are_joined_by_pcie() -> None:
    assert joined_cluster(gpus("a", 4, reaches=False)).link(0, 1).name == "pcie4"
    assert joined_cluster(gpus("a", 4, reaches=None)).link(0, 1).name == "nvlink4"


def test_ranks_that_alternate_between_hosts_are_refused() -> None:
    found = [*gpus("a", 1), *gpus("b", 1), *gpus("a", 1)]
    with pytest.raises(ClusterError, match="ranks of host 'a' are not consecutive"):
        joined_cluster(found)


def test_an_unknown_gpu_of_another_host_is_refused() -> None:
    with pytest.raises(ClusterError, match="there is no preset for 'Tesla M60' of host 'b'"):
        joined_cluster([*gpus("a", 1), *gpus("b", 1, "Tesla M60")])


def test_processes_without_gpus_share_their_hosts() -> None:
    one = joined_cluster([ProcessDevice("a", "cpu")] * 3)
    assert (one.name, one.num_devices) == ("cpu:3", 3)
    two = joined_cluster([ProcessDevice(host, "cpu") for host in "aab"])
    assert [host.num_devices for host in two.hosts] == [2, 1]
    assert two.link(1, 2).name == "ethernet-10g"


def test_a_process_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_process_device(None).kind == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"{H100} {index}")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: other != 2)
    facts = type("Facts", (), {"total_memory": 85})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    found = own_process_device(1)
    assert (found.name, found.memory_bytes, found.reaches_peers) == (f"{H100} 1", 85, False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert own_process_device(0).reaches_peers is None
