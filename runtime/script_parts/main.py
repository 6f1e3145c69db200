"""The command line of a script, and its loop over steps."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .training import load_weights, write_weights
from .weights import MASTER

INPUTS: dict[str, tuple[Any, torch.dtype, tuple[int, ...]]] = {}


def named(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a global batch by the input names of the stages."""
    tensors = {}
    for name, (key, dtype, shape) in INPUTS.items():
        tensor = batch[key]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"a batch has {key} of shape {tuple(tensor.shape)}, not {shape}")
        tensors[name] = tensor.to(dtype) if dtype.is_floating_point else tensor
    return tensors


def main(
    new_model: Callable[[], nn.Module],
    batches: Callable[[int], Iterator[Any]],
    new_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    new_scheduler: Callable[[torch.optim.Optimizer], Any],
    new_trainer: Callable[[nn.Module, torch.device], Any],
) -> None:
    """Train on this rank as the command line asks, with the objects that the arguments make."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1, help="batches per update")
    parser.add_argument("--max-norm", type=float, help="clip the gradient to this norm")
    parser.add_argument("--weights", help="whole tensors to start from: .pt, .safetensors")
    parser.add_argument("--save", help="the file to write the weights to")
    asked = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(asked.seed)
    model = new_model().to(MASTER)
    if asked.weights:
        load_weights(model, asked.weights)
    trainer = new_trainer(model, device)
    optimizer = new_optimizer(trainer.named_masters())
    scheduler, data = new_scheduler(optimizer), batches(asked.seed)
    for step in range(asked.steps):
        losses = []
        for part in range(asked.accumulate):
            number = step * asked.accumulate + part
            trainer.begin(named(next(data)), asked.seed, number)
            trainer.run(1 / asked.accumulate, is_last=part == asked.accumulate - 1)
            losses.append(trainer.loss())
        norm, loss = trainer.update(optimizer, asked.max_norm), sum(losses) / len(losses)
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss)
        elif scheduler is not None:
            scheduler.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss:.17g}  norm {norm:.6g}", flush=True)
    if asked.save:
        state = trainer.whole_state(model)
        if dist.get_rank() == 0:
            write_weights(asked.save, state)
    dist.destroy_process_group()
