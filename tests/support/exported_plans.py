"""Plans of known configurations, and writing them for other systems without pricing them."""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers

import autoparallel
from autoparallel.analysis.plan_model import PlanModel, load_plan_model
from autoparallel.exporting.plans import WRITERS, WrittenPlan, export_plan
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer
from autoparallel.planner.plan import Plan
from autoparallel.planning.plan_files import save_plan
from autoparallel.systems.system import System

SYSTEMS = ("torchtitan", "megatron", "deepspeed", "accelerate", "transformers")
BATCH, SEQ, NUM_DEVICES, NUM_LAYERS = 16, 64, 8, 8


def system_of(name: str) -> System:
    """The system that writes a format of plans."""
    module, _, own = WRITERS[name].partition(":")
    found: System = getattr(importlib.import_module(module), own)
    return found


def save_decoder(folder: Path, kind: str) -> Path:
    """A configuration of eight small layers: "llama" or "mixtral" with four experts."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    if kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, num_local_experts=4, sliding_window=None)
        config.architectures = ["MixtralForCausalLM"]
    else:
        config = transformers.LlamaConfig(**sizes)
        config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


@functools.cache
def plans(kind: str = "llama") -> PlanModel:
    """What prices configurations of a decoder on 8 H100s."""
    folder = save_decoder(Path(tempfile.mkdtemp()) / kind, kind)
    like = autoparallel.plan(
        f"hf:{folder}",
        cluster="8xH100",
        global_batch=BATCH,
        seq=SEQ,
        precision="bf16",
        parallel="dp=8,zero=1,recompute=none,microbatches=2",
    )
    return load_plan_model(like, str(folder / "plan.json"))


def configured(kind: str = "llama", **choices: Any) -> Configuration:
    """A configuration with the batch of the tests; ``rows`` per data-parallel rank."""
    rows = choices.pop("rows", 1)
    size = rows * choices.get("dp", 1)
    fields = {
        "precision": "bf16",
        "microbatch_size": size,
        "num_microbatches": BATCH // size,
        "recomputes_ends": False,
        **choices,
    }
    return Configuration(**fields)


@functools.cache
def pricer(kind: str) -> ConfigurationPricer:
    made = plans(kind)
    return ConfigurationPricer(made.program.graph, made.program.blocks, made.basis)


def plan_of(configuration: Configuration, kind: str = "llama") -> Plan:
    """The plan of a configuration, with the model and the predictions of ``plans``."""
    like = plans(kind).plan
    made = pricer(kind).plan(like.cluster, configuration)
    return replace(made, model=like.model, prediction=like.prediction)


CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "one dp axis": ("llama", {"dp": 8}),
    "zero 1": ("llama", {"dp": 8, "zero": 1}),
    "fsdp": ("llama", {"dp": 8, "zero": 3, "recompute": "full"}),
    "hsdp": ("llama", {"dp": 8, "zero": 3, "shard": 4}),
    "zero 1 within groups": ("llama", {"dp": 4, "pp": 2, "zero": 1, "shard": 2, "layers": (4, 4)}),
    "tp": ("llama", {"tp": 8, "sequence_parallel": False}),
    "sp": ("llama", {"dp": 2, "tp": 4, "zero": 1, "sequence_parallel": True}),
    "1f1b": ("llama", {"dp": 2, "pp": 4, "zero": 1, "layers": (2, 2, 2, 2)}),
    "interleaved": (
        "llama",
        {"dp": 4, "pp": 2, "schedule": "interleaved", "num_chunks": 2, "layers": (2, 2, 2, 2)},
    ),
    "zero bubble": ("llama", {"dp": 2, "pp": 4, "schedule": "zb-h2", "layers": (2, 2, 2, 2)}),
    "zbv": (
        "llama",
        {"dp": 4, "pp": 2, "schedule": "zbv", "num_chunks": 2, "layers": (2, 2, 2, 2)},
    ),
    "3d": (
        "llama",
        {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "layers": (4, 4), "sequence_parallel": True},
    ),
    "experts": ("mixtral", {"dp": 8, "ep": 4}),
    "cp": ("llama", {"dp": 2, "cp": 4, "zero": 3}),
    "uneven stages": ("llama", {"dp": 2, "pp": 4, "zero": 1, "layers": (3, 2, 2, 1)}),
    "some layers": ("llama", {"dp": 8, "recompute": "full", "recompute_share": 0.5, "zero": 1}),
    "selective": ("llama", {"dp": 8, "recompute": "selective", "zero": 2}),
    "offload": ("llama", {"dp": 8, "zero": 1, "offload": "optimizer"}),
    "offloaded gradients": ("llama", {"dp": 8, "zero": 2, "offload": "gradients"}),
    "offloaded parameters": ("llama", {"dp": 8, "zero": 3, "offload": "parameters"}),
    "half gradients": ("llama", {"dp": 8, "zero": 1, "gradient_dtype": "compute"}),
}
"""Configurations by name, on eight devices with sixteen samples."""


@functools.cache
def case(name: str) -> Plan:
    """The plan of a case. Its target is not there, so that it is not priced."""
    kind, choices = CASES[name]
    plan = plan_of(configured(**choices), kind)
    states = {"gradient_dtype": choices.get("gradient_dtype", "master")}
    return replace(plan, model=replace(plan.model, target="missing.py", **states))


def changed(name: str, **changes: Any) -> Plan:
    """A case with other fields."""
    return replace(case(name), **changes)


def written(plan: Plan, system: str, folder: Path) -> WrittenPlan:
    """A plan written for a system into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_plan(plan, folder / "plan.json")
    return export_plan(folder / "plan.json", folder / "out", to=system)
