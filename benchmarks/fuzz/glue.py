"""Parts of random models that are no layers: arithmetic, writes in place, buffers, skips, regions.

Texts as in ``snippets``.
"""

from __future__ import annotations

from benchmarks.fuzz.snippets import Snippet, _one

NUMBERS = (
    _one("batch mean by size", "seq vec img", "", "x = x - 0.5 * x.sum(0, keepdim=True) / {x.shape[0]|len(x)|x.size(0)}"),
    _one("batch mean", "seq vec img", "", "x = x - x.mean(0{, keepdim=True|})", 0.8),
    _one("share of the batch", "vec", "", "x = x + x.softmax(0)", 0.5),
    _one("scaled by size", "seq vec img", "", "x = x * ({x.shape[0]|len(x)|x.size()[0]} ** -0.5)", 0.5),
    _one("scaled by count", "seq vec img", "", "x = x / x.numel() * 100", 0.4),
    _one("rank of row", "seq vec", "", "x = x + 0.1 * torch.arange({x.shape[0]|len(x)}, dtype=x.dtype).view({-1|len(x)}, *[1] * (x.dim() - 1))", 0.6),
    _one("flip rows", "seq vec", "", "x = x + 0.5 * x.flip({0|-1})", 0.5),
    _one("roll rows", "seq vec", "", "x = x + 0.5 * x.roll({1|-1}, {0|-1})", 0.5),
    _one("pairs", "vec", "", "x = x + 0.1 * (x @ x.t()).softmax(-1) @ x", 0.6),
    _one("row order", "vec", "", "x = x[x.detach()[:, 0].argsort()]", 0.4),
    _one("sort", "seq vec", "", "x = x + x.sort({-1|-1, descending=True})[0]", 0.4),
    _one("maximum", "seq vec", "", "x = x - {x.amax(-1, keepdim=True)|x.max(-1, keepdim=True).values|x.detach().abs().max()|x.max()|x.amax(0, keepdim=True)}", 0.7),
    _one("global scale", "seq vec img", "", "x = x / (x{|.detach()}.{norm()|abs().mean()|std()|pow(2).mean().sqrt()|abs().sum()} + 1)", 0.8),
    _one("clamp", "seq vec img", "", "x = {x.clamp(-1, 1)|x.clamp(min=-0.5)|torch.minimum(x, x.new_tensor(1.0))|F.hardtanh(x)}", 0.7),
    _one("where", "seq vec img", "", "x = torch.where(x > {0|x.mean()|x.mean(-1, keepdim=True)}, x, 0.1 * x)", 0.7),
    _one("power", "seq vec", "", "x = {x.abs().pow(1.5)|x.sign() * x.abs().sqrt().clamp(min=1e-3)|torch.log1p(x.abs())|torch.expm1(x.clamp(max=1))|x.sin() + x}", 0.7),
    _one("cast", "seq vec img", "", "x = x + 0 * x.{long().to(x.dtype)|float().to(x.dtype)|double().to(x.dtype)}", 0.4),
    _one("number from tensor", "seq vec img", "", "x = x * torch.tensor({0.5|[1.5]}, dtype=x.dtype)", 0.4),
    _one("repeat and reduce", "vec seq", "", "x = x.repeat_interleave(2, 0).unflatten(0, {(-1, 2)|(len(x), 2)}).{mean|sum}(1)", 0.4),
    _one("stack rows", "vec", "self.mix@ = nn.Linear(2 * D, 2 * D)", "x = self.mix@(x.reshape(-1, 2 * D)).reshape(-1, D)", 0.4),
    _one("flatten and restore", "seq", "self.mix@ = nn.Linear(L * D, L * D)", "x = self.mix@(x.flatten(1)).{view(x.shape)|unflatten(1, (L, D))|view(-1, L, D)}", 0.6),
    _one("merge rows and positions", "seq", "self.mix@ = nn.Linear(D, D)", "x = self.mix@(x.{reshape(-1, D)|view(x.shape[0] * x.shape[1], D)|flatten(0, 1)}).{view(-1, L, D)|unflatten(0, (-1, L))|view(*x.shape)}", 0.8),
)  # fmt: skip

