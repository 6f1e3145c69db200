"""Stage programs run forward and backward on fake CUDA tensors, every op watched.

``python tests/support/cuda_programs.py NAME ... [PLAN ...]`` prints, for every name (a folder of
``tests/zoo``), one line of JSON: how many ops ran, and what none of them may do on a GPU. No op
may make or read a CPU tensor, and none may make the host wait for a value of the device.

A build of torch without CUDA has no device guard for it, and autograd then ends the process. So a
guard that does nothing is compiled and loaded before torch; hence a process of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PLANS = ("dp=1,pp=1", "dp=2,zero=2", "tp=2", "tp=2,recompute=full,microbatches=2")
GUARD = """
#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>)
}
namespace at::accelerator {
bool isAccelerator(c10::DeviceType) { return false; }
}
"""


def load_guard() -> None:
    """Have autograd take CUDA tensors for ones of a device without streams."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    assert "torch" not in sys.modules
    home = Path(spec.origin).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(GUARD)
        paths = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
        linked = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(
            [
                "g++",
                "-std=c++20",
                "-shared",
                "-fPIC",
                "-w",
                *paths,
                str(source),
                *linked,
                "-o",
                str(library),
            ],
            check=True,
        )
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    load_guard()

import torch  # noqa: E402
from torch import Tensor, fx, nn  # noqa: E402
from torch._subclasses.fake_tensor import (  # noqa: E402
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from autoparallel.cost_model.cluster.shorthand import parse_cluster  # noqa: E402
from autoparallel.options.parse import parse_parallel  # noqa: E402
from autoparallel.options.plan_options import PlanOptions  # noqa: E402
from autoparallel.passes.local.local_functions import (  # noqa: E402
    balanced_causal_attention,
    split_causal_attention,
)
from autoparallel.passes.local.stage_program import StageProgram, build_stage  # noqa: E402
from autoparallel.passes.memory.saved_tensors import FakeRanks  # noqa: E402
from autoparallel.passes.ops.collectives import Rank  # noqa: E402
from autoparallel.passes.ops.experts import run_experts  # noqa: E402
from autoparallel.passes.ops.local_loss import cross_entropy  # noqa: E402
from autoparallel.passes.ops.random_ops import random_bits  # noqa: E402
from autoparallel.passes.ops.ring import ring_attention  # noqa: E402
from autoparallel.passes.programs.constants import evaluate_constants  # noqa: E402
from autoparallel.passes.programs.program import Program  # noqa: E402
from autoparallel.planner.graph.graph import Node, TensorSpec  # noqa: E402
from autoparallel.planner.graph.layout import Layout, Mesh, local_shape  # noqa: E402
from autoparallel.planner.plan import Plan  # noqa: E402
from autoparallel.planning.capture import capture_target  # noqa: E402
from autoparallel.planning.plan import plan_program  # noqa: E402
from autoparallel.target.load import load_target  # noqa: E402

CUDA = torch.device("cuda", 0)
FUNCTIONS, MISTAKES = "functions", "mistakes"
GLOBAL_BATCH, SEQ = 4, 16
WAITING = frozenset(
    {
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "equal",
        "nonzero",
        "masked_select",
        "bincount",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
    }
)
"""Ops for whose result, or its shape, CUDA makes the host wait."""


class Watch(TorchDispatchMode):
    """While inside, what is wrong with each op for a GPU, as text."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.found = 0, dict[str, None]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += 1
        if name in WAITING or (name == "index" and _has_mask(args[1])):
            self.found[f"{func} makes the host wait"] = None
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = func(*args, **(kwargs or {}))
        self._check(f"{func} reads", read)
        self._check(
            f"{func} makes", [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        )
        return made

    def _check(self, what: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type != "cuda":
                shape = tuple(tensor.shape)
                self.found[f"{what} a tensor {shape} of the {tensor.device.type}"] = None


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _empty(mesh: Mesh, layout: Layout, spec: TensorSpec) -> Tensor:
    shape = local_shape(spec.shape, layout, mesh.shape)
    return torch.empty(shape, dtype=getattr(torch, spec.dtype), device=CUDA)


def run_stage(program: StageProgram, constants: Mapping[str, Tensor]) -> None:
    """One micro-batch on fake tensors: the counting, the forward and the backward."""
    mesh = program.mesh
    known: dict[str, Tensor] = {}
    for declared in (program.parameters, program.buffers):
        for name, held in declared.items():
            tensor = _empty(mesh, held.layout, held.spec)
            is_parameter = declared is program.parameters
            if is_parameter:
                tensor = nn.Parameter(tensor, requires_grad=held.spec.requires_grad)
            known[name] = tensor
            for block in program.blocks:
                if name in (*block.parameters, *block.buffers):
                    prefix, _, attribute = name.rpartition(".")
                    setattr(block.module.get_submodule(prefix), attribute, tensor)
    for name, held in {**program.inputs, **program.constants}.items():
        known[name] = _empty(mesh, held.layout, held.spec)
    for sent in program.receives:
        value = _empty(mesh, sent.target_layout, sent.spec)
        known[sent.key] = value.requires_grad_(sent.spec.requires_grad)
    if program.counting is not None:
        whole = {**known, **constants}

        def value_of(node: Node, _: int) -> Tensor:
            if node.kind != "input":
                return whole[node.name]
            return torch.empty(node.spec.shape, dtype=getattr(torch, node.spec.dtype), device=CUDA)

        known.update(program.counting.evaluate(value_of))
    for block in program.blocks:
        inputs = [known[key] for key in block.inputs]
        if block.recompute == "none":
            outputs = block.module(*inputs)
        else:
            outputs = checkpoint(
                block.module, *inputs, use_reentrant=False, preserve_rng_state=False
            )
        known.update(zip(block.outputs, outputs, strict=True))
    leaving = [sent.key for sent in program.sends]
    leaving += [program.loss] if program.loss is not None else []
    ends = [known[key] for key in leaving if known[key].requires_grad]
    torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])


def cpu_literals(module: fx.GraphModule) -> Iterator[str]:
    """What a program holds of the CPU: devices among its arguments, tensors among its values."""
    for node in module.graph.nodes:
        for leaf in tree_leaves((node.args, node.kwargs)):
            if isinstance(leaf, torch.device) and leaf.type == "cpu":
                yield f"{node.name}: {node.target} is told to be on the cpu"
        if node.op == "get_attr":
            held: Any = module
            for part in str(node.target).split("."):
                held = getattr(held, part)
            if not isinstance(held, nn.Parameter) and held.device.type == "cpu":
                yield f"{node.name}: the program holds {node.target} on the cpu"


def watch_plan(program: Program, plan: Plan) -> tuple[int, list[str]]:
    """The number of ops, and what is wrong with any of them, over a plan's stages."""
    graph = program.graph.with_batch_size(plan.microbatch_size)
    count, found = 0, dict[str, None]()
    for index, stage in enumerate(plan.stages):
        first = (0,) * len(stage.mesh.shape)
        with FakeTensorMode(allow_non_fake_inputs=True):
            own = build_stage(
                graph,
                program.blocks,
                plan,
                stage_index=index,
                coordinates=first,
                communicator=FakeRanks(stage.mesh, first, "nccl"),
            )
            modules = [block.module for block in own.blocks]
            if own.counting is not None and own.counting.program is not None:
                modules.append(own.counting.program)
            for module in modules:
                found.update(dict.fromkeys(cpu_literals(module)))
            constants = _constants(program, own)
            for name, value in constants.items():
                if value.device.type != "cuda":
                    found[f"constant {name} is made on the {value.device.type}"] = None
            with Watch() as watch:
                run_stage(own, constants)
        count += watch.count
        found.update(watch.found)
    return count, list(found)


def _constants(program: Program, stage: StageProgram) -> dict[str, Tensor]:
    """The constants' whole values, on fake tensors, as the runtime makes them on the device."""
    leaves = stage.counting.leaves if stage.counting is not None else ()
    names = [
        n
        for n in {**stage.constants, **dict.fromkeys(leaves)}
        if program.graph[n].kind == "constant"
    ]
    held = {name: value.to(CUDA) for name, value in program.literals.items()}
    for node in program.graph:
        if node.kind == "buffer" and node.name not in held:
            dtype = getattr(torch, node.spec.dtype)
            held[node.name] = torch.empty(node.spec.shape, dtype=dtype, device=CUDA)
    return evaluate_constants(program.graph, names, device="cuda", buffers=held)


def watch_model(name: str, parallels: Sequence[str] = PLANS) -> dict[str, Any]:
    """Of each plan of a model of the zoo the number of ops and what is wrong with them.

    A model whose samples meet, or cannot be followed, has one micro-batch in every plan.
    """
    target = load_target(f"hf:tests/zoo/{name}", {})
    seq = SEQ if target.takes_seq else None
    found: dict[str, Any] = {}
    captured: Program | None = None
    for parallel in parallels:
        options = PlanOptions(
            global_batch=GLOBAL_BATCH, seq=seq, precision="bf16", forced=parse_parallel(parallel)
        )
        captured = captured or capture_target(target, options)
        if not captured.graph.batch_dims:
            options = replace(options, forced=replace(options.forced, num_microbatches=None))
        devices = 1 if parallel.startswith("dp=1") else 2
        plan = plan_program(captured, target, parse_cluster(f"{devices}xH100"), options)
        count, problems = watch_plan(captured, plan)
        found[parallel] = {"ops": count, "problems": problems}
    return {"name": name, "plans": found}


def watch_functions() -> dict[str, Any]:
    """What ops of our own compute with, and what no model of the zoo has a program call."""
    mesh = Mesh(("tp",), (2,))
    rank = Rank(mesh, (0,), FakeRanks(mesh, (0,), "nccl"))
    found: dict[str, dict[str, Any]] = {}
    with FakeTensorMode():

        def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=CUDA, requires_grad=True)

        ids = torch.zeros(8, 2, dtype=torch.int64, device=CUDA)
        silu = '[["functional.silu", [{"at": 0}], {}]]'
        calls = {
            "experts in float32": lambda: run_experts(
                made(8, 16),
                ids,
                made(8, 2),
                made(4, 32, 16),
                made(4, 16, 32),
                made(4, 32),
                made(4, 16),
                activation=silu,
                transposed=False,
            ),
            "cross entropy of soft targets": lambda: cross_entropy(
                rank,
                made(8, 4),
                made(8, 4),
                reduction=1,
                ignore_index=-100,
                label_smoothing=0.1,
                axes=((0,), ()),
            ),
            "random bits": lambda: random_bits((4, 8, 16), (0, 8, 0), number=1, key=7, device=CUDA),
            "causal attention of split positions": lambda: split_causal_attention(
                rank,
                made(2, 4, 8, 16),
                made(2, 2, 16, 16),
                made(2, 2, 16, 16),
                axes=(0,),
                dropout_p=0.0,
                scale=None,
                enable_gqa=True,
            ),
            "balanced causal attention": lambda: balanced_causal_attention(
                rank,
                made(2, 4, 8, 16),
                made(2, 2, 16, 16),
                made(2, 2, 16, 16),
                axes=(0,),
                balanced=(0,),
                scale=None,
                enable_gqa=True,
            ),
            **{
                f"ring attention in {dtype}, values of {size}": lambda dtype=dtype, size=size: (
                    ring_attention(
                        rank,
                        made(2, 4, 8, 16, dtype=dtype),
                        made(2, 2, 8, 16, dtype=dtype),
                        made(2, 2, 8, size, dtype=dtype),
                        ring=(0,),
                        is_causal=True,
                    )
                )
                for dtype, size in (
                    (torch.bfloat16, 16),
                    (torch.float32, 16),
                    (torch.float64, 16),
                    (torch.bfloat16, 8),
                )
            },
        }
        for name, call in calls.items():
            with Watch() as watch:
                result = call()
                if result.requires_grad:
                    result.backward(torch.empty_like(result))
            found[name] = {"ops": watch.count, "problems": list(watch.found)}
    return {"name": FUNCTIONS, "plans": found}


