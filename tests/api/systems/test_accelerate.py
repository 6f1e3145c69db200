"""Accelerate's configuration, read by ``accelerate launch``, and its plugins built."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from exported_plans import BATCH, CASES, NUM_DEVICES, case, configured, written

from autoparallel.systems.accelerate import backend_of, to_supported

KINDS = {
    "one dp axis": "MULTI_GPU",
    "zero 1": "DEEPSPEED",
    "fsdp": "FSDP",
    "hsdp": "FSDP",
    "zero 1 within groups": "FSDP",
    "tp": "MULTI_GPU",
    "sp": "FSDP",
    "1f1b": "FSDP",
    "interleaved": "FSDP",
    "zero bubble": "FSDP",
    "zbv": "FSDP",
    "3d": "FSDP",
    "experts": "FSDP",
    "cp": "FSDP",
    "uneven stages": "FSDP",
    "some layers": "DEEPSPEED",
    "selective": "DEEPSPEED",
    "offload": "DEEPSPEED",
    "offloaded gradients": "DEEPSPEED",
    "offloaded parameters": "FSDP",
    "half gradients": "DEEPSPEED",
}
"""What trains each case; a pipeline becomes FSDP."""
NAMES = [pytest.param(name, marks=pytest.mark.slow if name == "experts" else ()) for name in CASES]
"""Experts need another model."""


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of its own, without settings of Accelerate."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))
    }
    monkeypatch.setattr(os, "environ", kept)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("no_settings")
def test_accelerate_launch_reads_it(name: str, tmp_path: Path) -> None:
    facts = written(case(name), "accelerate", tmp_path).facts
    path = str(tmp_path / "out" / "accelerate.yaml")
    config = load_config_from_file(path)
    assert config.distributed_type == KINDS[name]
    assert config.num_processes == NUM_DEVICES
    parsed = launch_command_parser().parse_args(["--config_file", path, "train.py"])
    arguments, _, _ = _validate_launch_command(parsed)
    assert arguments.mixed_precision == "bf16"
    degrees = facts["degrees"]
    if arguments.use_deepspeed:
        assert arguments.zero_stage == facts["zero"]
        assert arguments.gradient_accumulation_steps == facts["num_microbatches"]
        offload = "cpu" if name.startswith("offload") else "none"
        assert arguments.offload_optimizer_device == offload
        return
    os.environ.update(prepare_multi_gpu_env(arguments))
    if arguments.use_fsdp:
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward == (facts["zero"] == 3)
        assert plugin.activation_checkpointing == (facts["recompute"] != "none")
    if arguments.use_parallelism_config:
        sizes = ParallelismConfig()
        assert sizes.total_size == NUM_DEVICES
        assert (sizes.tp_size, sizes.cp_size) == (degrees["tp"], degrees["cp"])


@pytest.mark.parametrize("name", NAMES)
def test_the_script_is_told_its_batches(name: str, tmp_path: Path) -> None:
    wrote = written(case(name), "accelerate", tmp_path)
    degrees = wrote.facts["degrees"]
    ranks, count = degrees["dp"] * degrees["ep"], wrote.facts["num_microbatches"]
    rows = BATCH // ranks // count
    note = " ".join(wrote.report.split())
    assert f"{rows} × {count} × {ranks} data-parallel ranks = {BATCH} samples a step" in note


def test_fsdp_sums_gradients_after_every_micro_batch(tmp_path: Path) -> None:
    """Else each rank would hold whole gradients, which ZeRO 3 does not."""
    assert "sync_each_batch=True" in written(case("fsdp"), "accelerate", tmp_path).report


@pytest.mark.parametrize(
    ("choices", "backend"),
    [
        ({"dp": 8}, "ddp"),
        ({"dp": 8, "zero": 2}, "deepspeed"),
        ({"dp": 8, "zero": 3}, "fsdp"),
        ({"dp": 8, "zero": 3, "offload": "optimizer"}, "deepspeed"),
        ({"dp": 8, "zero": 3, "offload": "gradients"}, "deepspeed"),
        ({"dp": 8, "zero": 3, "offload": "parameters"}, "fsdp"),
        ({"dp": 4, "tp": 2}, "fsdp"),
        ({"tp": 8}, "tp"),
        ({}, "none"),
    ],
)
def test_what_trains_a_configuration(choices: dict[str, object], backend: str) -> None:
    assert backend_of(configured(**choices)) == backend
    assert backend_of(to_supported(configured(**choices))) == backend
