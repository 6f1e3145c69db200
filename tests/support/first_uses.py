"""Imported by the fork server, after its other modules: captures and plans a model once.

The first capture of a process fills tables of torch and of this package, for two seconds of
processor time. Every process that the server forks has them from the start.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import pytest
import torch

from autoparallel.options.plan_options import PlanOptions
from autoparallel.planner.requests.request import Forced
from autoparallel.profiling.measured_plan import make_plan
from autoparallel.target.load import load_target

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
SETTINGS = {"n_layer": 2, "d_model": 32, "n_head": 2, "seq": 16}


def plan_and_train() -> None:
    """Plans a small GPT for a pipeline, and computes one step of it.

    The cluster is not this machine: measuring this one would start threads, which forks lack.
    """
    target = load_target(str(GPT), SETTINGS)
    options = PlanOptions(global_batch=8, seq=16, profile="analytic", forced=Forced(pp=2))
    make_plan(target, "2xV100", options)
    model = target.build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(2, 16, dtype=torch.long)
    model(tokens, tokens).backward()
    optimizer.step()


with (
    tempfile.TemporaryDirectory() as folder,
    pytest.MonkeyPatch.context() as patch,
    torch.random.fork_rng(devices=[]),
):
    for name in ("XDG_DATA_HOME", "AUTOPARALLEL_CACHE"):
        patch.setenv(name, folder)
    torch.set_num_threads(1)
    if not torch.backends.cuda.is_built():  # autograd would start threads, which forks lack
        plan_and_train()
gc.collect()
gc.freeze()  # a collection then leaves the memory that is shared with the server as it is
