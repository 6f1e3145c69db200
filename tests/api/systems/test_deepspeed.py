"""DeepSpeed's configuration, read by DeepSpeed where it is installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exported_plans import BATCH, CASES, NUM_DEVICES, case, configured, written

from autoparallel.systems.deepspeed import config, to_supported

NAMES = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "optimizer",
    "zero_optimization",
    "bf16",
    "fp16",
    "communication_data_type",
    "data_types",
    "tensor_parallel",
    "expert_parallel",
    "zero_allow_untested_optimizer",
}
"""Sections of DeepSpeed 0.19, of those that may be written."""


def written_config(name: str, folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    facts = written(case(name), "deepspeed", folder).facts
    return json.loads((folder / "out" / "ds_config.json").read_text()), facts["degrees"]


@pytest.mark.parametrize(
    "name",
    [name for name in CASES if name != "experts"]
    + [pytest.param("experts", marks=pytest.mark.slow)],
)
def test_batches_multiply_over_data_parallel_ranks(name: str, tmp_path: Path) -> None:
    found, _ = written_config(name, tmp_path)
    assert set(found) <= NAMES
    dp = NUM_DEVICES // found.get("tensor_parallel", {}).get("autotp_size", 1)
    samples = found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"]
    assert samples * dp == found["train_batch_size"] == BATCH


@pytest.mark.parametrize(
    "name",
    [name for name in CASES if name != "experts"]
    + [pytest.param("experts", marks=pytest.mark.slow)],
)
def test_deepspeed_reads_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    module = pytest.importorskip("deepspeed.runtime.config", exc_type=ImportError)
    monkeypatch.setattr(module.dist, "get_rank", lambda *args: 0)
    found, degrees = written_config(name, tmp_path)

    class Ranks:
        def get_data_parallel_world_size(self) -> int:
            return degrees["dp"] * degrees["ep"]

    read = module.DeepSpeedConfig(found, mpu=Ranks())
    assert read.train_batch_size == BATCH
    assert read.zero_optimization_stage == found["zero_optimization"]["stage"]
    assert read.expert_parallel_config.autoep_size == degrees["ep"]
    assert max(1, read.tensor_parallel_config.autotp_size) == degrees["tp"]


@pytest.mark.parametrize(
    ("choices", "section", "value"),
    [
        ({"zero": 1}, "zero_optimization", {"stage": 1}),
        (
            {"zero": 0, "offload": "optimizer"},
            "zero_optimization",
            {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        ),
        (
            {"zero": 2, "offload": "gradients"},
            "zero_optimization",
            {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        ),
        (
            {"zero": 3, "offload": "parameters"},
            "zero_optimization",
            {
                "stage": 3,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "offload_param": {"device": "cpu", "pin_memory": True},
            },
        ),
        ({"precision": "fp16"}, "fp16", {"enabled": True, "loss_scale": 0}),
        ({"gradient_dtype": "compute"}, "data_types", {"grad_accum_dtype": "bf16"}),
        ({}, "data_types", {"grad_accum_dtype": "fp32"}),
        ({"optimizer": "sgd-momentum"}, "optimizer", {"type": "SGD", "params": {"momentum": 0.9}}),
        ({"optimizer": "sgd", "zero": 1}, "zero_allow_untested_optimizer", True),
        ({"optimizer": "adam"}, "optimizer", {"type": "Adam", "params": {"adam_w_mode": False}}),
    ],
)
def test_sections(choices: dict[str, Any], section: str, value: object) -> None:
    assert config(to_supported(configured(dp=8, **choices)), BATCH)[section] == value


def test_float32_has_no_section_of_half_precision() -> None:
    found = config(to_supported(replace(configured(dp=8), precision="fp32")), BATCH)
    assert not {"bf16", "fp16", "data_types"} & set(found)
