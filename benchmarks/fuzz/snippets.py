"""The parts that random models are made of, as Python text.

Each snippet keeps the shape of ``x``: ``seq`` is (rows, L, D), ``vec`` (rows, D), ``img``
(rows, C, S, S). In a text, ``@`` is a number of the snippet's own, ``{a|b}`` one of the texts
between the bars, and a line ``FIRST`` or ``SECOND`` the place of further snippets.
Sequences have ``mask``, (rows, L), true where a position counts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Snippet:
    """A part of a model: lines of its constructor and of its forward."""

    name: str
    domains: tuple[str, ...]
    init: str
    forward: str
    weight: float = 1.0


def _one(name: str, domains: str, init: str, forward: str, weight: float = 1.0) -> Snippet:
    return Snippet(name, tuple(domains.split()), init.strip("\n"), forward.strip("\n"), weight)


NORMS = (
    _one("layer norm", "seq vec", "self.norm@ = nn.LayerNorm(D{|, bias=False|, elementwise_affine=False})", "x = self.norm@(x)", 3),
    _one("rms norm", "seq vec", "self.norm@ = nn.RMSNorm(D)", "x = self.norm@(x)"),
    _one("own rms norm", "seq vec", "self.scale@ = nn.Parameter(torch.ones(D))",
         "x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale@"),
    _one("batch norm 1d", "vec", "self.norm@ = nn.BatchNorm1d(D{|, momentum=None|, affine=False|, track_running_stats=False})", "x = self.norm@(x)"),
    _one("batch norm of channels", "seq", "self.norm@ = nn.BatchNorm1d(D)", "x = self.norm@(x.transpose(1, 2)).transpose(1, 2)", 0.6),
    _one("batch norm 2d", "img", "self.norm@ = nn.BatchNorm2d(C{||, momentum=0.3|, track_running_stats=False})", "x = self.norm@(x)", 2),
    _one("group norm", "img", "self.norm@ = nn.GroupNorm({2|1|C}, C)", "x = self.norm@(x)", 1.5),
    _one("group norm of a sequence", "seq", "self.norm@ = nn.GroupNorm(2, D)", "x = self.norm@(x.transpose(1, 2)).transpose(1, 2)", 0.5),
    _one("instance norm", "img", "self.norm@ = nn.InstanceNorm2d(C{|, affine=True|, affine=True, track_running_stats=True})", "x = self.norm@(x)"),
    _one("channels last norm", "img", "self.norm@ = nn.LayerNorm(C)", "x = self.norm@(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)"),
    _one("standardize", "seq vec", "", "x = (x - x.mean({-1|0|(0, -1)}, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-3)", 0.5),
    _one("normalize", "seq vec", "", "x = F.normalize(x, dim=-1) * D**0.5", 0.6),
    _one("weight norm", "seq vec", "self.linear@ = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))", "x = x + self.linear@(x)", 0.4),
    _one("local response norm", "img", "self.norm@ = nn.LocalResponseNorm(2)", "x = self.norm@(x)", 0.3),
)  # fmt: skip

LAYERS = (
    _one("linear", "seq vec", "self.linear@ = nn.Linear(D, D{|, bias=False})", "x = {F.gelu|F.silu|torch.tanh|F.relu}(self.linear@(x))", 2),
    _one("mlp", "seq vec", "self.up@, self.down@ = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)",
         "x = x + self.down@(F.{gelu|relu|softplus|elu}(self.up@(x)))", 3),
    _one("sequential", "seq vec", "self.net@ = nn.Sequential(nn.Linear(D, 3 * D), nn.{GELU|SELU|Mish|Hardswish}(), nn.Linear(3 * D, D))", "x = x + self.net@(x)"),
    _one("gated mlp", "seq vec", "self.gate@, self.up@, self.down@ = (nn.Linear(i, o, bias=False) for i, o in ((D, 2 * D), (D, 2 * D), (2 * D, D)))",
         "x = x + self.down@(F.silu(self.gate@(x)) * self.up@(x))"),
    _one("glu", "seq vec", "self.glu@ = nn.Linear(D, 2 * D)", "x = F.glu(self.glu@(x), dim=-1)", 0.6),
    _one("shared twice", "seq vec", "self.shared@ = nn.Linear(D, D)", "x = x + torch.tanh(self.shared@(torch.tanh(self.shared@(x))))"),
    _one("tied transpose", "seq vec", "self.tied@ = nn.Parameter(torch.randn(2 * D, D) * 0.2)",
         "x = x + F.linear(F.relu(F.linear(x, self.tied@)), self.tied@.{t()|T})"),
    _one("two modules of one weight", "seq vec", "self.a@, self.b@ = nn.Linear(D, D), nn.Linear(D, D)\nself.b@.weight = self.a@.weight",
         "x = x + self.b@(F.relu(self.a@(x)))"),
    _one("frozen linear", "seq vec", "self.frozen@ = nn.Linear(D, D).requires_grad_(False)", "x = x + self.frozen@(x)"),
    _one("frozen bias", "seq vec", "self.part@ = nn.Linear(D, D)\nself.part@.bias.requires_grad_(False)", "x = x + F.relu(self.part@(x))", 0.6),
    _one("low rank adapter", "seq vec", "self.base@ = nn.Linear(D, D).requires_grad_(False)\nself.down@, self.up@ = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)",
         "x = self.base@(x) + 2.0 * self.up@(self.down@(x))", 0.8),
    _one("unused parameter", "seq vec img", "self.unused@ = nn.Linear(3, 3)", "x = x", 0.3),
    _one("bilinear", "vec", "self.bilinear@ = nn.Bilinear(D, D, D)", "x = x + 0.3 * self.bilinear@(x, torch.tanh(x))", 0.6),
    _one("layer scale", "seq vec", "self.scale@ = nn.Parameter(torch.full((D,), 0.7))", "x = x * self.scale@", 0.7),
    _one("scalar gain", "seq vec img", "self.gain@ = nn.Parameter(torch.tensor(0.8))", "x = x * self.gain@", 0.7),
    _one("prelu", "seq vec img", "self.prelu@ = nn.PReLU()", "x = self.prelu@(x)", 0.5),
    _one("einsum", "seq", "self.w@ = nn.Parameter(torch.randn(H, D // H, D) * 0.2)",
         "x = x + torch.einsum('blhd,hde->ble', x.view(x.shape[0], L, H, D // H), self.w@)"),
    _one("experts by softmax", "seq vec", "self.router@ = nn.Linear(D, 3)\nself.experts@ = nn.ModuleList(nn.Linear(D, D) for _ in range(3))",
         "g@ = self.router@(x).softmax(-1)\nx = x + sum(g@[..., i : i + 1] * F.relu(e(x)) for i, e in enumerate(self.experts@))"),
    _one("experts by topk", "seq vec", "self.router@ = nn.Linear(D, 4, bias=False)\nself.experts@ = nn.Parameter(torch.randn(4, D, D) * 0.2)",
         "v@, i@ = self.router@(x).{softmax(-1).topk(2, -1)|topk(2, -1)}\ng@ = torch.zeros_like(self.router@(x)).scatter(-1, i@, v@{.softmax(-1)|})\n"
         "x = x + torch.einsum('...e,...ed->...d', g@, torch.einsum('...d,edf->...ef', x, self.experts@))"),
    _one("switch with capacity loss", "seq", "self.router@ = nn.Linear(D, 2)\nself.e@ = nn.ModuleList(nn.Linear(D, D) for _ in range(2))",
         "p@ = self.router@(x).softmax(-1)\nbest@ = p@.argmax(-1)\n"
         "y@ = torch.zeros_like(x)\nfor i, e in enumerate(self.e@):\n    y@ = torch.where((best@ == i)[..., None], e(x) * p@[..., i, None], y@)\n"
         "aux = aux + 2 * (F.one_hot(best@, 2).to(x.dtype).mean({(0, 1)|(0, 1)}) * p@.mean((0, 1))).sum()\nx = x + y@", 0.7),
    _one("lookup by value", "seq vec", "self.table@ = nn.Embedding(5, D)", "x = x + self.table@(x.detach().sum(-1).abs().mul(3).long() % 5)", 0.6),
    _one("vector quantizer", "seq vec", "self.codes@ = nn.Parameter(torch.randn(6, D))",
         "d@ = torch.cdist(x.reshape(-1, D), self.codes@)\nq@ = self.codes@[d@.argmin(-1)].view_as(x)\n"
         "aux = aux + F.mse_loss(q@, x.detach()) + 0.25 * F.mse_loss(x, q@.detach())\nx = x + (q@ - x).detach()", 0.5),
)  # fmt: skip

SEQUENCE = (
    _one("own attention", "seq", "self.qkv@, self.out@ = nn.Linear(D, 3 * D), nn.Linear(D, D)",
         "q@, k@, v@ = (p.view(x.shape[0], -1, H, D // H).transpose(1, 2) for p in self.qkv@(x).{chunk(3, -1)|split(D, -1)})\n"
         "a@ = F.scaled_dot_product_attention(q@, k@, v@{|, is_causal=True|, attn_mask=mask[:, None, None]})\n"
         "x = x + self.out@(a@.transpose(1, 2).reshape(x.shape[0], L, D))", 3),
    _one("written attention", "seq", "self.q@, self.k@, self.v@ = (nn.Linear(D, D) for _ in range(3))",
         "s@ = self.q@(x) @ self.k@(x).transpose(1, 2) / D**0.5\n"
         "s@ = s@.masked_fill({~mask[:, None]|torch.ones(L, L, dtype=torch.bool).triu(1)|(torch.arange(L)[:, None] - torch.arange(L)).abs() > 2}, {-1e9|torch.finfo(s@.dtype).min|float('-inf')})\n"
         "x = x + s@.softmax(-1) @ self.v@(x)", 2),
    _one("grouped query attention", "seq", "self.q@, self.kv@, self.out@ = nn.Linear(D, D), nn.Linear(D, 2 * (D // H)), nn.Linear(D, D)",
         "q@ = self.q@(x).unflatten(-1, (H, -1)).transpose(1, 2)\nk@, v@ = (p.unsqueeze(1).expand(-1, H, -1, -1) for p in self.kv@(x).chunk(2, -1))\n"
         "x = x + self.out@(F.scaled_dot_product_attention(q@, k@, v@, is_causal=True).transpose(1, 2).flatten(2))"),
    _one("rotary attention", "seq", "self.qkv@, self.out@ = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)\n"
         "self.register_buffer('angles@', torch.outer(torch.arange(L), 100.0 ** -torch.linspace(0, 1, D // H // 2)){|, persistent=False})",
         "c@, s@ = self.angles@.cos().to(x.dtype), self.angles@.sin().to(x.dtype)\nturn@ = lambda t: torch.cat((t.chunk(2, -1)[0] * c@ - t.chunk(2, -1)[1] * s@, t.chunk(2, -1)[0] * s@ + t.chunk(2, -1)[1] * c@), -1)\n"
         "q@, k@, v@ = self.qkv@(x).view(len(x), L, 3, H, -1).permute(2, 0, 3, 1, 4)\n"
         "x = x + self.out@(F.scaled_dot_product_attention(turn@(q@), turn@(k@), v@, is_causal=True).transpose(1, 2).flatten(2))"),
    _one("multihead attention", "seq", "self.attn@ = nn.MultiheadAttention(D, H, batch_first=True{|, bias=False|, add_zero_attn=True|, add_bias_kv=True})",
         "a@, w@ = self.attn@(x, x, x{|, key_padding_mask=~mask}{|, need_weights=False})\nx = x + a@", 2),
    _one("multihead attention, sequence first", "seq", "self.attn@ = nn.MultiheadAttention(D, H)",
         "y@ = x.transpose(0, 1)\nx = x + self.attn@(y@, y@, y@, key_padding_mask=~mask{|, average_attn_weights=False})[0].transpose(0, 1)"),
    _one("encoder layer", "seq", "self.layer@ = nn.TransformerEncoderLayer(D, H, 2 * D, dropout=0.0, batch_first=True{|, norm_first=True|, activation='gelu'})",
         "x = self.layer@(x{|, src_key_padding_mask=~mask})", 1.5),
    _one("encoder", "seq", "self.encoder@ = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 2 * D, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False)",
         "x = self.encoder@(x{|, mask=nn.Transformer.generate_square_subsequent_mask(L, dtype=x.dtype), is_causal=True})", 0.7),
    _one("decoder layer", "seq", "self.decoder@ = nn.TransformerDecoderLayer(D, H, 2 * D, dropout=0.0, batch_first=True)", "x = self.decoder@(x, torch.tanh(x)[:, :2])", 0.7),
    _one("lstm", "seq", "self.rnn@ = nn.LSTM(D, D{|, num_layers=2}, batch_first=True)", "y@, (h@, c@) = self.rnn@(x)\nx = x + y@{| + c@[-1:].transpose(0, 1)}", 0.7),
    _one("gru", "seq", "self.rnn@ = nn.GRU(D, D // 2, bidirectional=True, batch_first=True)", "x = x + self.rnn@(x)[0]", 0.7),
    _one("lstm cell", "seq", "self.cell@ = nn.{LSTM|LSTM}Cell(D, D)",
         "h@ = c@ = x.new_zeros(x.shape[0], D)\nys@ = []\nfor t in range(L):\n    h@, c@ = self.cell@(x[:, t], (h@, c@))\n    ys@.append(h@)\nx = x + torch.stack(ys@, 1)", 0.4),
    _one("convolution 1d", "seq", "self.conv@ = nn.Conv1d(D, D, 3, padding=1{|, groups=D|, groups=2|, bias=False})", "x = x + F.gelu(self.conv@(x.transpose(1, 2)).transpose(1, 2))", 1.5),
    _one("causal convolution", "seq", "self.conv@ = nn.Conv1d(D, D, 3{|, dilation=2})", "x = x + self.conv@(F.pad(x.transpose(1, 2), (2 * self.conv@.dilation[0], 0))).transpose(1, 2)"),
    _one("transposed convolution 1d", "seq", "self.conv@ = nn.ConvTranspose1d(D, D, 3, padding=1)", "x = x + self.conv@(x.transpose(1, 2)).transpose(1, 2)", 0.5),
    _one("scan", "seq", "self.decay@ = nn.Parameter(torch.zeros(D))",
         "s@ = x.new_zeros(len(x), D)\nys@ = []\nfor t in range(x.shape[1]):\n    s@ = torch.sigmoid(self.decay@) * s@ + x[:, t]\n    ys@.append(s@)\nx = torch.stack(ys@, dim=1)", 0.6),
    _one("cumulative mean", "seq", "", "x = x.cumsum(1) / torch.arange(1, L + 1, dtype=x.dtype)[:, None]", 0.6),
    _one("mixer", "seq", "self.mix@ = nn.Linear(L, L)", "x = x + self.mix@(x.transpose(1, 2)).transpose(1, 2)"),
    _one("position embedding", "seq", "self.pos@ = nn.Embedding(L, D)", "x = x + self.pos@(torch.arange(x.{shape[1]|size(1)}))"),
    _one("position parameter", "seq", "self.pos@ = nn.Parameter(torch.randn(1, L + 3, D) * 0.1)", "x = x + self.pos@[:, :{L|x.shape[1]}]"),
    _one("relative bias", "seq", "self.bias@ = nn.Embedding(2 * L, H)\nself.qkv@ = nn.Linear(D, 3 * D)",
         "b@ = self.bias@(torch.arange(L)[:, None] - torch.arange(L) + L).permute(2, 0, 1)\nq@, k@, v@ = self.qkv@(x).view(x.size(0), L, 3, H, -1).permute(2, 0, 3, 1, 4)\n"
         "x = x + F.scaled_dot_product_attention(q@, k@, v@, attn_mask=b@).transpose(1, 2).flatten(2)", 0.8),
    _one("class token", "seq", "self.cls@ = nn.Parameter(torch.randn(1, 1, D))\nself.layer@ = nn.TransformerEncoderLayer(D, H, D, dropout=0.0, batch_first=True)",
         "y@ = torch.cat((self.cls@.{expand(x.shape[0], -1, -1)|expand(len(x), 1, D)|repeat(x.shape[0], 1, 1)}, x), 1)\ny@ = self.layer@(y@)\nx = y@[:, 1:] + y@[:, :1]", 0.8),
    _one("pad and unpad", "seq", "self.linear@ = nn.Linear(D, D)", "x = self.linear@(F.pad(x, (0, 0, 1, 2)))[:, 1 : L + 1]", 0.5),
    _one("masked pooling", "seq", "self.pool@ = nn.Linear(D, D)", "m@ = mask.to(x.dtype)[..., None]\nx = x + self.pool@((x * m@).sum(1) / m@.sum(1).clamp(min=1))[:, None]"),
    _one("mask out", "seq", "", "x = x{ * mask[..., None]|.masked_fill(~mask[..., None], 0.0)| * mask.unsqueeze(-1).to(x.dtype)}", 0.8),
)  # fmt: skip

IMAGES = (
    _one("convolution", "img", "self.conv@ = nn.Conv2d(C, C, 3, padding=1{|, groups=2|, bias=False|, padding_mode='circular'|, padding_mode='reflect'})", "x = {F.relu|F.silu}(self.conv@(x))", 3),
    _one("depthwise block", "img", "self.dw@, self.pw@ = nn.Conv2d(C, C, 3, padding=1, groups=C), nn.Conv2d(C, C, 1)", "x = x + self.pw@(F.hardswish(self.dw@(x)))", 1.5),
    _one("residual block", "img", "self.c@, self.d@ = nn.Conv2d(C, 2 * C, 3, padding=1), nn.Conv2d(2 * C, C, 3, padding=1)\nself.n@ = nn.{BatchNorm2d(2 * C)|GroupNorm(2, 2 * C)}", "x = F.relu(x + self.d@(F.relu(self.n@(self.c@(x)))))", 2),
    _one("u-net step", "img", "self.down@, self.up@ = nn.Conv2d(C, 2 * C, 3, stride=2, padding=1), nn.ConvTranspose2d(2 * C, C, 2, stride=2)", "x = x + self.up@(F.relu(self.down@(x)))"),
    _one("pool and upsample", "img", "self.conv@ = nn.Conv2d(C, C, 1)", "x = x + F.interpolate(self.conv@(F.{max|avg}_pool2d(x, 2)), scale_factor=2{|, mode='bilinear', align_corners=False})"),
    _one("squeeze and excite", "img", "self.fc@ = nn.Sequential(nn.Linear(C, 4), nn.ReLU(), nn.Linear(4, C), nn.Sigmoid())", "x = x * self.fc@(x.mean((2, 3)))[..., None, None]"),
    _one("pixel shuffle", "img", "self.conv@ = nn.Conv2d(C, 4 * C, 1)", "x = x + F.avg_pool2d(F.pixel_shuffle(self.conv@(x), 2), 2)", 0.5),
    _one("attention over pixels", "img", "self.qkv@ = nn.Conv2d(C, 3 * C, 1)",
         "q@, k@, v@ = (t.flatten(2).transpose(1, 2) for t in self.qkv@(x).chunk(3, 1))\nx = x + F.scaled_dot_product_attention(q@, k@, v@).transpose(1, 2).reshape(x.shape)"),
    _one("dense concat", "img", "self.grow@, self.back@ = nn.Conv2d(C, 4, 3, padding=1), nn.Conv2d(C + 4, C, 1)", "x = self.back@(torch.cat((x, F.relu(self.grow@(x))), 1))"),
    _one("adaptive pool", "img", "", "x = x + F.adaptive_avg_pool2d(x, 1)", 0.5),
    _one("roll", "img", "", "x = x + torch.roll(x, (1, -1), (2, 3))", 0.5),
)  # fmt: skip
