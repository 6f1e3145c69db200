"""Comparison of plans with a simple grid of configurations, none of which should be faster.

``python benchmarks/planning/grid.py [--only NAME] [--seconds S] [--json FILE]``. Each setting is
planned at ``--tolerance 0`` and at the default. Then configurations of the grid (dp, tp, pp, cp,
ep, ZeRO 0 to 3, recomputation, samples of a micro-batch, 1F1B and interleaved) are priced by the
same model, in an order that is drawn at random, for at most S seconds of processor time. Prints
the fastest that fits in memory beside both plans; the exit code is 1 if it is more than 1 % faster
than the plan at tolerance 0, or 3 % faster than the default plan.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoparallel.analysis.configurations import PricedConfigurations, configurations
from autoparallel.options.plan_options import plan_options
from autoparallel.passes.programs.program import Program
from autoparallel.planner.configured.configuration import Configuration, find_layers
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer
from autoparallel.planner.errors import AutoparallelError
from autoparallel.planner.graph.expert_dims import experts_of_layers
from autoparallel.planner.plan import Plan
from autoparallel.planner.requests.request import Forced, divisors
from autoparallel.planner.summary import plan_summary
from autoparallel.planning.capture import capture_target
from autoparallel.planning.plan import find_cluster, plan_program
from autoparallel.target.load import load_target
from benchmarks.planning.cases import HERE, LLAMA, LLAMA_70B, LLAMA_405B, Case

GPT = str(HERE.parents[1] / "examples" / "gpt.py")
ZOO = HERE.parents[1] / "tests" / "zoo"
SMALL = {"d_model": 1024, "n_layer": 24, "n_head": 16, "seq": 1024}
LONG = 32_768
"""Positions of a sequence from which context parallelism is in the grid."""

ALLOWED = {0.0: 0.01, 0.02: 0.03}
"""Relative lead of a configuration that is allowed, by the tolerance of the plan."""

SEED = 0


def _gpt(name: str, cluster: str, batch: int = 64, precision: str = "bf16") -> Case:
    return Case(name, GPT, cluster, batch, seq=None, precision=precision, settings=SMALL)


def _llama(name: str, cluster: str, batch: int, seq: int, sizes: Mapping[str, Any]) -> Case:
    return Case(f"{name}, {cluster}, {seq}", LLAMA, cluster, batch, seq=seq, settings=sizes)


def _published(
    name: str, folder: str, cluster: str, batch: int, seq: int | None, precision: str = "bf16"
) -> Case:
    return Case(name, f"hf:{HERE / folder}", cluster, batch, seq=seq, precision=precision)


def _experts(name: str, cluster: str, batch: int) -> Case:
    folder = HERE.parent / "validation" / "data" / "moe_models" / name
    return Case(f"{name}, {cluster}", f"hf:{folder}", cluster, batch)


def _zoo(name: str, cluster: str, batch: int, seq: int | None = 64) -> Case:
    return Case(f"{name}, {cluster}", f"hf:{ZOO / name}", cluster, batch, seq=seq)


SETTINGS = (
    *(_gpt(f"GPT, {n}", n) for n in ("1xH100", "2xA100-40GB", "8xA100-40GB", "8xRTX4090")),
    _gpt("GPT, 2x8 V100", "2x8xV100-16GB", 128, "fp16"),
    _gpt("GPT, A100 and H100", "4xA100-80GB+4xH100"),
    _llama("Llama-3-8B", "2xH100", 16, 2048, {}),
    _llama("Llama-3-8B", "8xH100", 64, 4096, {}),
    _llama("Llama-3-8B", "8xRTX4090", 16, 2048, {}),
    _llama("Llama-3-8B", "4x8xA100-80GB", 256, 4096, {}),
    _llama("Llama-3-8B", "8x8xH100", 128, 8192, {}),
    _llama("Llama-3-8B", "8xH100", 8, 65536, {}),
    _llama("Llama-3-8B", "4x8xH100", 8, 131072, {}),
    _llama("Llama-3-70B", "8x8xH100", 256, 4096, LLAMA_70B),
    _llama("Llama-3-70B", "32x8xH100", 512, 8192, LLAMA_70B),
    _llama("Llama-3-70B", "128x8xA100-80GB", 1024, 4096, LLAMA_70B),
    _llama("Llama-3-405B", "128x8xH100", 512, 8192, LLAMA_405B),
    _llama("Llama-3-405B", "2048x8xH100", 2048, 8192, LLAMA_405B),
    _published("ViT-L, 8xA100-40GB", "vit_l", "8xA100-40GB", 1024, None),
    _published("ViT-L, 2x8xV100", "vit_l", "2x8xV100-16GB", 512, None, "fp16"),
    _published("GPT-39B, 64 V100", "gpt_39b", "8x8xV100-32GB", 1024, 1024, "fp16"),
    _published("Mixtral-8x22B, 128 H100", "mixtral_8x22b", "16x8xH100", 512, 4096),
    _published("Mixtral-8x22B, 64 H100", "mixtral_8x22b", "8x8xH100", 256, 4096),
    _experts("GPT-OSS-120B", "8x8xH100", 512),
    _experts("DeepSeek-V3", "32x8xH100", 2048),
    _zoo("qwen3_moe", "8xH100", 64),
    _zoo("olmoe", "4xA100-40GB", 64),
    _zoo("t5", "8xA100-40GB", 128),
    _zoo("bert", "4xA100-40GB", 128),
    _zoo("gemma2", "8xA100-40GB", 64),
    _zoo("whisper", "4xH100", 64, None),
    _zoo("mamba", "2xH100", 64),
)


@dataclass(frozen=True)
class Compared:
    """Figures of a setting. ``seconds``: of a step, by tolerance of the plan. ``lead``: by which
    fraction the fastest configuration is faster than that plan; negative if it is slower."""

    name: str
    plans: Mapping[float, str]
    seconds: Mapping[float, float]
    lead: Mapping[float, float]
    fastest: str
    num_priced: int
    num_all: int

    @property
    def is_beaten(self) -> bool:
        return any(lead > ALLOWED[tolerance] for tolerance, lead in self.lead.items())


def grid(program: Program, like: Plan, seq: int | None) -> list[Configuration]:
    """Return all configurations of the grid for the cluster and batch of ``like``."""
    experts, layers = experts_of_layers(program.graph), len(find_layers(program.blocks))
    total, host = like.cluster.num_devices, like.cluster.hosts[0].num_devices
    cps = divisors(host) if (seq or 0) >= LONG else (1,)
    found: list[Configuration] = []
    for pp, tp, cp in product(divisors(total), divisors(host), cps):
        if pp > max(layers, 1) or total % (pp * tp * cp):
            continue
        dp = total // (pp * tp * cp)
        eps = [each for each in divisors(dp) if all(not e % each for e in experts)]
        for ep, zero in product(eps if experts else [1], range(4 if dp > 1 else 1)):
            for schedule, chunks in _schedules(pp, layers):
                degrees = Forced(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero)
                with suppress(AutoparallelError):
                    found += [
                        replace(each, schedule=schedule, num_chunks=chunks)
                        for each in configurations(like, degrees)
                        if chunks == 1 or each.num_microbatches % pp == 0
                    ]
    return found


def _schedules(pp: int, layers: int) -> Iterator[tuple[str, int]]:
    yield "1f1b", 1
    for chunks in (2, 4, 8):
        if pp > 1 and pp * chunks <= layers:
            yield "interleaved", chunks


def compared(setting: Case, seconds: float) -> Compared:
    """Plan a setting at each tolerance, and price configurations of the grid for at most
    ``seconds`` of processor time."""
    target = load_target(setting.target, dict(setting.settings))
    cluster = find_cluster(setting.cluster)
    plans: dict[float, Plan] = {}
    for tolerance in ALLOWED:
        options = plan_options(
            global_batch=setting.global_batch,
            seq=setting.seq,
            precision=setting.precision,
            profile="analytic",
            time_limit=600.0,
            tolerance=tolerance,
        )
        if not plans:
            program = capture_target(target, options)
        plans[tolerance] = plan_program(program, target, cluster, options)
    listed = grid(program, plans[0.0], setting.seq)
    random.Random(SEED).shuffle(listed)
    pricer = ConfigurationPricer(program.graph, program.blocks)
    priced = PricedConfigurations(pricer, cluster, until=time.process_time() + seconds)
    for _ in priced.price(listed):
        pass
    fitting = priced.fitting
    best = fitting[0].step_seconds if fitting else float("inf")
    steps = {tolerance: plan.prediction.step_seconds for tolerance, plan in plans.items()}
    return Compared(
        setting.name,
        {tolerance: plan_summary(plan) for tolerance, plan in plans.items()},
        steps,
        {tolerance: 1 - best / step for tolerance, step in steps.items()},
        plan_summary(fitting[0].plan) if fitting else "none fits",
        len(priced.steps),
        len(listed),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="NAME", help="settings whose name contains this")
    parser.add_argument("--seconds", type=float, default=120.0, help="of pricing each setting")
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")
    asked = parser.parse_args(arguments)
    rows: list[Compared] = []
    for setting in SETTINGS:
        if asked.only and asked.only.lower() not in setting.name.lower():
            continue
        row = compared(setting, asked.seconds)
        rows.append(row)
        leads = ", ".join(f"{100 * row.lead[each]:+.2f} %" for each in ALLOWED)
        print(f"{setting.name}: {leads} ({row.num_priced} of {row.num_all} priced)", flush=True)
        print(f"    plan  {row.seconds[0.0]:.4g} s: {row.plans[0.0]}", flush=True)
        print(f"    grid: {row.fastest}", flush=True)
        if asked.json:
            Path(asked.json).write_text(
                json.dumps([asdict(each) for each in rows], indent=1) + "\n"
            )
    beaten = [row.name for row in rows if row.is_beaten]
    print(
        f"{len(rows) - len(beaten)} of {len(rows)} settings are not beaten"
        + (f"; beaten: {'; '.join(beaten)}" if beaten else "")
    )
    return 1 if beaten else 0


if __name__ == "__main__":
    sys.exit(main())
