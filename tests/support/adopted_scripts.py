"""Ordinary training scripts, as functions of the line that adopts autoparallel.

Each takes ``adopt(model, example_batch, **options)``, which gives the model to train, and returns
what the script computes: losses, gradient norms, and losses and logits of its evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import autoparallel

Adopt = Callable[..., Any]
Figures = list[tuple[str, float]]


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.ln_1(x)).split(width, 2)
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(rows, length, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    """Tied embeddings, the logits of the last position alone without targets, own methods."""

    def __init__(self, vocab: int = 64, width: int = 32, layers: int = 2, block: int = 16) -> None:
        super().__init__()
        self.block = block
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(block, width),
                "h": nn.ModuleList(GPTBlock(width, 4) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        parts = self.transformer
        x = parts["wte"](idx) + parts["wpe"](torch.arange(idx.shape[1], device=idx.device))
        for layer in parts["h"]:  # type: ignore[union-attr]
            x = layer(x)
        x = parts["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def configure_optimizers(self, decay: float, rate: float) -> torch.optim.Optimizer:
        parameters = [p for _, p in self.named_parameters() if p.requires_grad]
        matrices = [p for p in parameters if p.dim() >= 2]
        vectors = [p for p in parameters if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate)

    @torch.no_grad()
    def generate(self, idx: Tensor, count: int) -> Tensor:
        for _ in range(count):
            logits, _ = self(idx[:, -self.block :])
            idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), 1)
        return idx


def _tokens(seed: int) -> Iterator[Any]:
    """Batches of tokens and targets; ``send`` the rows and the length."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 64, (1000,), generator=generator)
    size = 8, 16
    while True:
        starts = torch.randint(0, 900, (size[0],), generator=generator).tolist()
        x, y = (torch.stack([data[s + o : s + o + size[1]] for s in starts]) for o in (0, 1))
        y[::3, -5:] = -1
        size = (yield x, y) or (8, 16)


def _norm(parameters: Any, limit: float) -> float:
    norm: Any = torch.nn.utils.clip_grad_norm_(parameters, limit)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def gpt(adopt: Adopt) -> Figures:
    """Accumulation, clipping, warm-up, own optimizer groups, evaluation, generation."""
    torch.manual_seed(0)
    batches = _tokens(1)
    model = adopt(GPT().to("cpu"), next(batches))
    assert isinstance(model, GPT)
    optimizer = model.configure_optimizers(0.1, 1e-2)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 3))
    found: Figures = []
    for step in range(3):
        model.eval()
        with torch.no_grad():
            for size in ((8, 16), (3, 11)):
                x, y = batches.send(size)
                logits, loss = model(x, y)
                found += [("eval", float(loss)), ("logits", float(logits.sum()))]
            found.append(("last", float(model(x)[0].sum())))
        model.train()
        for _ in range(2):
            logits, loss = model(*next(batches))
            if step == 1:
                found.append(("trained logits", float(logits.detach().square().mean())))
            (loss / 2).backward()
        found += [("loss", float(loss)), ("norm", _norm(model.parameters(), 0.5))]
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    text = model.generate(torch.zeros(2, 1, dtype=torch.long), 6)
    return [*found, ("text", float((text * torch.arange(7)).sum()))]


def stepped(adopt: Adopt) -> Figures:
    """By ``Step``: groups by name, accumulation, clipping, warm-up, evaluation at other sizes."""
    torch.manual_seed(0)
    batches = _tokens(1)

    def groups(named_parameters: Any) -> torch.optim.Optimizer:
        named = list(named_parameters)
        decayed = [p for name, p in named if "ln_" not in name and not name.endswith("bias")]
        plain = [p for name, p in named if "ln_" in name or name.endswith("bias")]
        assert decayed
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
            lr=1e-2,
        )

    step = autoparallel.Step(
        adopt(GPT(), next(batches)),
        build_optimizer=groups,
        build_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda count: min(1, (count + 1) / 3)
        ),
        max_norm=0.5,
        accumulate=2,
    )
    found: Figures = []
    for _ in range(3):
        for size in ((8, 16), (3, 11)):
            found.append(("eval", float(step.evaluate(batches.send(size)))))
        found += [("loss", float(step(next(batches)))) for _ in range(2)]
        found.append(("norm", float(step.gradient_norm)))  # type: ignore[arg-type]
    return found


def stepped_outputs(adopt: Adopt) -> Figures:
    """By ``Step``, with a loss that is not the model's and batch norm."""
    torch.manual_seed(0)
    images, labels = torch.randn(24, 3, 12, 12), torch.randint(0, 10, (24,))

    def loss_fn(outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch["labels"])

    def batch(first: int, last: int) -> dict[str, Tensor]:
        return {"x": images[first:last], "labels": labels[first:last]}

    model = adopt(ResNet(), batch(0, 8), loss_fn=loss_fn)
    is_parallel = isinstance(model, autoparallel.ParallelModule)
    step = autoparallel.Step(
        model,
        loss_fn=None if is_parallel else loss_fn,
        build_optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    )
    found: Figures = []
    for first in (0, 8):
        found.append(("loss", float(step(batch(first, first + 8)))))
        found.append(("validation", float(step.evaluate(batch(16, 21)))))
    return found


