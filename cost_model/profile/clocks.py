"""Runs of a call, forward and backward, timed: on a CPU and on a GPU."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .arguments import Call

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_FLUSH_BYTES = 2**27
_MOST_FLUSHES = 64
_GPU_SAMPLES = 5
_ENGINE_RUNS = 50
_SETS_BYTES = 64e6
"""Most bytes that a batch of timed calls touches: more than a CPU core's own caches hold."""
_MOST_SETS = 16
_LEAST_SHARE = 0.1
"""Least share of a backward's measured time that must remain after the subtraction of autograd's
start-up time."""


def backward_of(call: Call) -> Backward | None:
    """Return the backward of ``call``, with random gradients of its outputs; None if no output has
    a gradient. Runs the call once."""
    import torch

    args, kwargs = call.prepare()
    with torch.set_grad_enabled(bool(call.leaves)):
        outputs = flat(call.op(*args, **kwargs))
    gradients = tuple(
        (at, torch.randn_like(output)) for at, output in enumerate(outputs) if output.requires_grad
    )
    return Backward(gradients) if gradients else None


def flat(value: Any) -> list[Tensor]:
    """Return all tensors in an op's result: a tensor, or nested tuples and lists of tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in flat(item)]
    return []


@dataclass(frozen=True, slots=True)
class Backward:
    """Backward pass of an op. ``gradients``: (index of an output, its gradient) for the op's
    outputs."""

    gradients: tuple[tuple[int, Tensor], ...]

    def run(self, outputs: list[Tensor], leaves: Sequence[Tensor]) -> Any:
        import torch

        return torch.autograd.grad(
            [outputs[at] for at, _ in self.gradients],
            leaves,
            [gradient for _, gradient in self.gradients],
            allow_unused=True,
        )


class CpuClock:
    """Clock that times the forward and backward of an op on a CPU. Calls are timed in batches that
    imitate the equal layers of a model: each call has its own inputs, all forwards run before the
    backwards, and outputs are kept until then. So ops write to newly allocated memory as often as
    in training. The seconds to start autograd's engine, which a step spends once and not once per
    op, are measured and subtracted from each backward."""

    def __init__(self, call: Call, backward: Backward | None) -> None:
        args, kwargs = call.prepare()
        used = [*flat([*args, *kwargs.values()]), *flat(call.op(*args, **kwargs))]
        used_bytes = sum(tensor.numel() * tensor.element_size() for tensor in used)
        self.most = max(1, min(_MOST_SETS, int(_SETS_BYTES / max(used_bytes, 1))))
        self.calls = [call]
        self.backward = backward
        self.engine_seconds = _engine_seconds() if backward is not None else 0.0

    def samples(self, count: int) -> list[tuple[float, float]]:
        """Run the op ``count`` (≤ ``most``) times; return (forward, backward) seconds of each
        run."""
        while len(self.calls) < count:
            self.calls.append(self.calls[0].another())
        calls = self.calls[:count]
        runs = [self._forward(call) for call in calls]
        found = []
        for call in reversed(calls):
            forward, outputs = runs.pop()
            found.append((forward, self._backward(outputs, call.leaves)))
            del outputs
        return found

    def _forward(self, call: Call) -> tuple[float, list[Tensor]]:
        import torch

        args, kwargs = call.prepare()
        with torch.set_grad_enabled(bool(call.leaves)):
            start = time.perf_counter()
            made = call.op(*args, **kwargs)
            return time.perf_counter() - start, flat(made)

    def _backward(self, outputs: list[Tensor], leaves: Sequence[Tensor]) -> float:
        if self.backward is None:
            return 0.0
        start = time.perf_counter()
        self.backward.run(outputs, leaves)
        seconds = time.perf_counter() - start
        return max(seconds - self.engine_seconds, seconds * _LEAST_SHARE)


def _engine_seconds() -> float:
    """Return the seconds that autograd's engine takes to start: the seconds of a backward through
    one autograd node, minus the additional seconds of a second node."""
    import torch

    leaf = torch.zeros(1, requires_grad=True)
    gradient = torch.zeros(1)

    def seconds(nodes: int) -> float:
        found = []
        for _ in range(_ENGINE_RUNS):
            value = leaf
            for _ in range(nodes):
                value = torch.ops.aten.alias.default(value)
            start = time.perf_counter()
            torch.autograd.grad([value], [leaf], [gradient])
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    return max(0.0, 2 * seconds(1) - seconds(2))


def _event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _seconds_between(first: Any, last: Any) -> float:
    return float(first.elapsed_time(last)) / 1e3


class CpuStopwatch:
    """Stopwatch that times single function calls by the host's monotonic clock."""

    def samples(self, call: Callable[[], object], count: int) -> list[float]:
        """Call ``call`` ``count`` times; return the seconds of each call."""
        found = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
        return found


