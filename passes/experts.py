"""A layer of experts as one op: ``autoparallel::experts``.

Each of T tokens goes through the k experts that ``ids`` names and comes back as the sum of
their results, weighted by ``scores``:

    y_t = Σ_j scores_tj · (act(x_t · up_e + b_e) · down_e + c_e)   with e = ids_tj

Tokens do not meet, so the op is split by tokens; and it is a sum over experts, so it is
split by experts: each rank computes what its own experts add, a partial sum. An id outside
of the experts at hand adds nothing. Rows are sorted by expert and multiplied in groups
(Gale et al. 2022, MegaBlocks), so no expert computes a row that is not its own.

``activation`` is a function of rows as text (``activation.py``). ``transposed`` says that the
weights are (expert, in, out), else (expert, out, in).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .activation import activate
from .collectives import Rank
from .local_loss import part_of

SCHEMA = (
    "(Tensor x, Tensor ids, Tensor scores, Tensor up, Tensor down, Tensor? up_bias=None, "
    "Tensor? down_bias=None, *, str activation, int num_experts, bool transposed=False) -> Tensor"
)


def run_experts(
    x: Tensor, ids: Tensor, scores: Tensor, *weights: Tensor | None,
    activation: str, transposed: bool, first: int = 0,
) -> Tensor:  # fmt: skip
    """What the experts from ``first`` on add to each token: x (T, in), ids (T, k) to (T, out).

    ``weights`` are up (E, in, width), down (E, width, out) and their biases or None.
    """
    up, down, up_bias, down_bias = (*weights, None, None)[:4]
    assert up is not None
    assert down is not None
    if not transposed:
        up, down = up.transpose(-2, -1), down.transpose(-2, -1)
    count, (tokens, chosen) = up.shape[0], ids.shape
    own = ids.reshape(-1) - first
    own = torch.where((own >= 0) & (own < count), own, count)
    sizes = torch.bincount(own, minlength=count + 1).tolist()[:count]
    places = own.argsort(stable=True)[: sum(sizes)]
    experts = own[places]
    rows = _by_group(x[places // chosen], up, sizes)
    if up_bias is not None:
        rows = rows + up_bias[experts]
    rows = _by_group(activate(activation, rows), down, sizes)
    if down_bias is not None:
        rows = rows + down_bias[experts]
    rows = rows * scores.reshape(-1)[places].unsqueeze(-1)
    spread = rows.new_zeros(tokens * chosen, rows.shape[-1]).index_copy(0, places, rows)
    return spread.view(tokens, chosen, -1).sum(1).to(x.dtype)


def _by_group(rows: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """Sorted rows, each group times its own matrix of ``weight`` (E, in, out)."""
    if rows.is_cuda and _has_kernel(rows, weight):
        ends = torch.tensor(sizes, device=rows.device).cumsum(0, dtype=torch.int32)
        product: Tensor = functional.grouped_mm(rows, weight, offs=ends)
        return product
    groups = zip(torch.split(rows, sizes), weight.unbind(0), strict=True)
    return torch.cat([group @ matrix for group, matrix in groups])


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Whether ``grouped_mm`` takes these: bfloat16 rows of a multiple of 16 bytes."""
    aligned = not (weight.shape[1] % 8 or weight.shape[2] % 8)
    return rows.dtype == torch.bfloat16 and rows.shape[0] > 0 and aligned


def split_experts(
    rank: Rank, x: Tensor, ids: Tensor, scores: Tensor, *weights: Tensor | None,
    axes: tuple[int, ...], **options: Any,
) -> Tensor:  # fmt: skip
    """What this rank's part of the experts, split over ``axes``, adds to each token (P)."""
    assert weights[0] is not None
    first, _ = part_of(rank, weights[0].shape[0], axes)
    return run_experts(x, ids, scores, *weights, first=first, **options)


@torch.library.custom_op("autoparallel::experts", mutates_args=(), schema=SCHEMA)
def experts(  # noqa: PLR0913 - the schema
    x: Tensor, ids: Tensor, scores: Tensor, up: Tensor, down: Tensor,
    up_bias: Tensor | None = None, down_bias: Tensor | None = None, *,
    activation: str, num_experts: int, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """The op on whole tensors."""
    return run_experts(
        x, ids, scores, up, down, up_bias, down_bias, activation=activation, transposed=transposed
    )


@experts.register_fake
def _(
    x: Tensor, ids: Tensor, scores: Tensor, up: Tensor, down: Tensor, *_: Any, **__: Any
) -> Tensor:
    return torch.empty_like(x)


def _remember(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = {name: keyword_only_inputs[name] for name in ("activation", "transposed")}


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient by computing the layer again."""
    copies = [
        None if t is None else t.detach().requires_grad_(needed)
        for t, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
    ]
    with torch.enable_grad():
        made = run_experts(*copies, **ctx.options)  # type: ignore[arg-type]
    wanted = [t for t in copies if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(made, wanted, gradient))
    return tuple(next(found) if t is not None and t.requires_grad else None for t in copies)


experts.register_autograd(_backward, setup_context=_remember)
