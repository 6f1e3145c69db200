"""Colours and meanings of the drawn parts of memory and of a step.

A look is a class of the style sheet.
"""

from __future__ import annotations

MEMORY_LOOKS = {
    "parameters": "fill-c1",
    "master": "fill-c2",
    "versions": "fill-c8",
    "gradients": "fill-c3",
    "optimizer": "fill-c4",
    "gathered": "fill-c6",
    "activations": "fill-c5",
    "other": "fill-c8",
}
"""Categories of memory; all others look like ``OTHER_MEMORY``."""

OTHER_MEMORY = "fill-c7"

MEMORY_MEANINGS = {
    "parameters": "what this device holds of the weights",
    "master": "the weights' copy in float32 that the optimizer steps",
    "versions": "older weights that micro-batches under way still need",
    "gradients": "sums over the micro-batches of a step",
    "optimizer": "the optimizer's states, two moments per weight with Adam",
    "gathered": "weights of other devices, gathered for the passes",
    "activations": "what forwards keep for their backwards",
    "recomputation": "what a recomputed forward makes again",
    "inputs": "batches, and what other stages sent",
    "working": "what the running block needs besides",
    "transient": "what the running block needs besides",
    "communication": "messages and buffers of collectives",
    "buffers": "the model's buffers and constants",
    "fragmentation": "gaps in the allocator's memory",
    "communicators": "what NCCL takes for its communicators",
    "reserve": "the context and workspaces of CUDA",
}

TIME_LOOKS = {
    "compute": "fill-c1",
    "communication within the stage": "fill-exposed",
    "sends to the next stage": "fill-c6",
    "gradient synchronization": "fill-c3",
    "optimizer": "fill-c4",
    "waiting for other stages": "fill-wait",
    "other": "fill-wait",
}
"""Parts of a step, in the order in which they are drawn."""
