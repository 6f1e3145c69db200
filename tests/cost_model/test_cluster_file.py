"""Cluster files: presets, overrides, errors that name the key, and exact round trips."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.cost_model.cluster.cluster import Cluster, ClusterError, Device, Host, Link
from autoparallel.cost_model.cluster.cluster_file import (
    from_dict,
    load_cluster,
    to_dict,
)
from autoparallel.cost_model.cluster.figures import parse_bytes, parse_rate
from autoparallel.cost_model.cluster.presets import device_presets, find_link, find_preset
from autoparallel.cost_model.cluster.shorthand import parse_cluster, resolve_cluster
from autoparallel.cost_model.collectives.collectives import group_of

MIXED = """
name = "two kinds"
inter_link = "infiniband-ndr"

[[hosts]]
count = 2
num_devices = 8
device = "H100"

[[hosts]]
num_devices = 4
device = { preset = "A100-80GB", usable_memory_bytes = "70GB", efficiency = { matmul = 0.6 } }
link = { preset = "pcie4", bytes_per_second = "20GB/s" }
"""


def test_groups_of_hosts_with_presets_and_overrides() -> None:
    cluster = load_cluster(MIXED)
    assert cluster.name == "two kinds"
    assert cluster.num_devices == 20
    assert cluster.hosts[1] == parse_cluster("8xH100").hosts[0]
    a100, preset = cluster.device(19), find_preset("A100-80GB").device
    assert a100.usable_memory_bytes == 70_000_000_000
    assert a100.peak_flops == preset.peak_flops
    assert a100.efficiency == {**preset.efficiency, "matmul": 0.6}
    assert a100.sources["usable_memory_bytes"] == "cluster file: hosts[1].device"
    assert cluster.hosts[2].link.bytes_per_second == 20e9
    assert cluster.hosts[2].link.alpha_seconds == find_link("pcie4").alpha_seconds
    assert cluster.inter_link == find_link("infiniband-ndr")


def test_how_much_collectives_slow_compute_down() -> None:
    """As the file says, else 1.189 on a GPU; on a CPU compute stops."""
    device = load_cluster(
        '[[hosts]]\nnum_devices = 8\ndevice = { preset = "H100", slowdown = { all_gather = 1.25 } }'
    ).device(0)
    assert device.slowed_share("all_gather") == pytest.approx(0.2)
    assert device.slowed_share("all_reduce") == pytest.approx(1 - 1 / 1.189)
    assert parse_cluster("2xcpu").device(0).slowed_share("all_reduce") == 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [("all_gather = 0.9", "at least 1"), ("broadcast = 1.2", "unknown collective 'broadcast'")],
)
def test_a_wrong_slowdown_is_told(given: str, message: str) -> None:
    device = f'{{ preset = "H100", slowdown = {{ {given} }} }}'
    with pytest.raises(ClusterError, match=message):
        load_cluster(f"[[hosts]]\nnum_devices = 8\ndevice = {device}")


def test_links_and_name_default_to_the_usual_ones() -> None:
    cluster = load_cluster('hosts = [{count = 4, num_devices = 8, device = "A100-80GB"}]')
    assert cluster.hosts == parse_cluster("4x8xA100-80GB").hosts
    assert cluster.inter_link == parse_cluster("4x8xA100-80GB").inter_link
    assert cluster.name == "4x8xA100-80GB"


def test_a_device_of_ones_own() -> None:
    cluster = load_cluster(
        """
        [[hosts]]
        num_devices = 2
        device = { name = "mine", kind = "cuda", memory_bytes = "16GiB",
                   memory_bytes_per_second = 5e11, peak_flops = { float32 = 1e13 } }
        link = { name = "wire", alpha_seconds = 1e-6, bytes_per_second = "80Gbit/s" }
        """.replace(",\n", ", ")
    )
    device = cluster.device(0)
    assert device.memory_bytes == device.usable_memory_bytes == 2**34
    assert cluster.hosts[0].link.bytes_per_second == 10e9
    assert cluster.inter_link == cluster.hosts[0].link


HOST = '[[hosts]]\nnum_devices = 8\ndevice = "H100"\n'


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("hosts = [", "not valid TOML", "c.toml"),
        ("", "has no hosts", "c.toml: hosts"),
        ('name = "a\\nb"', r"'a\nb' contains control characters", "c.toml"),
        ("hosts = []", "has no hosts", "c.toml: hosts"),
        ("hosts = [3]", "expected a table", "c.toml: hosts[0]"),
        ("nodes = 3", "unknown key 'nodes'", "c.toml"),
        (HOST + "gpus = 3", "unknown key 'gpus'", "c.toml: hosts[0]"),
        ('[[hosts]]\ndevice = "H100"', "number of devices is missing", "c.toml: hosts[0]"),
        ("[[hosts]]\nnum_devices = 8", "no device", "c.toml: hosts[0]"),
        (HOST + "count = 0", "at least 1", "c.toml: hosts[0].count"),
        (HOST + "count = true", "whole number", "c.toml: hosts[0].count"),
        (HOST + 'link = "nvlink44"', "unknown link", "c.toml: hosts[0].link"),
        (
            HOST + 'link = { preset = "pcie4", bytes_per_second = -1 }',
            "at least 0",
            "c.toml: hosts[0].link.bytes_per_second",
        ),
        (
            HOST + 'link = { preset = "pcie4", bytes_per_second = "80GB" }',
            "not a rate",
            "c.toml: hosts[0].link.bytes_per_second",
        ),
        (HOST + 'link = { name = "w" }', "alpha_seconds is missing", "c.toml: hosts[0].link"),
        (
            '[[hosts]]\nnum_devices = 8\ndevice = { preset = "H10" }',
            "unknown device 'H10'",
            "c.toml: hosts[0].device.preset",
        ),
        (
            '[[hosts]]\nnum_devices = 8\ndevice = { preset = "H100", memory = 3 }',
            "unknown key 'memory'",
            "c.toml: hosts[0].device",
        ),
        (
            '[[hosts]]\nnum_devices = 8\ndevice = { preset = "H100", memory_bytes = "80" }',
            "not a quantity",
            "c.toml: hosts[0].device.memory_bytes",
        ),
        (
            '[[hosts]]\nnum_devices = 8\ndevice = { preset = "H100", peak_flops = { x = 0 } }',
            "more than 0",
            "c.toml: hosts[0].device.peak_flops.x",
        ),
        (HOST + "rack = 3", "expected a string", "c.toml: hosts[0].rack"),
        (HOST + 'rack = "a"\n' + HOST + 'rack = "b"', "between the racks", "c.toml: rack_link"),
        ('rack_link = "pcie4"\n' + HOST, "only one rack", "c.toml: rack_link"),
        (
            f'rack_link = "no wire"\n{HOST}rack = "a"\n{HOST}rack = "b"',
            "unknown link",
            "c.toml: rack_link",
        ),
    ],
)
def test_a_wrong_file_is_told_the_key(text: str, what: str, where: str) -> None:
    with pytest.raises(ClusterError) as raised:
        load_cluster(text, "c.toml")
    assert what in raised.value.what
    assert raised.value.where == where


texts = st.text(st.characters(exclude_categories=["C"]), max_size=12)
positive = st.floats(min_value=1e-9, max_value=1e18)
counts = st.integers(1, 2**50)
links = st.builds(
    Link, texts, st.floats(0, 1), positive, texts, st.floats(0, 1), st.floats(0, 1e15)
)
devices = st.builds(
    Device,
    texts,
    st.sampled_from(["cuda", "cpu"]),
    counts,
    counts,
    positive,
    st.dictionaries(texts, positive, min_size=1, max_size=3),
    st.dictionaries(texts, positive, max_size=3),
    st.floats(0, 1),
    st.dictionaries(texts, texts, max_size=3),
)
hosts = st.builds(Host, devices, st.integers(1, 16), links, st.sampled_from(["", "a", "b"]))


def made(name: str, groups: list[tuple[Host, int]], link: Link, rack_link: Link) -> Cluster:
    listed = tuple(host for host, count in groups for _ in range(count))
    several = len({host.rack for host in listed}) > 1
    return Cluster(name, listed, link, rack_link if several else None)


clusters = st.builds(
    made,
    texts,
    st.lists(st.tuples(hosts, st.integers(1, 3)), min_size=1, max_size=2),
    links,
    links,
)


@given(clusters)
def test_a_cluster_survives_json_exactly(cluster: Cluster) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(cluster)))) == cluster


@pytest.mark.parametrize("name", device_presets())
def test_every_preset_survives_its_table(name: str) -> None:
    cluster = parse_cluster(f"2x4x{name}")
    assert from_dict(to_dict(cluster)) == cluster


def test_sizes_are_decimal_or_binary_as_written() -> None:
    assert parse_bytes("80GB") == 80 * 10**9
    assert parse_bytes("80 GiB") == 80 * 2**30
    assert parse_bytes("512b") == 512
    assert parse_rate("400Gbit/s") == 50e9
    for text in ("80", "GB", "-1GB", "80GB/s", "8e3GB"):
        with pytest.raises(ValueError, match=r"quantity|rate"):
            parse_bytes(text)


def test_a_path_is_read_and_a_missing_one_named(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(MIXED)
    assert resolve_cluster(str(path)) == load_cluster(MIXED, str(path))
    with pytest.raises(ClusterError, match="cannot be read"):
        resolve_cluster(str(tmp_path / "none.toml"))
    with pytest.raises(ClusterError, match="is not a cluster"):
        resolve_cluster("nonsense")
    assert resolve_cluster("4x8xH100") == parse_cluster("4x8xH100")


RACKS = """
inter_link = "infiniband-ndr"
rack_link = { preset = "ethernet-100g", bytes_per_second = "5GB/s" }

