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

    from autoparallel.options.asked import SearchOptions
    from autoparallel.planning.plan import PlanOptions

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
    int, typer.Option("--global-batch", min=1, help="samples per training step, over all devices")
]
SeqOption = Annotated[int | None, typer.Option("--seq", min=1, help="sequence length")]
MicroBatchOption = Annotated[
    int | None,
    typer.Option("--micro-batch", min=1, help="samples per micro-batch of a data-parallel rank"),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        help="fp32, bf16, fp16 or fp8 (fp32 master weights), or fp64; fp8 needs torchao to run",
    ),
]
Float32OpsOption = Annotated[
    str,
    typer.Option(
        "--float32-ops",
        help="ops that compute in float32 under bf16 and fp16: autocast (losses and the other ops "
        "of its list) or none",
    ),
]
GradientDtypeOption = Annotated[
    str,
    typer.Option(
        "--gradient-dtype",
        help="format in which gradients are summed and held under bf16 and fp16: master (float32) "
        "or compute (half of the bytes)",
    ),
]
Tf32Option = Annotated[
    str | None,
    typer.Option(
        "--tf32",
        help="float32 products that use TF32 on GPUs that have it: none, convolutions or all; "
        "default: as torch is set, which is convolutions unless the model's file changes it",
    ),
]
CompileOption = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="compile blocks with torch.compile (inductor), and price them so; default for a plan "
        "file: as it was planned",
    ),
]
OptimizerOption = Annotated[
    str, typer.Option("--optimizer", help="adamw, adam, sgd or sgd-momentum")
]
MemoryLimitOption = Annotated[
    str | None, typer.Option("--memory-limit", help="memory per device: 72GiB, 80GB")
]
ParallelOption = Annotated[
    str | None,
    typer.Option(
        "--parallel",
        help="fix some choices, joined by commas: dp=2,tp=2,pp=2 zero=1 microbatches=8 "
        "recompute=full schedule=1f1b; the search decides the others",
    ),
]
PinOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="PATH=LAYOUT@AXIS",
        help="fix the layout of a parameter, or of a module's output, on a mesh axis: "
        "'*.up=S(0)@tp'; repeatable",
    ),
]
StageAtOption = Annotated[
    list[str] | None,
    typer.Option("--stage-at", metavar="PATH", help="start a stage at this block; repeatable"),
]
MaxTpOption = Annotated[
    int | None, typer.Option("--max-tp", min=1, help="the largest tensor-parallel degree")
]
AllowOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="FEATURE,…",
        help="allow only these features of their group: dp tp pp cp sp ep, zero1 zero2 zero3, "
        "selective full, 2d-mesh 3d-mesh mixed-stages branches uneven-shares, schedules by name; "
        "ssp and asp, which change what a step computes, are used only if allowed here",
    ),
]
DenyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--deny", metavar="FEATURE,…", help="exclude these features; named as for --allow"
    ),
]
ObjectiveOption = Annotated[
    str,
    typer.Option(
        "--objective",
        help="what to optimize: time (per step), cost (tokens per dollar), memory (per device) or "
        "devices (the fewest that meet --deadline)",
    ),
]
PriceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--price",
        metavar="[DEVICE=]DOLLARS",
        help="price per device and hour; default: the cluster file's",
    ),
]
DeadlineOption = Annotated[
    str | None,
    typer.Option("--deadline", help="time limit of the training: 30d/2e12tokens, 24h/1000steps"),
]
GapOption = Annotated[
    float, typer.Option("--gap", help="optimality gap of the layouts at which the search stops")
]
ToleranceOption = Annotated[
    float,
    typer.Option(
        "--tolerance",
        help="choose the simplest plan whose step is at most this fraction longer than the "
        "fastest; 0 chooses the fastest",
    ),
]
TimeLimitOption = Annotated[
    float, typer.Option("--time-limit", min=0.1, help="seconds for the search")
]
NumCandidatesOption = Annotated[
    int, typer.Option("--num-candidates", min=1, help="how many candidates are simulated")
]
SearchOption = Annotated[
    str,
    typer.Option(
        "--search", help="dp (dynamic programming), or rl (learned placers, for comparison)"
    ),
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
    typer.Option(
        "--processes", min=1, max=2, help="processes of the search; default: 2 if there are 2 cores"
    ),
]
OutputOption = Annotated[
    str | None, typer.Option("-o", "--output", help="file to write the plan to")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="a setting for build_model; repeatable"),
]
LoraOption = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="r=8,alpha=16",
        help="train adapters of an hf: target and freeze its weights; targets=A+B names its layers",
    ),
]
ProfileOption = Annotated[
    str,
    typer.Option(
        "--profile",
        help="source of times: auto (measured where available), measured (all) or analytic",
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust", help="run the code that the plan names even if it is outside of this folder"
    ),
]
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database", metavar="FILE", help="database of measured times; default: the user's"
    ),
]
MeasureSecondsOption = Annotated[
    float | None,
    typer.Option(
        "--measure-seconds",
        help="limit for measuring before planning for this machine; default: 10; 0 turns it off",
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
    gradient_dtype: GradientDtypeOption = "master",
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
    num_candidates: NumCandidatesOption = 5,
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
    from autoparallel.options.asked import options_of

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
    """A console on stdout: 80 columns where there is no terminal, 120 at most."""
    import shutil
    import sys

    from rich.console import Console

    columns = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80
    return Console(width=max(60, min(columns, 120)), highlight=False)


def print_json(value: object) -> None:
    """``value`` as JSON on stdout."""
    typer.echo(json.dumps(value, indent=2))
