"""Blocks are measured in one piece, on every rank; their backwards reach every parameter."""

from __future__ import annotations

import pytest
import torch
from processes import run_processes
from torch import Tensor, nn

from autoparallel.cost_model.profile.records import Measurement
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program
from autoparallel.runtime.profile import blocks as profile_blocks
from autoparallel.runtime.profile.blocks import measure_block, measure_everywhere

CPU = torch.device("cpu")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def program() -> Program:
    """An embedding, two equal layers, a loss on classes."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.layers = nn.ModuleList(Residual() for _ in range(2))
            self.head = nn.Linear(8, 11)

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            logits = self.head(x).flatten(0, 1)
            return nn.functional.cross_entropy(logits, targets.flatten())

    batch = {name: torch.zeros(4, 6, dtype=torch.long) for name in ("tokens", "targets")}
    with torch.device("meta"):
        model = Model()
    return capture(model, batch)


def test_every_kind_of_block_runs_by_itself_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one process; every parameter of a block that is trained gets a gradient."""
    monkeypatch.setattr(profile_blocks, "_free_bytes", lambda device: 1e9)
    found = program()
    assert len(found.blocks.kinds) < len(found.blocks.blocks)
    for rows in (4, 2):
        graph = found.graph.with_batch_size(rows)
        for block in found.blocks.kinds.values():
            own = measure_block(graph, block, device=CPU, accumulates=rows == 2, seconds=0.0)
            assert own.forward_seconds > 0
            assert own.repeats >= profile_blocks.LEAST_RUNS
            copy = profile_blocks._copy(graph, block, CPU)
            copy.backward(copy.forward())
            assert all(p.grad is not None for p in copy.module.parameters())
            assert all(t.grad is not None for t in copy.inputs if t.requires_grad)


def test_a_block_that_does_not_fit_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_blocks, "_free_bytes", lambda device: 10.0)
    found = program()
    with pytest.raises(RuntimeError, match="GB may be used"):
        measure_block(
            found.graph, found.blocks.blocks[0], device=CPU, accumulates=False, seconds=0.0
        )


def everywhere() -> list[Measurement | str]:
    found = program()
    return [
        measure_everywhere(found.graph, block, device=CPU, accumulates=False, seconds=0.01)
        for block in found.blocks.kinds.values()
    ]


def test_all_ranks_know_the_same() -> None:
    first, second = run_processes(2, everywhere)
    assert first == second
    assert all(isinstance(each, Measurement) for each in first)
