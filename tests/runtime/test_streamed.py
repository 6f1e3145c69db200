"""A reference whose weights are streamed op by op is the plain one, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from kept_captures import capture_once
from marks import slow
from torch import Tensor, nn

from autoparallel.passes.capture.export import call_model, find_loss
from autoparallel.passes.initialization.deferred_init import plain_build
from autoparallel.passes.programs.inputs import random_batch
from autoparallel.passes.tracing.counter_random import batch_dims
from autoparallel.passes.tracing.modes import promote_to_float64
from autoparallel.runtime.verify.reference import Batch, Reference, run_reference, streaming
from autoparallel.target.load import load_target

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def reference(name: str, device: torch.device | None, told: list[str]) -> Reference:
    """Two steps, streamed to ``device`` or (None) plain on the CPU."""
    target = load_target(f"hf:tests/zoo/{name}", {})
    _, program = capture_once(target, target.example_batch(2, 16), "fp64")
    batches = [random_batch(program.graph.with_batch_size(4), seed=step) for step in range(2)]
    model = plain_build(target.build_model, 0).double()

    def loss(model: nn.Module, inputs: Batch) -> Tensor:
        parts = program.batch({name: each.to(device or CPU) for name, each in inputs.items()})
        with streaming(model, device, told.append) if device is not None else nullcontext():
            return find_loss(call_model(model, parts), parts, target.loss_fn)

    with promote_to_float64():
        return run_reference(
            model,
            batches,
            loss=loss,
            seed=0,
            random_dims=batch_dims(program.graph),
            build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        ).on_cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [slow("gpt2_dropout"), slow("t5"), "resnet"])
def test_a_streamed_reference_is_the_plain_one(name: str, device: str) -> None:
    told: list[str] = []
    plain, found = reference(name, None, []), reference(name, torch.device(device), told)
    closeness = {"rtol": 0.0, "atol": 0.0} if device == "cpu" else {"rtol": 1e-9, "atol": 1e-12}
    assert found.losses == pytest.approx(plain.losses, rel=closeness["rtol"], abs=0.0)
    for own, expected in (
        (found.gradients, plain.gradients),
        (found.weights, plain.weights),
        (found.buffers, plain.buffers),
    ):
        torch.testing.assert_close(own, expected, **closeness)
    assert plain.gradients
    read = {line.removeprefix("the reference: forward of ") for line in told}
    assert set(plain.gradients) <= read, "every weight that trains was streamed"
    assert "the reference: backward" in read
