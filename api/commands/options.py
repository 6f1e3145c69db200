"""The options that several commands share, and the console they print on."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from autoparallel.asked import SearchOptions
    from autoparallel.planning import PlanOptions

TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="model.py, model.py:function, package.module:function or hf:PATH_OR_NAME",
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="local, 8xH100, 4x8xA100-80GB, 2x8xA100+8xH100 (hosts that differ), cpu:4, or a TOML "
        "file (hosts in racks, prices)",
    ),
]
GlobalBatchOption = Annotated[
    int, typer.Option("--global-batch", min=1, help="rows of one training step, over all devices")
]
SeqOption = Annotated[int | None, typer.Option("--seq", min=1, help="sequence length")]
MicroBatchOption = Annotated[
    int | None,
    typer.Option("--micro-batch", min=1, help="rows of a micro-batch over all data ranks"),
]
PrecisionOption = Annotated[
    str, typer.Option("--precision", help="fp32, bf16 or fp16 (fp32 master weights), or fp64")
]
Float32OpsOption = Annotated[
    str,
    typer.Option(
        "--float32-ops",
        help="what computes in float32 in bf16 and fp16: autocast (losses and the rest of its "
        "list) or none",
    ),
]
Tf32Option = Annotated[
    str | None,
    typer.Option(
        "--tf32",
        help="float32 products in TF32 on GPUs that have it: none, convolutions or all; else as "
        "torch is set, which is convolutions unless the model's file says otherwise",
    ),
]
CompileOption = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="run, and price, blocks compiled by torch.compile's inductor; a plan file says itself",
    ),
]
OptimizerOption = Annotated[
    str, typer.Option("--optimizer", help="adamw, adam, sgd or sgd-momentum")
]
MemoryLimitOption = Annotated[
    str | None, typer.Option("--memory-limit", help="per device: 72GiB, 80GB")
]
ParallelOption = Annotated[
    str | None,
    typer.Option(
        "--parallel",
        help="force some choices, such as dp=2,tp=2,pp=2 or zero=1,microbatches=8 or "
        "recompute=full,schedule=1f1b; the rest is searched",
    ),
]
PinOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="PATH=LAYOUT@AXIS",
        help="how a parameter, or the value of a module, lies on a mesh axis: "
        "'layers.*.mlp.up_proj.weight=S(0)@tp'; repeatable",
    ),
]
StageAtOption = Annotated[
    list[str] | None,
    typer.Option("--stage-at", metavar="PATH", help="a block that begins a stage; repeatable"),
]
MaxTpOption = Annotated[
    int | None, typer.Option("--max-tp", min=1, help="the largest tensor-parallel degree")
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="FEATURE,…",
        help="of their group only these: dp tp pp cp sp ep, zero1 zero2 zero3, selective full, "
        "2d-mesh 3d-mesh mixed-stages branches uneven-shares, schedules by name",
    ),
]
DenyOption = Annotated[
    list[str] | None, typer.Option("--deny", metavar="FEATURE,…", help="not these; as --allow")
]
ObjectiveOption = Annotated[
    str,
    typer.Option(
        "--objective",
        help="time (of a step), cost (tokens per dollar), memory (the least) or devices (the "
        "fewest that meet --deadline)",
    ),
]
PriceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--price", metavar="[DEVICE=]DOLLARS", help="per device and hour; or in the cluster file"
    ),
]
DeadlineOption = Annotated[
    str | None,
    typer.Option("--deadline", help="a time for tokens or steps: 30d/2e12tokens, 24h/1000steps"),
]
GapOption = Annotated[
    float, typer.Option("--gap", help="how much worse than the best a stage may be: 0.01")
]
ToleranceOption = Annotated[
    float,
    typer.Option(
        "--tolerance",
        help="of plans that take no more than so much longer than the fastest, the simplest is "
        "taken: 0.02; 0 takes the fastest",
    ),
]
TimeLimitOption = Annotated[
    float, typer.Option("--time-limit", min=0.1, help="seconds for the search")
]
TopOption = Annotated[int, typer.Option("--top", min=1, help="candidates that are simulated")]
SearchOption = Annotated[
    str, typer.Option("--search", help="dp, or rl: placers that learn by trial, for comparison")
]
SolverOption = Annotated[
    str,
    typer.Option(
        "--solver",
        help="of integer programs: highs, or one of PuLP's that is installed: cbc, gurobi, scip",
    ),
]
ProcessesOption = Annotated[
    int | None,
    typer.Option("--processes", min=1, max=2, help="that search at once: 2 if there are cores"),
]
OutputOption = Annotated[str | None, typer.Option("-o", "--output", help="write the plan here")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="a setting for build_model; repeatable"),
]
LoraOption = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="r=8,alpha=16[,targets=A+B]",
        help="train adapters of an hf: target and freeze its weights",
    ),
]
ProfileOption = Annotated[
    str,
    typer.Option(
        "--profile", help="times: auto (measured where they are), measured (all) or analytic"
    ),
]
DatabaseOption = Annotated[
    str | None, typer.Option("--database", metavar="FILE", help="measured times; the user's own")
]
MeasureSecondsOption = Annotated[
    float | None,
    typer.Option(
        "--measure-seconds",
        help="to measure what a plan for this machine asks for, at most: 10; 0 measures nothing",
    ),
]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="training steps")]


def plan_options(
    *,
    global_batch: GlobalBatchOption = 32,
    seq: SeqOption = None,
    micro_batch: MicroBatchOption = None,
    precision: PrecisionOption = "fp32",
    float32_ops: Float32OpsOption = "autocast",
    tf32: Tf32Option = None,
    compile: CompileOption = None,
    optimizer: OptimizerOption = "adamw",
    memory_limit: MemoryLimitOption = None,
    parallel: ParallelOption = None,
    pin: PinOption = None,
    stage_at: StageAtOption = None,
    max_tp: MaxTpOption = None,
    allow: AllowOption = None,
    deny: DenyOption = None,
    objective: ObjectiveOption = "time",
    price: PriceOption = None,
    deadline: DeadlineOption = None,
    gap: GapOption = 0.01,
    tolerance: ToleranceOption = 0.02,
    time_limit: TimeLimitOption = 60.0,
    top: TopOption = 5,
    search: SearchOption = "dp",
    solver: SolverOption = "highs",
    processes: ProcessesOption = None,
    profile: ProfileOption = "auto",
    database: DatabaseOption = None,
    measure_seconds: MeasureSecondsOption = None,
) -> PlanOptions:
    """The options of planning as values. Raises UsageError (see ``asked.options_of``).

    Its parameters are the options of every command that plans: see ``planning``.
    """
    asked = dict(locals())
    from autoparallel.asked import options_of

    rows, length = asked.pop("global_batch"), asked.pop("seq")
    return options_of(rows, length, cast("SearchOptions", asked))


Command = Callable[..., None]


def planning(*, without: Collection[str] = (), **defaults: Any) -> Callable[[Command], Command]:
    """A decorator: the command takes the options of ``plan_options``, there where ``options`` or
    ``asked`` is among its parameters, as values (PlanOptions) or as they were given (a dict).

    ``without`` leaves some out, ``defaults`` changes what holds where nothing is given.
    """
    shared = {
        name: parameter.replace(default=defaults.get(name, parameter.default))
        for name, parameter in _parameters(plan_options).items()
        if name not in without
    }

    def decorate(function: Command) -> Command:
        parameters: list[inspect.Parameter] = []
        own = _parameters(function)
        for name, parameter in own.items():
            parameters += shared.values() if name in ("options", "asked") else [parameter]

        @functools.wraps(function)
        def command(**given: Any) -> None:
            asked = {name: given.pop(name) for name in shared}
            if "asked" in own:
                function(asked=asked, **given)
            else:
                function(options=plan_options(**asked), **given)

        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function, for keywords only, with their annotations evaluated."""
    known = {"PlanOptions": object}
    hints = get_type_hints(function, localns=known, include_extras=True)
    return {
        name: parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function).parameters.items()
    }


def with_lora(settings: list[str] | None, lora: str | None) -> list[str]:
    """The settings with ``--lora``, which is one: a plan carries it like the others."""
    return [*(settings or ()), *([] if lora is None else [f"lora={lora}"])]


def stdout_console() -> Console:
    """A console on stdout: 80 columns where there is no terminal, 100 at most."""
    import shutil
    import sys

    from rich.console import Console

    columns = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80
    return Console(width=max(60, min(columns, 100)), highlight=False)


def print_json(value: object) -> None:
    """``value`` as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2))
