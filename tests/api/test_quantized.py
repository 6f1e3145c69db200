"""Frozen weights in NF4: priced, held and trained beside as torchao does on one device."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from commands import run_python
from marks import slow
from processes import run_processes
from torch import Tensor, nn

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.cost_model.ops.memory import nf4_bytes
from autoparallel.options.parse import parse_parallel
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.capture.capture_model import capture, with_stored
from autoparallel.passes.initialization.deferred_init import (
    named_tensors,
    plain_build,
    record_build,
)
from autoparallel.passes.memory.stage_memory import stage_memory
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.programs.program import Program
from autoparallel.planner import ops as rules
from autoparallel.planner.costs.choices import input_specs
from autoparallel.planner.costs.precision import with_precision
from autoparallel.planner.costs.prices import Prices, Seconds
from autoparallel.planner.errors import UsageError
from autoparallel.planner.graph.layout import REPLICATE, Mesh, NodeLayout
from autoparallel.planner.plan import Precision
from autoparallel.planner.plan_file import dumps, loads
from autoparallel.planner.requests.pins import match_pins, parse_pin
from autoparallel.planning.capture import capture_model
from autoparallel.planning.plan import plan_program
from autoparallel.runtime.step.trainer import Trainer
from autoparallel.runtime.verify.verify import collect
from autoparallel.target.load import load_target
from autoparallel.target.lora import add_lora, parse_lora
from autoparallel.target.target import Target
from benchmarks.memory.step_memory import measure_step, states_before_last_backward

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


@cache
def captured(name: str, precision: Precision) -> Program:
    own = target(name)
    model = record_build(own.build_model, seed=0).model
    return capture_model(model, own.example_batch(2, SEQ), own.loss_fn, precision)


def planned(name: str, parallel: str, precision: Precision) -> str:
    own, program = target(name), captured(name, precision)
    forced = parse_parallel(parallel)
    options = PlanOptions(global_batch=BATCH, seq=SEQ, precision=precision, forced=forced)
    count = (forced.dp or 1) * (forced.tp or 1) * (forced.pp or 1)
    return dumps(plan_program(program, own, parse_cluster(f"cpu:{count}"), options))


def start(name: str) -> nn.Module:
    """The model whose adapters have begun to matter."""
    model = plain_build(target(name).build_model, 0)
    seeded = torch.Generator().manual_seed(1)
    for each, parameter in model.named_parameters():
        if "lora_B" in each:
            nn.init.normal_(parameter, std=0.1, generator=seeded)
    return model


Pieces = dict[str, list[tuple[Any, np.ndarray]]]


def trained(
    name: str, texts: list[str]
) -> list[tuple[list[float], Pieces, dict[str, int], dict[str, int]]]:
    """On a rank, by plan: losses of its steps, gradients of the first, bytes of states."""
    found = []
    for text in texts:
        plan = loads(text)
        program = captured(name, plan.model.precision)
        weights = dict(named_tensors(start(name)))
        trainer = Trainer(program, plan, weights, device=torch.device("cpu"))
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


def batch(program: Program) -> dict[str, Tensor]:
    return dict(random_batch(program.graph.with_batch_size(BATCH), seed=0))


def alone(name: str, precision: Precision) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same steps of the model whose linear layers torchao computes."""
    dtype = DTYPES[precision]
    model = start(name)
    masters = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for layer in [each for each in model.modules() if hasattr(each, "stored_weight")]:
        made = NF4Tensor.from_tensor(layer.weight.detach(), 64, 256)
        layer.weight = nn.Parameter(made, requires_grad=False)
    program = captured(name, precision)
    optimizer = torch.optim.AdamW([nn.Parameter(each) for each in masters.values()], lr=3e-4)
    losses, first = [], {}
    for _ in range(STEPS):
        loss = model(**program.batch(batch(program))).loss
        loss.backward()
        losses.append(loss.item())
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
    two = [
        "dp=2,zero=0,recompute=full",
        "dp=2,zero=3,recompute=selective",
        "pp=2,schedule=zb-h1,microbatches=2",
        "tp=2",
    ]
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