WRITES = (
    _one("write column", "seq vec img", "", "x = x.clone()\nx[:, {0|:2|-1}] = {0|x[:, 1:2].mean()|2 * x[:, 1:2].mean()}", 0.5),
    _one("write first row", "seq vec img", "", "x = x.clone()\nx[{0|-1|:2|::2}] {=|*=|+=} 0.5", 0.6),
    _one("write in place", "seq vec img", "", "x = x * 1\nx.{mul_(0.5)|add_(1)|clamp_(min=-1)|tanh_()}", 0.7),
    _one("write by mask", "seq vec img", "", "x = x.clone()\nx[x {>|<} 1] = {1.0|0.0}", 0.6),
    _one("write by padding", "seq", "", "x = x.clone()\nx[~mask] = 0", 0.6),
    _one("gather positions", "seq", "", "x = x + x[:, {torch.arange(L - 1, -1, -1)|torch.arange(L) // 2|torch.randperm(L, generator=torch.Generator().manual_seed(0))}]", 0.5),
    _one("last valid position", "seq", "", "x = x + x[torch.arange({len(x)|x.shape[0]}), mask.sum(1){ - 1|.sub(1)}][:, None]", 0.7),
    _one("gather", "seq", "", "x = x + x.gather(1, mask.sum(1).sub(1).view(-1, 1, 1).expand(-1, 1, D))", 0.6),
    _one("scatter_add groups", "vec", "", "g@ = x.new_zeros(3, D).index_add(0, torch.arange(len(x)) % 3, x)\nx = x + g@[torch.arange(len(x)) % 3] / 3", 0.5),
    _one("put into buffer-like", "seq", "", "y@ = torch.zeros_like(x)\ny@[:, {1:|:-1}] = x[:, {:-1|1:}]\nx = x + y@", 0.7),
    _one("narrow copy", "seq vec img", "", "y@ = torch.empty_like(x)\ny@.copy_(x)\nx = x + y@", 0.4),
    _one("fill rows", "seq vec", "", "y@ = x.new_zeros(x.shape)\nfor i in range(L if x.dim() == 3 else D):\n    y@[:, i] = x[:, i] * (i + 1)\nx = y@", 0.4),
    _one("diagonal", "vec", "self.diag@ = nn.Parameter(torch.randn(D) * 0.3)", "x = x + x @ torch.{diag|diag_embed}(self.diag@)", 0.4),
)  # fmt: skip

