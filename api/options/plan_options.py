"""Options of planning, each declared once for the command line, Python and the planner."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict, Unpack, get_args

from autoparallel.cost_model.cluster.tf32 import FAMILIES, Tf32
from autoparallel.cost_model.ops.memory import GradientDtype
from autoparallel.options.option import Choices, check_values, option, read_options
from autoparallel.options.parse import (
    Texts,
    parse_deadline,
    parse_parallel,
    parse_prices,
    parse_size,
    texts,
)
from autoparallel.planner.errors import UsageError
from autoparallel.planner.plan import Float32Ops, Mode, Precision
from autoparallel.planner.requests.features import Features, features_of
from autoparallel.planner.requests.goal import Deadline, Goal, Objective
from autoparallel.planner.requests.pins import Pin, parse_pin
from autoparallel.planner.requests.request import (
    CHUNKED_SCHEDULES,
    DERIVED_SCHEDULES,
    SCHEDULES,
    Forced,
    IntraOpMethod,
    check_allowed,
    check_tolerance,
)

MEASURE_SECONDS = 10.0
"""Default limit in seconds for measuring before planning."""

MEASURE_VARIABLE = "AUTOPARALLEL_MEASURE_SECONDS"

DTYPES: dict[Precision, Literal["float32", "bfloat16", "float16", "float64"]] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "bfloat16",
    "fp64": "float64",
}

HALF_PRECISIONS = ("bf16", "fp16", "fp8")

OPTIMIZERS = ("adamw", "adam", "sgd", "sgd-momentum")

SEARCHES = ("dp", "rl")
"""Search methods for pipelines: dynamic programming, and reinforcement learning."""


def _measure_seconds(asked: float | None) -> float:
    """Return the seconds to spend on measuring before planning: ``asked``, else the number in the
    environment variable for it, else 10.

    Raises UsageError AP840 if the environment variable is not a number.
    """
    if asked is not None:
        return asked
    text = os.environ.get(MEASURE_VARIABLE, "")
    try:
        return float(text) if text else MEASURE_SECONDS
    except ValueError:
        raise UsageError(
            "AP840",
            f"{text!r} is not a number of seconds",
            where=f"the environment variable {MEASURE_VARIABLE}",
            fix="0 turns measuring before planning off; the default is 10",
        ) from None


def _size(asked: str | int | None) -> int | None:
    return parse_size(asked) if isinstance(asked, str) else asked


def _pins(asked: Texts) -> tuple[Pin, ...]:
    return tuple(map(parse_pin, texts(asked)))


LARGEST_COUNT = 10**9
"""Maximum number of samples per step, and of positions (tokens) per sequence."""

SEVERAL = list[str] | None
"""Type of an option that may be repeated."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of planning. ``seq`` None leaves the length to ``example_batch``.

    ``compiled`` None means not compiled, or for an existing plan as it was planned. ``database``
    None is the user's default file of measured times.
    """

    global_batch: int = option(
        32, "samples per training step, over all devices", min=1, max=LARGEST_COUNT
    )
    seq: int | None = option(None, "sequence length", min=1, max=LARGEST_COUNT)
    micro_batch: int | None = option(None, "samples per micro-batch of a data-parallel rank", min=1)
    precision: Precision = option(
        "fp32",
        "fp32, bf16, fp16 or fp8 (fp32 master weights), or fp64; fp8 needs torchao to run",
        choices=Choices("AP113", tuple(DTYPES)),
    )
    float32_ops: Float32Ops = option(
        "autocast",
        "ops that compute in float32 under bf16 and fp16: autocast (losses and the other ops of "
        "its list) or none",
        choices=Choices("AP113", get_args(Float32Ops)),
    )
    gradient_dtype: GradientDtype = option(
        "master",
        "format in which gradients are summed and held under bf16 and fp16: master (float32) or "
        "compute (half of the bytes)",
        choices=Choices("AP113", get_args(GradientDtype)),
    )
    tf32: Tf32 | None = option(
        None,
        "float32 products that use TF32 on GPUs that have it: none, convolutions or all; default: "
        "as torch is set, which is convolutions unless the model's file changes it",
        choices=Choices("AP113", tuple(FAMILIES)),
    )
    compiled: bool | None = option(
        None,
        "compile blocks with torch.compile (inductor), and price them so; default for a plan file: "
        "as it was planned",
        name="compile",
        flags=("--compile/--no-compile",),
    )
    optimizer: str = option(
        "adamw", "adamw, adam, sgd or sgd-momentum", choices=Choices("AP114", OPTIMIZERS)
    )
    memory_limit_bytes: int | None = option(
        None,
        "memory per device: 72GiB, 80GB",
        name="memory_limit",
        type=str | None,
        read=_size,
    )
    forced: Forced = option(
        Forced,
        "fix some choices, joined by commas: dp=2,tp=2,pp=2 zero=1 microbatches=8 recompute=full "
        "schedule=1f1b; the search decides the others",
        name="parallel",
        type=str | None,
        read=parse_parallel,
    )
    pins: tuple[Pin, ...] = option(
        (),
        "fix the layout of a parameter, or of a module's output, on a mesh axis: '*.up=S(0)@tp'; "
        "repeatable",
        name="pin",
        type=SEVERAL,
        metavar="PATH=LAYOUT@AXIS",
        read=_pins,
    )
    stage_at: tuple[str, ...] = option(
        (), "start a stage at this block; repeatable", type=SEVERAL, metavar="PATH", read=texts
    )
    max_tp: int | None = option(None, "the largest tensor-parallel degree", min=1)
    allow: tuple[str, ...] = option(
        (),
        "allow only these features of their group: dp tp pp cp sp ep, zero1 zero2 zero3 hsdp, "
        "selective full attention attention-offloaded none-offloaded, 2d-mesh 3d-mesh mixed-stages "
        "branches uneven-shares, schedules by name; ssp and asp, which change what a step "
        "computes, are used only if allowed here",
        type=SEVERAL,
        metavar="FEATURE,…",
        read=texts,
    )
    deny: tuple[str, ...] = option(
        (),
        "exclude these features; named as for --allow",
        type=SEVERAL,
        metavar="FEATURE,…",
        read=texts,
    )
    objective: Objective = option(
        "time",
        "what to optimize: time (per step), cost (tokens per dollar), memory (per device) or "
        "devices (the fewest that meet --deadline)",
        type=str,
    )
    prices: Mapping[str, float] = option(
        dict,
        "price per device and hour; default: the cluster file's",
        name="price",
        type=SEVERAL,
        metavar="[DEVICE=]DOLLARS",
        read=parse_prices,
    )
    deadline: Deadline | None = option(
        None,
        "time limit of the training: 30d/2e12tokens, 24h/1000steps",
        type=str | None,
        read=parse_deadline,
    )
    gap: float = option(0.01, "optimality gap of the layouts at which the search stops")
    tolerance: float = option(
        0.02,
        "choose the simplest plan whose step is at most this fraction longer than the fastest; 0 "
        "chooses the fastest",
    )
    time_limit_seconds: float = option(
        60.0, "seconds for the search", name="time_limit", min=0.1, max=1e6
    )
    num_candidates: int = option(5, "how many candidates are simulated", min=1)
    search: str = option(
        "dp",
        "dp (dynamic programming), or rl (learned placers, for comparison)",
        choices=Choices("AP330", SEARCHES),
    )
    solver: str = option(
        "highs", "of integer programs: highs, or one of PuLP's that is installed: cbc, gurobi, scip"
    )
    intra_op: IntraOpMethod = option(
        "elimination",
        "layouts by elimination (exact tables; one integer program proves), or ilp for every stage",
        choices=Choices("AP330", get_args(IntraOpMethod)),
    )
    routing: str | None = option(
        None,
        "price and place experts by the tokens that run --count-routing counted",
        metavar="FILE",
    )
    lengths: str | None = option(
        None,
        "price attention within packed documents of these lengths, one on each line",
        metavar="FILE",
    )
    profile: Mode = option(
        "auto",
        "source of times: auto (measured where available), measured (all) or analytic",
        choices=Choices("AP173", get_args(Mode)),
    )
    database: str | None = option(
        None, "database of measured times; default: the user's", metavar="FILE"
    )
    measure_seconds: float = option(
        0.0,
        "limit for measuring before planning for this machine; default: 10; 0 turns it off",
        type=float | None,
        read=_measure_seconds,
    )
    features: Features = field(init=False)
    """Features that the search may use, as ``allow`` and ``deny`` say."""
    goal: Goal = field(init=False)

    def __post_init__(self) -> None:
        from autoparallel.planner.intra_op.pulp_solver import find_solver  # imports numpy

        schedules = (*SCHEDULES, *CHUNKED_SCHEDULES, *DERIVED_SCHEDULES)
        goal = Goal(self.objective, self.prices, self.deadline)
        object.__setattr__(self, "goal", goal)
        object.__setattr__(self, "features", features_of(self.allow, self.deny, schedules))
        check_values(self)
        if self.measure_seconds < 0:
            raise UsageError(
                "AP840",
                f"cannot measure for {self.measure_seconds:g} seconds",
                where="--measure-seconds",
                fix="0 turns measuring before planning off; the default is 10",
            )
        check_allowed(self.forced, self.features, max_tp=self.max_tp, gap=self.gap)
        check_tolerance(self.tolerance)
        find_solver(self.solver)

    @property
    def autocasts(self) -> bool:
        """Return whether a 16-bit model computes the ops on autocast's float32 list in float32."""
        return self.precision in HALF_PRECISIONS and self.float32_ops == "autocast"