class Residual(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.down = nn.Conv2d(width, out, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    """Returns logits: the script has the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.layers = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.layers(self.stem(x)).mean((2, 3)))
        return logits


def resnet(adopt: Adopt) -> Figures:
    """Batch norm, a loss outside of the model, accuracy, a validation loop, a schedule."""
    torch.manual_seed(0)
    images, labels = torch.randn(32, 3, 12, 12), torch.randint(0, 10, (32,))
    model = adopt(ResNet(), (images[:8],))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found: Figures = []
    for _ in range(2):
        model.train()
        for first in (0, 8):
            logits = model(images[first : first + 8])
            loss = criterion(logits, labels[first : first + 8])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right = (logits.argmax(-1) == labels[first : first + 8]).float().mean()
            found += [("loss", float(loss)), ("right", float(right))]
        schedule.step()
        model.eval()
        with torch.no_grad():
            for first, last in ((16, 27), (27, 32)):
                logits = model(images[first:last])
                found.append(("validation", float(criterion(logits, labels[first:last]))))
    state = model.state_dict()
    mean: Any = state["layers.0.bn1.running_mean"]
    mean = mean.full_tensor() if hasattr(mean, "full_tensor") else mean
    return [
        *found,
        ("statistics", float(mean.sum())),
        ("batches", float(state["layers.0.bn1.num_batches_tracked"])),
    ]


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )
    return model


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model: nn.Module = BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    return model


def _rows(count: int, length: int, *, is_causal: bool, seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for at in range(count):
        tokens = torch.randint(0, 64, (length,), generator=generator)
        labels = tokens.clone() if is_causal else torch.randint(0, 3, (), generator=generator)
        if is_causal and at % 3 == 0:
            labels[length // 2 :] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def _stacked(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _huggingface(model: nn.Module, adopt: Adopt, *, is_causal: bool) -> Figures:
    train = _rows(24, 16, is_causal=is_causal, seed=1)
    held_out = _stacked(_rows(5, 9, is_causal=is_causal, seed=2))
    model = adopt(model, _stacked(train[:8]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: Figures = []
    for first in (0, 8, 16):
        model.train()
        outputs = model(**_stacked(train[first : first + 8]))
        outputs.loss.backward()
        if first == 8:
            found.append(("trained logits", float(outputs.logits.detach().square().mean())))
        found += [("loss", float(outputs.loss)), ("norm", _norm(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append(("eval", float(model(**held_out).loss)))
            found.append(("logits", float(model(input_ids=held_out["input_ids"]).logits.sum())))
    return found


def causal_lm(adopt: Adopt) -> Figures:
    """A Hugging Face Llama in a plain loop, with masked labels, and greedy generation."""
    kept: list[Any] = []
    found = _huggingface(
        _llama(), lambda *given: kept.append(adopt(*given)) or kept[0], is_causal=True
    )
    with torch.no_grad():
        text = kept[0].generate(
            torch.zeros(2, 3, dtype=torch.long),
            attention_mask=torch.ones(2, 3, dtype=torch.long),
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
        )
    return [*found, ("text", float((text * torch.arange(text.shape[1])).sum()))]


def classifier(adopt: Adopt) -> Figures:
    """A Hugging Face BERT that classifies, in a plain loop."""
    return _huggingface(_bert(), adopt, is_causal=False)


def trainer(
    adopt: Adopt, folder: str, alone: AbstractContextManager[None] | None = None
) -> Figures:
    """``transformers.Trainer``: accumulation by tokens, clipping, warm-up, evaluation, and once
    more from the checkpoint after the first step, which then is read without this package."""
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    rows = _rows(40, 16, is_causal=True, seed=1)
    example = {**_stacked(rows[:8]), "num_items_in_batch": torch.tensor(100)}
    model = adopt(_llama(), example)
    with alone or nullcontext():
        arguments = TrainingArguments(
            output_dir=autoparallel.own_folder(folder),
            max_steps=2,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=5,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            warmup_steps=2,
            weight_decay=0.1,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        training = Trainer(
            model=model, args=arguments, train_dataset=rows[:32], eval_dataset=rows[32:]
        )
        training.train()
        log = [*training.state.log_history]
        training.train(resume_from_checkpoint=f"{arguments.output_dir}/checkpoint-1")
        log += training.state.log_history
    wanted = ("loss", "grad_norm", "learning_rate", "eval_loss")
    read = LlamaForCausalLM.from_pretrained(f"{arguments.output_dir}/checkpoint-2")
    return [
        *((name, float(entry[name])) for entry in log for name in wanted if name in entry),
        *((name, float(value.double().norm())) for name, value in read.named_parameters()),
    ]


def fabric(adopt: Adopt, folder: str, alone: AbstractContextManager[None] | None = None) -> Figures:
    """Lightning Fabric with its own clipping and a DataLoader; it saves, trains on, and loads."""
    from lightning_fabric import Fabric
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    images, labels = torch.randn(24, 3, 12, 12), torch.randint(0, 10, (24,))
    plain = adopt(ResNet(), (images[:8],))
    with alone or nullcontext():
        runner = Fabric(accelerator="cpu", devices=1)
        runner.launch()
        model, optimizer = runner.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
        loader = runner.setup_dataloaders(DataLoader(TensorDataset(images, labels), 8))
        found: Figures = []
        saved = f"{autoparallel.own_folder(folder)}/saved.ckpt"
        state = {"model": model, "optimizer": optimizer}
        for number, (x, y) in enumerate([*loader, next(iter(loader))]):
            if number == 2:
                runner.save(saved, state)
            if number == 3:
                runner.load(saved, state)
            loss = F.cross_entropy(model(x), y)
            runner.backward(loss)
            runner.clip_gradients(model, optimizer, clip_val=0.1)
            optimizer.step()
            optimizer.zero_grad()
            found.append(("loss", float(loss)))
        model.eval()
        with torch.no_grad():
            found.append(("eval", float(model(images[:5]).square().mean())))
    return found
