"""Float32 products in TF32: at the peak of the tensor cores where the device has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoparallel.cost_model.cluster.cluster import Cluster, ClusterError
from autoparallel.cost_model.cluster.cluster_file import (
    from_dict,
    load_cluster,
    to_dict,
)
from autoparallel.cost_model.cluster.presets import device_presets, find_preset
from autoparallel.cost_model.cluster.tf32 import FAMILIES, Tf32, has_tf32, with_tf32
from autoparallel.cost_model.ops.compute import least_seconds, rate


def of(name: str, choice: Tf32) -> Cluster:
    host = find_preset(name).host(1)
    return with_tf32(Cluster(name, (host,), host.link), FAMILIES[choice])


@pytest.mark.parametrize(
    ("name", "choice", "matmul", "conv"),
    [
        # NVIDIA's data sheets, dense: A100 19.5 and 156 TFLOP/s, H100 SXM 67 and 494.5.
        ("A100", "none", 19.5e12, 19.5e12),
        ("A100", "convolutions", 19.5e12, 156e12),
        ("A100", "all", 156e12, 156e12),
        ("H100", "none", 67e12, 67e12),
        ("H100", "convolutions", 67e12, 494.5e12),
        ("H100", "all", 494.5e12, 494.5e12),
        ("V100", "all", 15.7e12, 15.7e12),
        ("cpu", "all", 60e9, 60e9),
    ],
)
def test_a_product_runs_at_the_peak_of_the_format_it_is_multiplied_in(
    name: str, choice: Tf32, matmul: float, conv: float
) -> None:
    device = of(name, choice).device(0)
    for family, peak in (("matmul", matmul), ("conv", conv)):
        found = 1 / rate(device, family, "float32").seconds_per_flop
        assert found == pytest.approx(peak * device.efficiency[family])


def test_only_float32_products_are_in_tf32() -> None:
    without, everything = of("A100", "none").device(0), of("A100", "all").device(0)
    for dtype in ("bfloat16", "float16", "float64"):
        assert rate(everything, "matmul", dtype) == rate(without, "matmul", dtype)
    for family in ("attention", "norm", "elementwise", "copy"):
        assert rate(everything, family, "float32") == rate(without, family, "float32")


def test_a_device_of_which_nobody_said_computes_in_full_float32() -> None:
    device = find_preset("A100").device
    assert device.tf32 is None
    assert rate(device, "conv", "float32") == rate(of("A100", "none").device(0), "conv", "float32")
    assert device.speed == of("A100", "none").device(0).speed != of("A100", "all").device(0).speed


def test_no_preset_is_faster_in_tf32_than_half_of_its_bfloat16() -> None:
    devices = [preset.device for preset in device_presets().values()]
    known = {device.name for device in devices if has_tf32(device)}
    assert known == {each.name for each in devices if each.kind == "cuda"} - {
        "V100-16GB",
        "V100-32GB",
        "T4",
        "MI250X",
        "MI300X",
        "MI325X",
        "MI355X",
    }
    for device in devices:
        if device.name in known:
            peaks = device.peak_flops
            assert peaks["tfloat32"] == pytest.approx(peaks["bfloat16"] / 2, rel=0.02)
            assert peaks["tfloat32"] >= peaks["float32"]


def test_devices_that_work_together_are_in_tf32_where_all_are() -> None:
    a100, v100 = find_preset("A100").host(1), find_preset("V100").host(1)
    both = Cluster("both", (a100, v100), a100.link)
    assert both.slowest_device((0, 1)).tf32 is None
    found = with_tf32(both, ("conv",))
    assert [host.device.tf32 for host in found.hosts] == [("conv",), ()]
    slowest = found.slowest_device((0, 1))
    assert slowest.tf32 == ()
    assert 1 / rate(slowest, "conv", "float32").seconds_per_flop < 15.7e12


def test_what_is_in_tf32_survives_json_and_toml() -> None:
    for choice in FAMILIES:
        cluster = of("A100", choice)
        assert from_dict(to_dict(cluster)) == cluster
    unsaid = replace(of("A100", "all"), hosts=(find_preset("A100").host(1),))
    assert "tf32" not in to_dict(unsaid)["hosts"][0]["device"]
    assert from_dict(to_dict(unsaid)).device(0).tf32 is None


@pytest.mark.parametrize("value", ['"conv"', '["attention"]', "[1]"])
def test_a_cluster_file_with_other_families_is_refused(value: str) -> None:
    text = f'[[hosts]]\nnum_devices = 1\ndevice = {{ preset = "A100", tf32 = {value} }}'
    with pytest.raises(ClusterError, match="expected a list of conv and matmul"):
        load_cluster(text)


def test_the_least_time_of_flops_counts_each_family_at_its_own_peak() -> None:
    flops = {"matmul": 19.5e12, "conv": 156e12, "norm": 19.5e12}
    assert least_seconds(of("A100", "none"), flops, "float32") == pytest.approx(1 + 8 + 1)
    assert least_seconds(of("A100", "convolutions"), flops, "float32") == pytest.approx(1 + 1 + 1)
    assert least_seconds(of("A100", "all"), flops, "float32") == pytest.approx(1 / 8 + 1 + 1)