def _read_value(x: Tensor) -> Tensor:
    with suppress(DataDependentOutputException):
        x.sum().item()
    return x


def _index_by_mask(x: Tensor) -> Tensor:
    with suppress(DynamicOutputShapeException):
        return x[x > 0]
    return x


def watch_mistakes() -> dict[str, Any]:
    """What is found of functions that are wrong for a GPU."""
    mistakes: dict[str, Callable[[Tensor], Tensor]] = {
        "a factory without a device": lambda x: x * torch.ones(()),
        "a value read": _read_value,
        "a mask as an index": _index_by_mask,
    }
    found: dict[str, dict[str, Any]] = {}
    with FakeTensorMode():
        for name, call in mistakes.items():
            with Watch() as watch:
                call(torch.empty(8, device=CUDA))
            found[name] = {"ops": watch.count, "problems": list(watch.found)}
    return {"name": MISTAKES, "plans": found}


def main(arguments: Sequence[str]) -> None:
    """Names and plans (those with ``=``) to lines of JSON."""
    torch.set_num_threads(1)
    parallels = [text for text in arguments if "=" in text] or PLANS
    for name in arguments:
        if "=" not in name:
            with redirect_stdout(sys.stderr):
                own = {FUNCTIONS: watch_functions, MISTAKES: watch_mistakes}
                result = own[name]() if name in own else watch_model(name, parallels)
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # as autograd has threads of a device that is not there, which end badly
