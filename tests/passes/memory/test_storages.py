"""Live bytes are what the allocator hands out: against its own log, and by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from autoparallel.passes.memory.storages import LiveBytes


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 8)
    )


class Residual(nn.Module):
    """Views, shared inputs and a softmax: much that must count once."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


def allocator_peak(step: Callable[[], object], folder: Path) -> int:
    """The most that ``step`` had allocated at once, by the CPU allocator's own events."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    path = folder / "trace.json"
    profile.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize(
    ("build", "shape"), [(mlp, (128, 64)), (Residual, (4, 48, 32))], ids=["mlp", "residual"]
)
def test_the_peak_of_a_training_step_is_the_allocators(
    build: Callable[[], nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    model, x = build(), torch.randn(shape)

    def step() -> None:
        model(x).square().mean().backward()

    step()
    model.zero_grad()
    expected = allocator_peak(step, tmp_path)
    model.zero_grad()
    with LiveBytes(step_bytes=1) as live:
        live.mark([x, *model.parameters()], "held")
        held = live.num_bytes
        step()
    assert live.peak_bytes - held == pytest.approx(expected, rel=0.01)


def test_fake_tensors_take_what_real_ones_take() -> None:
    def peaks(fake: bool) -> tuple[int, dict[str, int], int]:
        with FakeTensorMode() if fake else nullcontext():
            model, x = mlp(), torch.empty(16, 64)
            with LiveBytes() as live, live.saving():
                live.mark(model.parameters(), "parameters")
                model(x).sum().backward()
            return live.peak_bytes, live.peak_by_category, live.num_bytes

    assert peaks(fake=True) == peaks(fake=False)


def test_a_storage_counts_once_and_until_it_is_freed() -> None:
    with LiveBytes(step_bytes=1) as live:
        x = torch.zeros(100)
        y = x.view(10, 10).t()[2:5]
        assert live.num_bytes == 400
        z = y + 1
        assert live.num_bytes == 520
        del z
        assert live.num_bytes == 400
        del x
        assert live.num_bytes == 400
        del y
        assert live.num_bytes == 0
    assert live.peak_bytes == 520


def test_a_storage_that_is_emptied_under_its_tensor_counts_nothing() -> None:
    with LiveBytes(step_bytes=1, resizes=True) as live:
        x, y = torch.zeros(100), torch.zeros(1)
        x.untyped_storage().resize_(0)
        y.add_(1)
        assert live.num_bytes == 4
        x.untyped_storage().resize_(400)
        y.add_(1)
        assert live.num_bytes == 404


def test_saved_tensors_are_told_from_what_only_passes_by() -> None:
    """exp keeps its result, the sum keeps nothing; both results are 400 bytes."""
    x = torch.ones(100, requires_grad=True)
    with LiveBytes(step_bytes=1) as live, live.saving():
        kept = (x.exp() + 1).sum()
        assert live.by_category == {"transient": 404, "activations": 400}
        kept.backward()
        assert "activations" not in live.by_category


def test_sizes_are_in_the_allocators_multiples() -> None:
    with LiveBytes(step_bytes=512) as live:
        held = [torch.zeros(1), torch.zeros(129)]
    assert live.num_bytes == 512 + 1024
    assert len(held) == 2


def test_memory_that_is_only_promised_counts_until_it_is_given_back() -> None:
    live = LiveBytes(step_bytes=1)
    live.hold("buffer", 100, "communication")
    live.hold("buffer", 300, "communication")
    live.hold("buffer", 0, "communication")
    assert (live.num_bytes, live.peak_bytes) == (0, 300)
    assert live.peak_by_category == {"communication": 300}


def test_a_checkpointed_block_keeps_its_input_alone() -> None:
    def block(x: Tensor) -> Tensor:
        return x.exp().sin().exp()

    x = torch.ones(1000, requires_grad=True)
    with LiveBytes(step_bytes=1) as live:
        y = checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)
        kept = live.num_bytes
        del y
    assert kept == 3 * 4000
