"""Experts of Hugging Face models, captured as ``autoparallel::experts``.

transformers (5.0 on) lets a function stand in for the forward of any experts module; its own
implementations loop over the experts that are hit (shapes that depend on data), gather a copy of
the weights per token, or sort tokens of all rows together. During a capture, ``capturable_experts``
puts the op in their place, if nothing else changes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.activation import describe
from ..ops.experts import experts

_MODULE = "transformers.integrations.moe"


@contextmanager
def capturable_experts() -> Iterator[None]:
    """Replace mixture-of-experts modules of transformers by the op ``autoparallel::experts`` within
    a ``with`` block."""
    library = sys.modules.get(_MODULE)
    interface: Any = getattr(library, "ExpertsInterface", None)
    if library is None or interface is None:
        yield
        return
    plain = interface.get_interface

    def chosen(self: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return library.batched_mm_experts_forward(module, *args, **kwargs)
            return _forward(library, module, *args, **kwargs)

        return forward

    interface.get_interface = chosen
    try:
        yield
    finally:
        interface.get_interface = plain


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
