"""Training in fp8, emulated on CPUs: held to the model as torchao converts it, and to bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from one_device import loss_of
from processes import run_processes
from test_verification import batches, captured, planned, target

from autoparallel.passes.initialization.deferred_init import plain_build
from autoparallel.planner.plan import Precision
from autoparallel.planner.plan_file import loads
from autoparallel.runtime import membership
from autoparallel.runtime.trainer import Trainer
from autoparallel.runtime.verify import collect

pytest.importorskip("torchao.float8")

MODEL, HEAD = "gpt", "head"


def trained(text: str, precision: Precision) -> tuple[list[float], dict[str, Any]]:
    """Two steps by a plan: the losses, and on rank 0 the gradients of the first."""
    membership._check_eight_bits = lambda device: None  # a CPU emulates
    plan = loads(text, "test")
    plan = replace(plan, model=replace(plan.model, precision=precision))
    deferred, program = captured(MODEL, precision)
    trainer = Trainer(program, plan, deferred, device=torch.device("cpu"))
    losses, gradients = [], {}
    for batch in batches(MODEL):
        losses.append(float(trainer.step(batch).loss))
        if not gradients:
            gradients = collect(
                trainer.model.all_parameters(), trainer.program.graph, lambda each: each.gradient
            )
    return losses, gradients


def converted() -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the first batch and the gradients, of the model that torchao converts."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = plain_build(target(MODEL).build_model, 0).to(torch.bfloat16)
    convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=True),
        module_filter_fn=lambda module, name: HEAD not in name,
    )  # fmt: skip
    loss = loss_of(target(MODEL), captured(MODEL, "fp8")[1])(model, batches(MODEL)[0])
    loss.backward()
    return float(loss), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_one_device_computes_what_torchaos_model_does() -> None:
    losses, gradients = run_processes(1, trained, planned(MODEL, "dp=1,microbatches=1"), "fp8")[0]
    loss, expected = converted()
    print(losses, loss, gradients.keys(), expected.keys())
    assert losses[0] == pytest.approx(loss, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, ((_, found),) in gradients.items():
        assert torch.allclose(found, expected[name].float(), rtol=1e-2, atol=1e-6), name