class GpuStopwatch:
    """Stopwatch that times the GPU kernels of a function, by CUDA events before and after many
    calls in a row. While the host launches the calls, other work keeps the stream busy, so that
    launches do not count. One call before the first event synchronizes the ranks of a
    collective."""

    def __init__(self) -> None:
        self.filler = Filler()

    def samples(self, call: Callable[[], object], count: int) -> list[float]:
        """Call ``call`` ``count`` times, divided into at most ``_GPU_SAMPLES`` groups; return the
        mean seconds per call of each group."""
        num_samples = min(_GPU_SAMPLES, count)
        return [self._sample(call, math.ceil(count / num_samples)) for _ in range(num_samples)]

    def _sample(self, call: Callable[[], object], count: int) -> float:
        import torch

        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        launch_seconds = time.perf_counter() - start
        self.filler.run(self.filler.count_for((count + 1) * launch_seconds))
        call()
        first, last = _event(), _event()
        first.record()
        for _ in range(count):
            call()
        last.record()
        torch.cuda.synchronize()
        return _seconds_between(first, last) / count


def stopwatch(device_type: str) -> CpuStopwatch | GpuStopwatch:
    """Return the stopwatch for a device type, "cpu" or "cuda"."""
    return GpuStopwatch() if device_type == "cuda" else CpuStopwatch()


class Filler:
    """Source of GPU kernels that overwrite a buffer, to keep a stream busy and flush the L2
    cache."""

    def __init__(self) -> None:
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        size = max(4 * int(getattr(properties, "L2_cache_size", 0)), _LEAST_FLUSH_BYTES)
        self.buffer = torch.empty(size, dtype=torch.int8, device="cuda")
        self.buffer.zero_()
        first, second = _event(), _event()
        first.record()
        self.buffer.zero_()
        second.record()
        torch.cuda.synchronize()
        self.seconds = max(_seconds_between(first, second), 1e-6)

    def count_for(self, seconds: float) -> int:
        """Return the number of buffer-overwriting kernels that keep the GPU busy for
        ``seconds``."""
        return int(min(_MOST_FLUSHES, math.ceil(1.5 * seconds / self.seconds)))

    def run(self, count: int) -> None:
        """Launch ``count`` kernels, each of which overwrites the buffer."""
        for _ in range(count):
            self.buffer.zero_()


class GpuClock:
    """Clock that times the kernels of an op's forward and backward on a GPU, by CUDA events."""

    most = 1

    def __init__(self, call: Call, backward: Backward | None) -> None:
        self.call, self.backward = call, backward
        self.filler = Filler()
        self.flushes = self._flushes_to_stay_ahead()

    def _flushes_to_stay_ahead(self) -> int:
        """Return the number of buffer-overwriting kernels that last while the host issues the
        op."""
        import torch

        torch.cuda.synchronize()
        start = time.perf_counter()
        self._run()
        launch_seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        return self.filler.count_for(launch_seconds)

    def _run(self) -> None:
        import torch

        args, kwargs = self.call.prepare()
        with torch.set_grad_enabled(bool(self.call.leaves)):
            outputs = flat(self.call.op(*args, **kwargs))
        if self.backward is not None:
            self.backward.run(outputs, self.call.leaves)

    def samples(self, count: int) -> list[tuple[float, float]]:
        """Run the op ``count`` times; return (forward seconds, backward seconds) of each run."""
        return [self._sample() for _ in range(count)]

    def _sample(self) -> tuple[float, float]:
        import torch

        events = [_event() for _ in range(4)]
        args, kwargs = self.call.prepare()
        self.filler.run(self.flushes)
        with torch.set_grad_enabled(bool(self.call.leaves)):
            events[0].record()
            made = self.call.op(*args, **kwargs)
            events[1].record()
        if self.backward is not None:
            outputs = flat(made)
            self.filler.run(self.flushes)
            events[2].record()
            self.backward.run(outputs, self.call.leaves)
            events[3].record()
        torch.cuda.synchronize()
        backward = _seconds_between(*events[2:]) if self.backward else 0.0
        return _seconds_between(*events[:2]), backward