BUFFERS = (
    _one("moving mean", "seq vec", "self.register_buffer('mean@', torch.zeros(D))",
         "if self.training:\n    with torch.no_grad():\n        self.mean@.{lerp_(x.reshape(-1, D).mean(0), 0.1)|mul_(0.9).add_(x.reshape(-1, D).mean(0), alpha=0.1)}\nx = x - self.mean@"),
    _one("moving mean by copy", "seq vec", "self.register_buffer('mean@', torch.zeros(D))",
         "if self.training:\n    self.mean@.copy_(0.9 * self.mean@ + 0.1 * x.detach().reshape(-1, D).{mean(0)|amax(0)})\nx = x - self.mean@", 0.7),
    _one("moving mean by assignment", "seq vec", "self.register_buffer('mean@', torch.zeros(D))",
         "if self.training:\n    self.mean@ = 0.9 * self.mean@ + 0.1 * x.detach().reshape(-1, D).mean(0)\nx = x - self.mean@", 0.7),
    _one("call counter", "seq vec img", "self.register_buffer('calls@', torch.zeros((){, dtype=torch.long|}))", "if self.training:\n    self.calls@ += 1\nx = x * (1 + 0.1 * self.calls@)", 0.8),
    _one("sample counter", "seq vec img", "self.register_buffer('seen@', torch.tensor(0))", "if self.training:\n    self.seen@ += {x.shape[0]|len(x)|x.numel()}\nx = x / (1 + 0.01 * self.seen@)", 0.8),
    _one("largest seen", "seq vec", "self.register_buffer('top@', torch.zeros(()))", "self.top@.copy_(torch.maximum(self.top@, x.detach().abs().max()))\nx = x / (1 + self.top@)", 0.6),
    _one("queue", "vec", "self.register_buffer('queue@', torch.zeros(4, D))", "x = x + 0.1 * x @ self.queue@.t() @ self.queue@\nif self.training:\n    self.queue@.copy_(torch.cat((x.detach()[:2], self.queue@[:2])))", 0.5),
    _one("constant buffer", "seq vec", "self.register_buffer('shift@', torch.linspace(-1, 1, D){|, persistent=False})", "x = x + self.shift@", 0.6),
    _one("moving weight", "seq vec", "self.student@ = nn.Linear(D, D)\nself.register_buffer('teacher@', self.student@.weight.detach().clone())",
         "if self.training:\n    with torch.no_grad():\n        self.teacher@.lerp_(self.student@.weight, 0.2)\naux = aux + (self.student@(x) - F.linear(x, self.teacher@)).pow(2).mean()\nx = x + self.student@(x)", 0.7),
    _one("class counts", "seq", "self.register_buffer('counts@', torch.zeros(3))", "with torch.no_grad():\n    self.counts@ += torch.bincount({mask.sum(1) % 3|(x[..., 0] > 0).long().flatten()}, minlength=3)\nx = x * (1 + self.counts@[0] / (1 + self.counts@.sum()))", 0.5),
    _one("statistics of tokens", "seq", "self.register_buffer('var@', torch.ones(D))", "v@ = x.{flatten(0, 1).var(0)|var((0, 1))|var((0, 1), unbiased=False)|reshape(-1, D).std(0)}\nif self.training:\n    with torch.no_grad():\n        self.var@.mul_(0.9).add_(v@.detach(), alpha=0.1)\nx = x / (v@ + 0.1)", 0.6),
)  # fmt: skip

REGIONS = (
    _one("residual", "seq vec img", "", "r@ = x\nFIRST\nx = r@ + x", 3),
    _one("branches", "seq vec", "self.join@ = nn.Linear(2 * D, D)", "a@ = x\nFIRST\na@, x = x, a@\nSECOND\nx = self.join@(torch.cat((a@, x), -1))", 1),
    _one("gated branches", "seq vec img", "", "a@ = x\nFIRST\na@, x = x, a@\nSECOND\nx = {x * torch.sigmoid(a@)|torch.stack((a@, x)).mean(0)|torch.maximum(a@, x)|a@ - x}", 1),
    _one("no_grad", "seq vec img", "", "r@ = x\nwith torch.no_grad():\n    FIRST\nx = r@ + {x|0.5 * x|torch.tanh(x)}", 1),
    _one("inference_mode", "seq vec img", "", "r@ = x\nwith torch.inference_mode():\n    FIRST\nx = r@ + x.clone()", 0.3),
    _one("detached input", "seq vec img", "", "r@ = x\nx = x.detach()\nFIRST\nx = r@ + x", 0.8),
    _one("detached output", "seq vec img", "", "r@ = x\nFIRST\nx = r@ + x{.detach()| - x.detach()}", 0.8),
    _one("straight through", "seq vec", "", "r@ = x\nFIRST\nx = r@ + (x - r@).detach()", 0.4),
    _one("auxiliary loss", "seq vec img", "", "r@ = x\nFIRST\naux = aux + 0.1 * {x.pow(2).mean()|(x - r@).abs().mean()|x.pow(2).sum() / x.shape[0]|x.pow(2).sum() / len(x)|x.pow(2).mean(-1).sum() / x.size(0)|x.abs().sum() / x.numel()|x.std()|torch.logsumexp(x, -1).mean()|x.flatten(1).sum(1).pow(2).mean()}", 1.2),
    _one("checkpointed", "seq vec img", "", "def region@(x):\n    {aux = 0|aux = x.sum() * 0}\n    FIRST\n    return x\n\nx = torch.utils.checkpoint.checkpoint(region@, x, use_reentrant=False)", 0.4),
)  # fmt: skip

GLUE: tuple[Snippet, ...] = (*NUMBERS, *WRITES, *BUFFERS)
