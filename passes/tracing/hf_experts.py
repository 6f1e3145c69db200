"""Experts of Hugging Face models, captured as ``autoparallel::experts``.

transformers (5.0 on) lets a function stand in for the forward of any experts module; its own
implementations loop over the experts that are hit (shapes that depend on data), gather a copy of
the weights per token, or sort tokens of all rows together. During a capture, ``capturable_experts``
puts the op in their place, if nothing else changes. Llama 4 sends every token through every expert,
scaled by a score that is 0 for all but the chosen; the op computes the chosen experts alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.activation import describe
from ..ops.experts import experts

_MODULE = "transformers.integrations.moe"
_LLAMA4 = "transformers.models.llama4.modeling_llama4"


@contextmanager
def capturable_experts() -> Iterator[None]:
    """Replace mixture-of-experts modules of transformers by the op ``autoparallel::experts`` within
    a ``with`` block."""
    with ExitStack() as stack:
        library: Any = sys.modules.get(_MODULE)
        if hasattr(library, "ExpertsInterface"):
            stack.enter_context(_by_interface(library))
        layer: Any = getattr(sys.modules.get(_LLAMA4), "Llama4TextMoe", None)
        if layer is not None:
            stack.enter_context(_replaced(layer, "forward", _with_chosen(layer.forward)))
        yield


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute within a ``with`` block."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextmanager
def _by_interface(library: Any) -> Iterator[None]:
    """Replace the modules whose forward transformers looks up in its table of implementations."""
    interface = library.ExpertsInterface

    def chosen(self: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return library.batched_mm_experts_forward(module, *args, **kwargs)
            return _forward(library, module, *args, **kwargs)

        return forward

    with _replaced(interface, "get_interface", chosen):
        yield


def _with_chosen(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a layer of Llama 4 that computes the chosen experts alone, or ``plain``
    where their activation function has no text."""

    def forward(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        own = module.experts

        def gated(rows: Tensor) -> Tensor:
            gate, up = rows.chunk(2, dim=-1)
            made: Tensor = up * own.act_fn(gate)
            return made

        activation = describe(own, gated)
        if activation is None or torch.compiler.is_dynamo_compiling():
            found: tuple[Tensor, Tensor] = plain(module, hidden_states)
            return found
        x = hidden_states.reshape(-1, module.hidden_dim)
        weighed, logits = module.router(x)
        ids = logits.topk(module.top_k, dim=1)[1]
        scores = weighed.gather(1, ids).unsqueeze(-1)
        made = experts(
            x.unsqueeze(1) * scores,
            ids.unsqueeze(-1),
            torch.ones_like(scores),
            own.gate_up_proj,
            own.down_proj,
            activation=activation,
            num_experts=own.num_experts,
            transposed=True,
        )
        return module.shared_expert(x) + made.sum(1), logits

    return forward


def _forward(library: Any, module: Any, x: Tensor, ids: Tensor, scores: Tensor) -> Any:
    """Compute a mixture-of-experts module of transformers by the op ``autoparallel::experts``, or
    by its own forward if the op cannot compute the same."""
    gated = module.has_gate
    activation = describe(module, module._apply_gate if gated else module.act_fn)
    if activation is None or module.has_post_expert_norm or x.dim() != 2 or ids.dim() != 2:
        return library.batched_mm_experts_forward(module, x, ids, scores)
    up = "gate_up_proj" if gated else "up_proj"
    weights = [getattr(module, up), module.down_proj]
    if module.has_bias:
        weights += [getattr(module, f"{up}_bias"), module.down_proj_bias]
    return experts(
        x,
        ids,
        scores,
        *weights,
        activation=activation,
        num_experts=weights[0].shape[0],
        transposed=module.is_transposed,
    )
