"""The Trainer's arguments, read by ``HfArgumentParser`` into ``TrainingArguments``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from exported_plans import BATCH, CASES, NUM_DEVICES, case, written


def read(arguments: dict[str, Any]) -> transformers.TrainingArguments:
    """As ``parse_json_file`` reads them, on this machine's CPU."""
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (found,) = parser.parse_dict({**arguments, "use_cpu": True})
    return found


@pytest.mark.parametrize(
    "name",
    [name for name in CASES if name != "experts"]
    + [pytest.param("experts", marks=pytest.mark.slow)],
)
def test_training_arguments_are_made_of_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrote = written(case(name), "transformers", tmp_path)
    arguments = json.loads((tmp_path / "out" / "training_arguments.json").read_text())
    facts = wrote.facts
    if "deepspeed" in arguments:
        section = arguments["deepspeed"]
        assert section["zero_optimization"]["stage"] == facts["zero"]
        assert section["train_batch_size"] == BATCH
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
        pytest.importorskip("deepspeed", exc_type=ImportError)
    found = read(arguments)
    degrees = facts["degrees"]
    ranks = NUM_DEVICES // (degrees["tp"] * degrees["cp"])
    samples = found.per_device_train_batch_size * found.gradient_accumulation_steps
    assert samples * ranks == BATCH
    assert found.bf16
    assert bool(found.fsdp) == ("fsdp" in arguments)
    if found.fsdp:
        assert found.fsdp_plugin_args["fsdp_version"] == 2
        assert found.fsdp_plugin_args["reshard_after_forward"] == (facts["zero"] == 3)
    several = degrees["tp"] * degrees["cp"] > 1 and degrees["dp"] * degrees["cp"] > 1
    several = several or facts["shard"] is not None
    assert ("accelerate.yaml" in wrote.files) == several
    assert wrote.start.startswith("accelerate launch" if several else "torchrun")


def test_fsdp_sums_gradients_after_every_micro_batch(tmp_path: Path) -> None:
    written(case("fsdp"), "transformers", tmp_path)
    found = read(json.loads((tmp_path / "out" / "training_arguments.json").read_text()))
    assert found.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}


@pytest.mark.parametrize(
    ("optimizer", "name", "settings"),
    [("sgd", "sgd", None), ("sgd-momentum", "sgd", "momentum=0.9"), ("adamw", "adamw_torch", None)],
)
def test_the_optimizer(optimizer: str, name: str, settings: str | None, tmp_path: Path) -> None:
    plan = case("one dp axis")
    plan = replace(plan, model=replace(plan.model, optimizer=optimizer))
    written(plan, "transformers", tmp_path)
    found = read(json.loads((tmp_path / "out" / "training_arguments.json").read_text()))
    assert (found.optim, found.optim_args) == (name, settings)


def test_recomputation_beside_ddp_is_the_models(tmp_path: Path) -> None:
    written(case("some layers"), "transformers", tmp_path)
    found = json.loads((tmp_path / "out" / "training_arguments.json").read_text())
    assert found["gradient_checkpointing"] is True