class SearchOptions(TypedDict, total=False):
    """Names and types of the options of planning (``PlanOptions``) as Python keyword arguments."""

    micro_batch: int | None
    precision: Precision
    float32_ops: Float32Ops
    gradient_dtype: GradientDtype
    tf32: Tf32 | None
    compile: bool | None
    optimizer: str
    memory_limit: str | int | None
    parallel: str | None
    pin: Texts
    stage_at: Texts
    max_tp: int | None
    allow: Texts
    deny: Texts
    objective: Objective
    price: Texts | float | Mapping[str, float]
    deadline: str | None
    gap: float
    tolerance: float
    time_limit: float
    num_candidates: int
    search: str
    solver: str
    intra_op: IntraOpMethod
    routing: str | None
    lengths: str | None
    profile: Mode
    database: str | None
    measure_seconds: float | None


def plan_options(
    global_batch: int = 32, seq: int | None = None, **given: Unpack[SearchOptions]
) -> PlanOptions:
    """Return the options of planning for keyword arguments in the form that users write.

    Raises UsageError AP141 for an unknown option, and AP111 to AP117, AP173 and AP180 to AP189 for
    an invalid value.
    """
    return read_options(PlanOptions, {"global_batch": global_batch, "seq": seq, **given})


def without_servers(options: PlanOptions) -> PlanOptions:
    """Return the options with parameter servers ruled out, unless their number is forced."""
    if options.forced.servers is not None:
        return options
    names = (name.strip() for text in options.allow for name in text.split(","))
    allow = tuple(name for name in names if name != "servers")
    return replace(options, allow=allow, deny=(*options.deny, "servers"))
