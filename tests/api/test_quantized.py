"""Frozen weights in NF4: priced, held and trained beside as torchao does on one device."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from kept_captures import capture_once
from marks import slow
from processes import run_processes
from torch import Tensor, nn

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.ops.memory import nf4_bytes
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.initialization.deferred_init import plain_build
from autoparallel.passes.memory.stage_memory import stage_memory
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.planner.plan import Precision
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.profile.memory_counter import states_before_last_backward
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.verify import collect
from autoparallel.target.load import load_target
from autoparallel.target.lora import quantized_paths
from autoparallel.target.target import Target

NF4Tensor = pytest.importorskip("torchao.quantization").NF4Tensor

BATCH, SEQ, STEPS = 4, 16, 3
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def save_llama(folder: Path) -> str:
    """Two layers whose weights are whole groups of blocks."""
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    return f"hf:{folder}"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("llama"))


@cache
def target(name: str, lora: str = "r=2,targets=q_proj+down_proj,base=nf4") -> Target:
    return load_target(name, {"lora": lora})


def planned(name: str, parallel: str, precision: Precision) -> str:
    own = target(name)
    program = capture_once(own, own.example_batch(2, SEQ), precision)[1]
    forced = parse_parallel(parallel)
    options = PlanOptions(global_batch=BATCH, seq=SEQ, precision=precision, forced=forced)
    count = (forced.dp or 1) * (forced.tp or 1) * (forced.pp or 1)
    return dumps(plan_program(program, own, parse_cluster(f"cpu:{count}"), options))


Pieces = dict[str, list[tuple[Any, np.ndarray]]]


def trained(
    name: str, texts: list[str]
) -> list[tuple[list[float], Pieces, dict[str, int], dict[str, int]]]:
    """On a rank, by plan: losses of its steps, gradients of the first, bytes of states."""
    found = []
    for text in texts:
        plan, own = loads(text), target(name)
        deferred, program = capture_once(own, own.example_batch(2, SEQ), plan.model.precision)
        trainer = Trainer(
            program, plan, deferred, device=torch.device("cpu"), build=own.build_optimizer
        )
        losses, gradients = [], {}
        for step in range(STEPS):
            losses.append(float(trainer.step(batch(program)).loss))
            if step == 0:
                pieces = collect(
                    trainer.model.all_parameters(), program.graph, lambda each: each.gradient
                )
                gradients = {
                    name: [(region, part.float().numpy()) for region, part in held]
                    for name, held in pieces.items()
                }
        held = states_before_last_backward(trainer, batch(program))
        bytes_of = {
            parameter.name: parameter.local.nbytes
            for parameter in trainer.model.all_parameters()
            if parameter.spec.stored
        }
        found.append((losses, gradients, held, bytes_of))
    return found


def batch(program: Any) -> dict[str, Tensor]:
    return dict(random_batch(program.graph.with_batch_size(BATCH), seed=0))


def alone(name: str, precision: Precision) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same steps of the model whose linear layers torchao computes."""
    own, dtype = target(name), DTYPES[precision]
    model = plain_build(own.build_model, 0)
    masters = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    model = model.to(dtype)
    for path in quantized_paths(model):
        layer = model.get_submodule(path)
        made = NF4Tensor.from_tensor(layer.weight.detach(), 64, 256)
        layer.weight = nn.Parameter(made, requires_grad=False)
    program = capture_once(own, own.example_batch(2, SEQ), precision)[1]
    optimizer = torch.optim.AdamW([nn.Parameter(each) for each in masters.values()], lr=3e-4)
    losses, first = [], {}
    for _ in range(STEPS):
        loss = model(**program.batch(batch(program))).loss
        loss.backward()
        losses.append(float(loss))
        pairs = list(zip(masters, optimizer.param_groups[0]["params"], strict=True))
        for each, master in pairs:
            held = model.get_parameter(each)
            master.grad, held.grad = held.grad.float(), None
        first = first or {each: master.grad.numpy().copy() for each, master in pairs}
        optimizer.step()
        for each, master in pairs:
            model.get_parameter(each).data.copy_(master)
    return losses, first


@pytest.mark.parametrize("precision", ["fp32", slow("bf16")])
def test_plans_train_what_torchao_trains_on_one_device(llama: str, precision: Precision) -> None:
    two = ["dp=2,zero=0", "dp=2,zero=3", "pp=2,schedule=1f1b,microbatches=2", "tp=2"]
    texts = {1: [planned(llama, "dp=1", precision)]}
    texts[2] = [planned(llama, each, precision) for each in two]
    losses, gradients = alone(llama, precision)
    near = {"rel": 1e-4} if precision == "fp32" else {"rel": 2e-2}
    for count, own in texts.items():
        every = run_processes(count, trained, llama, own)
        for at, text in enumerate(own):
            found, pieces = every[0][at][:2]
            assert found == pytest.approx(losses, **near), text
            assert pieces.keys() == gradients.keys()
            for name, held in pieces.items():
                largest = np.abs(gradients[name]).max()
                for region, part in held:
                    box = tuple(slice(*each) for each in region)
                    off = np.abs(part - gradients[name][box]).max()
                    assert off <= near["rel"] * largest, (name, off, largest)