@pytest.mark.parametrize("zero", [0, 3])
def test_a_rank_holds_the_bytes_that_the_plan_says(llama: str, zero: int) -> None:
    text = planned(llama, f"dp=2,zero={zero}", "fp32")
    graph = captured(llama, "fp32").graph
    quantized = {node.name: node.spec for node in graph.parameters if node.spec.stored}
    assert len(quantized) == 14
    expected = {name: nf4_bytes(spec.numel) for name, spec in quantized.items()}
    rest = sum(
        node.spec.num_bytes // (2 if zero else 1)
        for node in graph.parameters
        if not node.spec.stored and not (zero and node.spec.requires_grad)
    )
    (predicted,) = stage_memory(loads(text), graph, captured(llama, "fp32").blocks)
    for _, _, held, bytes_of in (rank[0] for rank in run_processes(2, trained, llama, [text])):
        assert bytes_of == expected
        both = held["parameters"] + held["master"]
        assert both == pytest.approx(predicted["parameters"] + predicted.get("master", 0), rel=0.01)
        assert held["parameters"] >= sum(expected.values()) + (0 if zero else rest)


def priced(name: str, lora: str, precision: Precision = "bf16") -> tuple[Program, Prices]:
    own = load_target(name, {"lora": lora})
    model = record_build(own.build_model, seed=0).model
    program = capture_model(model, own.example_batch(2, SEQ), own.loss_fn, precision)
    cluster = parse_cluster("1xRTX4090")
    return program, Prices(Mesh(("dp",), (1,)), cluster, (0,), precision, "adamw", rules)


def test_a_weight_costs_its_bytes_and_dequantizing_it_once_in_each_direction(llama: str) -> None:
    """By hand: 0.5 B an element, 1 B a block of 64, 4 B a group of 256 blocks; it is read so, and
    written in bfloat16."""
    (plain, before), (program, after) = (priced(llama, lora) for lora in ("r=2", "r=2,base=nf4"))
    name = "model.layers.1.mlp.up_proj.weight"
    spec = program.graph[name].spec
    held = 128 * 256 // 2 + 128 * 256 // 64 + 4 * 2 + 4
    for zero in (0, 3):
        seconds, states = after.parameter(spec, (REPLICATE,), zero)
        assert seconds == Seconds()
        assert (states.parameters, sum(states)) == (held, held)
    device = after.device
    moved = (held + 2 * 128 * 256) / (
        device.memory_bytes_per_second * device.efficiency.get("copy", 1.0)
    )
    once = device.launch_seconds + moved
    (reader,) = program.graph.users[name]
    layout = NodeLayout(((REPLICATE,), (REPLICATE,)), ((REPLICATE,),))
    node, other = program.graph[reader], plain.graph[reader]
    found = after.op(node, input_specs(node, program.graph), layout)
    without = before.op(other, input_specs(other, plain.graph), layout)
    assert found.forward_compute - without.forward_compute == pytest.approx(once, rel=1e-9)
    assert found.backward_compute - without.backward_compute == pytest.approx(once, rel=1e-9)
    first = program.graph[program.graph.users["model.layers.0.self_attn.q_proj.weight"][0]]
    no_backward = after.op(first, input_specs(first, program.graph), layout)
    assert no_backward.backward_compute == 0.0


def test_in_fp8_linear_layers_of_quantized_weights_do_not_cast(llama: str) -> None:
    graph = with_precision(priced(llama, "r=2,base=nf4")[0].graph, "fp8")
    readers = [
        user for node in graph.parameters if node.spec.stored for user in graph.users[node.name]
    ]
    assert len(readers) == 14
    assert not any(graph[reader].product_dtype for reader in readers)
    adapters = [
        node for node in graph if "lora_A" in node.module and node.op.startswith("aten.linear")
    ]
    assert adapters
    assert all(node.product_dtype for node in adapters)


def test_no_op_splits_a_quantized_weight(llama: str) -> None:
    graph = priced(llama, "r=2,base=nf4")[0].graph
    name = "model.layers.0.mlp.up_proj.weight"
    (reader,) = graph.users[name]
    assert {each.label for each in rules.axis_strategies(graph[name], graph, 2)} == {"R"}
    found = rules.axis_strategies(graph[reader], graph, 2)
    assert not any(each.inputs[1].is_shard for each in found)
    assert any(each.inputs[0].is_shard for each in found)
    with pytest.raises(UsageError, match="a split cuts its blocks") as raised:
        match_pins(graph, [parse_pin(f"{name}=S(0)@tp")])
    assert raised.value.code == "AP183"


