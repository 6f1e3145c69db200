"""Environments: this machine's, and which profile serves another one."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata

import pytest
import torch

from autoparallel.cost_model.profile.environment import (
    Environment,
    difference,
    environment_of,
    nearest,
)

H200 = Environment("NVIDIA H200", "550.54", "2.13.0+cu128", 0)
CPU = Environment("a CPU", "", "2.13.0+cpu", 4)


def test_this_cpu_says_its_torch_and_threads() -> None:
    here = environment_of("cpu")
    assert here.kind == "cpu"
    assert here.torch == torch.__version__
    assert here.threads == torch.get_num_threads()
    assert here.device
    assert environment_of("cpu", threads=3).threads == 3


def test_a_device_elsewhere_is_known_by_name_and_the_torch_installed_here() -> None:
    installed = metadata.version("torch")  # a build for CUDA may say no more here than its number
    assert environment_of("H200") == Environment("H200", "", installed, 0)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        (H200, ""),
        (replace(H200, torch="2.13.0"), ""),
        (replace(H200, torch="2.12.1"), "measured with torch 2.12.1, not 2.13.0+cu128"),
        (replace(H200, driver="535.1"), "measured with driver 535.1, not 550.54"),
        (replace(H200, device="NVIDIA H100"), "measured on NVIDIA H100, not NVIDIA H200"),
    ],
)
def test_what_differs_is_said(measured: Environment, message: str) -> None:
    assert difference(measured, H200) == message


def test_an_unknown_driver_is_no_difference() -> None:
    assert difference(H200, replace(H200, device="H200", driver="")) == ""


def test_the_nearest_environment_is_of_the_same_device_and_threads() -> None:
    old, older = replace(H200, torch="2.12.0"), replace(H200, torch="2.9.0")
    other_driver = replace(H200, driver="1")
    known = (older, old, other_driver, H200, CPU)
    assert nearest(known, H200) == H200
    assert nearest((older, old, other_driver, CPU), H200) == other_driver
    assert nearest((older, old, CPU), H200) == old
    assert nearest(known, environment_of("H200")) == H200
    assert nearest(known, environment_of("H100")) is None
    assert nearest(known, replace(CPU, threads=2)) is None
    assert nearest(known, replace(CPU, torch="2.11.0")) == CPU
