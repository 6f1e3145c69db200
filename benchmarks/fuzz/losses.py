"""Losses of random models, as Python text: ``o`` are the outputs, ``y`` classes, ``t`` numbers.

Sequences and images have a target for each position; rows ignore different numbers of them.
"""

from __future__ import annotations

POSITIONS = (
    "F.cross_entropy(o.{flatten(0, 1)|view(-1, K)|reshape(-1, o.size(-1))}, y.{flatten()|view(-1)}{||, label_smoothing=0.1|, weight=WEIGHTS})",
    "F.cross_entropy(o[:, :-1].{flatten(0, 1)|reshape(-1, K)}, y[:, 1:].{flatten()|reshape(-1)}{|, ignore_index=-100})",
    "F.cross_entropy(o.transpose(1, 2), y{|, weight=WEIGHTS|, reduction='sum'|, label_smoothing=0.2})",
    "F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction='sum'{|, weight=WEIGHTS}) / {y.numel()|y.shape[0]|len(o)|o.size(0)|(y != -100).sum()|(B * L)|(y >= 0).sum().clamp(min=1)}",
    "F.cross_entropy(o.transpose(1, 2), y, reduction='none').{mean()|sum(1).mean()|mean(1).sum()|sum() / len(y)|mean(0).sum()}",
    "(F.cross_entropy(o.transpose(1, 2), y, reduction='none').sum(1) / (y >= 0).sum(1).clamp(min=1)).{mean()|sum()|sum() / len(y)}",
    "(F.cross_entropy(o.transpose(1, 2), y, reduction='none') * mask).sum() / mask.sum(){|.clamp(min=1)}",
    "F.cross_entropy(o.transpose(1, 2), y, reduction='none'){[mask].mean()|[y >= 0].sum()|.sum()|.mean()}",
    "F.nll_loss(o.log_softmax(-1).flatten(0, 1), y.flatten(){|, reduction='sum'|, weight=WEIGHTS})",
    "-(o.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0] * (y >= 0)).{mean()|sum() / (y >= 0).sum()|sum(-1).mean()|sum()}",
    "F.cross_entropy(o.flatten(0, 1), y.flatten().clamp(min={0|-100}){, weight=WEIGHTS|, ignore_index=0})",
    "F.cross_entropy(o.flatten(0, 1), y.flatten()) + {0.01|1e-2} * o.logsumexp(-1).pow(2){.mean()|.sum() / len(o)|[mask].mean()}",
    "F.mse_loss(o[..., 0], t{|, reduction='sum'}){| / len(t)}",
    "F.{mse_loss|l1_loss|smooth_l1_loss|huber_loss}(o[..., 0], t, reduction='none'){.mean()|.masked_fill(~mask, 0).sum() / mask.sum()|.sum(1).mean()|.amax(1).mean()|[mask].mean()}",
    "F.binary_cross_entropy_with_logits(o[..., 0], (t > 0).to(o.dtype){|, weight=mask.to(o.dtype)|, pos_weight=o.new_tensor(3.0)|, reduction='sum'})",
    "F.kl_div(o.log_softmax(-1), t[..., None].softmax(-1).expand(o.shape) / K, reduction='{batchmean|mean|sum}')",
    "((o[..., 0] - t).pow(2) * mask).sum() / (t.shape[0] * t.shape[1])",
    "(1 - 2 * (o.softmax(-1)[..., 1] * (y == 1)).sum({1|}) / (o.softmax(-1)[..., 1].sum({1|1}) + 1)).mean()",
    "F.mse_loss(o[..., 0], t).sqrt()",
    "(o[:, -1, 0] - t[:, -1]).abs().mean() + o.square().mean((0, 1)).sum()",
)  # fmt: skip

ROWS = (
    "F.cross_entropy(o, y{||, label_smoothing=0.1|, weight=WEIGHTS|, ignore_index=1|, reduction='sum'})",
    "F.cross_entropy(o, y, reduction='{sum|none}'{|, weight=WEIGHTS}).sum() / {y.shape[0]|len(y)|o.size(0)|y.numel()|(y >= 0).sum()|B}",
    "F.cross_entropy(o, F.one_hot(y.clamp(min=0), K).to(o.dtype){|, label_smoothing=0.1|, reduction='sum'})",
    "F.cross_entropy(o, y, reduction='none'){[y >= 0].mean()|.sum()|.mean()|.median()}",
    "F.nll_loss(o.log_softmax(1), y{|, weight=WEIGHTS|, reduction='sum'})",
    "-o.log_softmax(-1)[torch.arange({len(y)|y.shape[0]}), y.clamp(min=0)].mean()",
    "F.multi_margin_loss(o, y.clamp(min=0){|, reduction='sum'})",
    "F.{mse_loss|l1_loss|smooth_l1_loss}(o[:, 0], t{||, reduction='sum'}){|| / t.shape[0]| / len(t)}",
    "F.binary_cross_entropy_with_logits(o[:, 0], (t > 0).to(o.dtype){|, pos_weight=o.new_tensor([2.0])|, reduction='sum'})",
    "F.binary_cross_entropy(o[:, 0].sigmoid(), (t > 0).to(o.dtype))",
    "F.soft_margin_loss(o[:, 0], t.sign())",
    "F.gaussian_nll_loss(o[:, 0], t, F.softplus(o[:, 1]) + 0.1)",
    "F.poisson_nll_loss(o[:, 0].clamp(max=2), t.abs())",
    "F.cosine_embedding_loss(o, o.roll(1, -1).detach(), t.sign())",
    "F.kl_div(o.log_softmax(-1), torch.full_like(o, 1 / K), reduction='{batchmean|mean|sum}')",
    "F.cross_entropy(F.normalize(o, dim=-1) @ F.normalize(o, dim=-1).t(), torch.arange({len(o)|o.shape[0]}))",
    "(o[:, 0] - t).pow(2).{mean()|sum() / t.size(0)|median()|topk(2).values.mean()|mean().sqrt()|max()}",
    "(o[:, :1] - o[:, :1].t() - (t[:, None] - t)).pow(2).mean()",
    "(o - o.mean(0)).pow(2).mean() + {o.std(0).mean()|(o.t() @ o / len(o)).pow(2).mean()|F.relu(1 - o.var(0)).mean()}",
    "F.cross_entropy(o[:2], y[:2].clamp(min=0))",
    "F.triplet_margin_loss(o, o.flip(0), o.roll(1, 0))",
)  # fmt: skip

PIXELS = (
    "F.cross_entropy(o, y{||, weight=WEIGHTS|, reduction='sum'|, label_smoothing=0.1})",
    "F.cross_entropy(o, y, reduction='none'){.mean()|.flatten(1).sum(1).mean()|.mean((1, 2)).sum()|.sum() / len(y)|[y >= 0].mean()}",
    "F.cross_entropy(o, y, reduction='sum') / {y.numel()|(y != -100).sum()|y.shape[0]}",
    "F.cross_entropy(o.permute(0, 2, 3, 1).reshape(-1, K), y.{flatten()|view(-1)|reshape(-1)}{|, weight=WEIGHTS})",
    "F.mse_loss(o[:, 0], t{|, reduction='sum'}){| / t.shape[0]}",
    "(1 - 2 * (o.softmax(1)[:, 1] * (y == 1)).sum({(1, 2)|}) / (o.softmax(1)[:, 1].sum({(1, 2)|}) + (y == 1).sum({(1, 2)|}) + 1)).mean()",
    "F.l1_loss(o[:, 0], t) + 0.1 * (o[..., 1:] - o[..., :-1]).abs().{mean()|sum() / len(o)}",
)  # fmt: skip