def test_linear_layers_of_the_blocks_are_quantized_and_nothing_else(llama: str) -> None:
    graph = priced(llama, "r=2,base=nf4")[0].graph
    kept = {node.name.partition("layers.")[2] or node.name for node in graph.parameters}
    quantized = {node.name for node in graph.parameters if node.spec.stored}
    assert all(name.endswith("_proj.weight") for name in quantized)
    assert len(quantized) == 14
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= kept - quantized
    assert not any(graph[name].spec.requires_grad for name in quantized)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"requires_grad": True}, "it is trained"),
        ({"shape": (100, 128)}, "12800 elements are no multiple of 16384"),
    ],
)
def test_weights_that_cannot_be_quantized_are_refused(
    llama: str, change: dict[str, Any], why: str
) -> None:
    program, _ = priced(llama, "r=2,base=nf4")
    name = "model.layers.0.mlp.up_proj.weight"
    nodes = tuple(
        node.with_outputs((replace(node.spec, **change),)) if node.name == name else node
        for node in program.graph.nodes
    )
    with pytest.raises(UsageError, match=why) as raised:
        with_stored(replace(program.graph, nodes=nodes), program.model)
    assert raised.value.code == "AP868"


def test_a_weight_that_another_op_reads_is_refused() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(128, 128, bias=False).requires_grad_(False)
            self.first.stored_weight = "nf4"  # type: ignore[assignment]
            self.last = nn.Linear(128, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x @ self.first.weight).square().mean()

    with pytest.raises(UsageError, match=r"matmul\.default reads it") as raised:
        capture(Reader().to("meta"), {"x": torch.randn(2, 128, device="meta")})
    assert raised.value.code == "AP868"


def test_a_model_without_linear_layers_in_blocks_is_refused() -> None:
    model = nn.Sequential()
    model.q_proj, model.v_proj = nn.Linear(128, 128), nn.Linear(128, 128)
    with pytest.raises(UsageError, match=r"no nn\.Linear in its blocks") as raised:
        add_lora(model, parse_lora("r=2,base=nf4"))
    assert raised.value.code == "AP868"


def transients(name: str, text: str) -> int:
    """On a rank: the bytes that live inside of a step, at its peak."""
    plan = loads(text)
    weights = dict(named_tensors(start(name)))
    program = captured(name, plan.model.precision)
    trainer = Trainer(program, plan, weights, device=torch.device("cpu"))
    trainer.step(batch(program))
    return measure_step(trainer, batch(program)).by_category["transient"]


def test_the_memory_of_a_plan_has_the_dequantized_weight_in_use(llama: str) -> None:
    text = planned(llama, "dp=1,recompute=none", "bf16")
    program = captured(llama, "bf16")
    (predicted,) = stage_memory(loads(text), program.graph, program.blocks)
    (found,) = run_processes(1, transients, llama, text)
    assert predicted["transient"] == pytest.approx(found, rel=0.02)
    assert found >= 2 * 128 * 256


def command(folder: Path, line: str) -> str:
    done = run_python("-m", "autoparallel", *line.split(), folder=folder, timeout_seconds=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_checkpoint_goes_on_and_is_exported_dequantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPARALLEL_CACHE", str(tmp_path / "cache"))
    config = transformers.AutoConfig.from_pretrained(save_llama(tmp_path / "llama")[3:])
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "llama")
    asked = "--lora r=2,base=nf4 --cluster cpu:1 --global-batch 4 --seq 16 --init exact"
    command(tmp_path, f"run hf:llama --weights llama {asked} --steps 2 --save run")
    resumed = command(tmp_path, "run run/plan.json --resume run --steps 1")
    whole = command(tmp_path, f"run hf:llama --weights llama {asked} --steps 3")
    last = [re.findall(r"^step +3  loss ([\d.]+)", said, re.M) for said in (resumed, whole)]
    assert last[0] == last[1] != []
    command(tmp_path, "export run --to hf -o merged")
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, tensor in model.state_dict().items():
        if "q_proj" in name or "v_proj" in name:
            continue  # with what their adapters learned
        is_held = name.endswith("_proj.weight")
        expected = (
            NF4Tensor.from_tensor(tensor, 64, 256).get_original_weight() if is_held else tensor
        )
        assert torch.equal(found[name], expected), name