[[hosts]]
count = 2
num_devices = 8
device = "H100"
rack = "north"

[[hosts]]
num_devices = 4
device = "A100"
rack = "south"
"""


def test_racks_are_joined_by_a_link_of_their_own() -> None:
    cluster = load_cluster(RACKS)
    assert cluster.link(0, 7) == find_link("nvlink4")
    assert cluster.link(0, 8) == find_link("infiniband-ndr")
    assert cluster.link(0, 16).bytes_per_second == cluster.link(19, 15).bytes_per_second == 5e9
    assert cluster.joins_hosts(cluster.link(0, 16))
    assert from_dict(to_dict(cluster)) == cluster


def test_a_group_over_racks_is_as_slow_as_the_link_between_them() -> None:
    cluster = load_cluster(RACKS)
    assert group_of(cluster, (0, 8)).inter == find_link("infiniband-ndr")
    assert group_of(cluster, (0, 8, 16)).inter.bytes_per_second == 5e9
    assert group_of(cluster, (8, 9)).num_hosts == 1


def test_hosts_are_joined_by_the_slowest_of_their_usual_links() -> None:
    text = HOST + '[[hosts]]\nnum_devices = 8\ndevice = "A100"'
    assert load_cluster(text).inter_link == find_link("infiniband-hdr")


BRIDGED = """
[[hosts]]
num_devices = 4
device = "A100-80GB-PCIe"
link = { preset = "nvlink3-bridge", num_links = 1 }
wires = [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
detour = "pcie4"
"""


def test_wires_as_rows_and_as_a_round_trip() -> None:
    cluster = load_cluster(BRIDGED)
    assert cluster.link(0, 1).name == "nvlink3-bridge"
    assert cluster.link(1, 2) == find_link("pcie4")
    assert group_of(cluster, range(4)).intra == find_link("pcie4")
    assert from_dict(json.loads(json.dumps(to_dict(cluster)))) == cluster


def test_wires_of_v100_hosts_by_default_by_name_and_with_a_switch() -> None:
    text = 'hosts = [{num_devices = 8, device = "V100-16GB"%s}]'
    usual = load_cluster(text % "")
    assert usual.hosts == parse_cluster("8xV100-16GB").hosts
    assert load_cluster(text % ', wires = "hybrid-cube-mesh"') == usual
    assert load_cluster(text % ', wires = "switch"').link(3, 4) == find_link("nvlink2")
    assert load_cluster(text % ', link = "nvlink2"').link(3, 4) == find_link("nvlink2")
    without = load_cluster(text % ", wires = []")
    assert from_dict(to_dict(without)) == without == load_cluster(text % ', wires = "switch"')
    assert load_cluster(text % ', detour = "pcie4"').link(3, 4) == find_link("pcie4")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('wires = "ring"', "unknown wires 'ring' .*hosts.0..wires.*hybrid-cube-mesh"),
        ("wires = 3", "expected rows of counts, or a name, found 3"),
        ("wires = [[0, -1], [-1, 0]]", "expected a number of links, found -1"),
        ("wires = [[0, 1], [1, 0]]", "symmetric 4 × 4 table"),
        ('detour = "pcie4"', "detour is set, but wires is not .*hosts.0..detour"),
        ('wires = "all-pairs-twice"', "'nvlink4' does not say how many links"),
    ],
)
def test_wrong_wires_name_their_key(line: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        load_cluster(f'[[hosts]]\nnum_devices = 4\ndevice = "H100"\n{line}\n')
