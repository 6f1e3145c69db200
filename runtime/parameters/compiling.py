"""Compilation of a rank's blocks with inductor; equal blocks are compiled once.

In: the graphs of a rank's blocks. Out: the same graphs, in which the runs of plain ops
(``passes.backward.compiled_runs``) are compiled when they are first called. The graphs are captured
already, so ``torch.compile``'s tracer is not needed; inductor is called directly. A run is compiled
for the shapes, strides and dtypes of its inputs and for whether they require gradients: equal
blocks share one compilation, and a micro-batch of another size needs another one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from ...passes.backward.compiled_runs import Run, compile_runs
from ...planner.errors import AutoparallelError, RunError

Compiled = Callable[..., tuple[Tensor, ...]]


@dataclass(eq=False)
class BlockCompiler:
    """Cache of the functions that this process has compiled from runs (consecutive ops of a block),
    by the run's text, grad mode, and the shapes, strides and dtypes of its inputs."""

    compiled: dict[tuple[Any, ...], Compiled] = field(default_factory=dict)

    def compile(self, graph: fx.GraphModule, block: str, *, in_parts: bool) -> None:
        """Replace, in place, each run of consecutive ops in the graph of ``block`` by a function,
        which is compiled at its first call. ``in_parts``: the backward recomputes the block except
        its matrix products, so these are not compiled."""
        compile_runs(graph, lambda run: _CompiledRun(self, run, block), in_parts=in_parts)


@dataclass(eq=False)
class _CompiledRun:
    """A run of consecutive ops of one block, as a function; its compiled form is cached in
    ``compiler``."""

    compiler: BlockCompiler
    run: Run
    block: str
    __name__: str = "compiled"

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        key = (self.run.text, torch.is_grad_enabled(), *map(_form, inputs))
        found = self.compiler.compiled.get(key)
        if found is None:
            found = self.compiler.compiled[key] = self._compile(inputs)
        return found(*inputs)

    def _compile(self, inputs: tuple[Tensor, ...]) -> Compiled:
        """Compile the run of ops for ``inputs``. Raise RunError AP823 if inductor fails."""
        import torch._inductor as inductor

        try:
            with _disable_current_modes():
                found: Any = inductor.compile(copy.deepcopy(self.run.module), list(inputs))
        except (AutoparallelError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            raise RunError(
                "AP823",
                f"the block {self.block} cannot be compiled",
                why=f"{type(error).__name__}: {text[0]}",
                where=f"its run of {self.run.text.count(chr(10))} ops",
                fix="run without compilation: --no-compile, or compile=False",
            ) from error
        compiled: Compiled = found
        return compiled


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
