"""Mistakes in runs and in what a model file gives them: see ``command_cases``."""

from __future__ import annotations

from command_cases import MODEL, Case

RUN = "run alone.json --steps 1"
WAS = {"model.py": MODEL}
SGD = "\n\ndef build_optimizer(params):\n    return torch.optim.SGD(params, lr=0.1)\n"
SMALLER = "\n\ndef small():\n    return Net(8, 1)\n"
DATA = """

def build_data(rank, world, global_batch=8):
    while True:
        yield example_batch(global_batch)
"""
FINITE = """

def build_data(rank, world, start=0):
    if start < 2:
        yield from [example_batch(8)] * (2 - start)
"""

HOSTS = (
    Case(
        "AP156",
        RUN + " --rdzv-endpoint 127.0.0.1:29411",
        "add (--nnodes) 2",
        RUN + " {0} 1 --rdzv-endpoint 127.0.0.1:29411",
    ),
    Case(
        "AP156",
        RUN + " --nnodes few --rdzv-endpoint 127.0.0.1:29411",
        "neither (N) nor",
        RUN + " --nnodes 1 --rdzv-endpoint 127.0.0.1:29411",
    ),
    Case(
        "AP156",
        RUN + " --nnodes 1",
        "add (--rdzv-endpoint) HOST:PORT",
        RUN + " --nnodes 1 {0} 127.0.0.1:29411",
    ),
    Case(
        "AP156",
        RUN + " --nnodes 1:2 --rdzv-endpoint 127.0.0.1:29411",
        "--nnodes MIN:MAX --elastic, or (--nnodes) N",
        RUN + " {0} 1 --rdzv-endpoint 127.0.0.1:29411",
    ),
    Case(
        "AP156",
        RUN + " --nnodes 1 --rdzv-endpoint 127.0.0.1",
        "for example 10.0.0.1(:29400)",
        RUN + " --nnodes 1 --rdzv-endpoint 127.0.0.1:29411",
    ),
    Case(
        "AP156",
        RUN + " --nnodes 1 --rdzv-endpoint 0.0.0.0:29416",
        "the address at which the other hosts reach",
        RUN + " --nnodes 1 --rdzv-endpoint 127.0.0.1:29411",
    ),
    Case(
        "AP156",
        RUN + " --nnodes 2 --rdzv-endpoint 127.0.0.1:29411",
        "for example --cluster 2x8xA100",
        RUN + " --nnodes 1 --rdzv-endpoint 127.0.0.1:29411",
    ),
    Case(
        "AP156",
        "run model.py --nnodes 1 --rdzv-endpoint 127.0.0.1:29411",
        "autoparallel (plan model.py -o plan.json), then (run plan.json)",
        "{0} --cluster cpu:1 --global-batch 8 && {1} --steps 1",
    ),
    Case(
        "AP156",
        RUN + " --nnodes 1 --rdzv-endpoint 127.0.0.1:29411",
        "leave out --nnodes",
        RUN,
        variables={"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    ),
    Case(
        "AP414",
        RUN + " --nnodes 1 --rdzv-endpoint no-such-host.invalid:29420",
        "the address of one of the hosts",
        RUN + " --nnodes 1 --rdzv-endpoint 127.0.0.1:29411",
        exit_code=5,
    ),
    Case(
        "AP415",
        "run two.json --steps 1 --nnodes 2 --rdzv-endpoint 127.0.0.1:29412 --join-timeout 1",
        "on 2 hosts; (--join-timeout)",
        RUN,
        exit_code=5,
        before=(
            "plan model.py --cluster 2x1xcpu --parallel dp=2 --set depth=1 "
            "--global-batch 8 -o two.json",
        ),
    ),
    Case(
        "AP116",
        "run model.py",
        "autoparallel (plan model.py -o plan.json), then torchrun",
        "{0} --cluster cpu:1 --global-batch 8",
        variables={"RANK": "0", "WORLD_SIZE": "2"},
    ),
    Case(
        "AP152",
        RUN,
        "start as many as the plan has devices",
        RUN,
        variables={"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"},
    ),
    Case(
        "AP411",
        "run gpus.json --steps 1",
        "plan for this machine: (--cluster local)",
        "run model.py --steps 1 --set depth=1 --global-batch 8 {0} --parallel dp=2",
        exit_code=5,
    ),
)

OPTIONS = (
    Case(
        "AP119",
        "verify plan.json --dtype fp16",
        "is not one of (fp64)",
        "verify plan.json --dtype {0}",
    ),
    Case("AP381", RUN + " --trace t.json", "(--trace-steps) 3", RUN + " --trace t.json {0} 1"),
    Case("AP381", RUN + " --trace-steps 3", "(--trace-steps 1) or fewer", RUN + " {0}"),
    Case("AP850", RUN + " --init random", "(exact) ", RUN + " --init {0}"),
    Case("AP891", RUN + " --keep 1", "add (--save) DIR", RUN + " --keep 1 {0} run"),
    Case("AP900", RUN + " --clip-norm 0", "must be above 0", RUN + " --clip-norm 1"),
    Case("AP900", RUN + " --loss-scale 0", "must be above 0", RUN + " --loss-scale 1"),
    Case(
        "AP900",
        RUN + " --clip-norm 1 --clip-value 1",
        "by max_norm or by max_value, but not by both",
        RUN + " --clip-norm 1",
    ),
    Case("AP900", RUN + " --accumulate 0", "must be at least (1)", RUN + " --accumulate {0}"),
    Case("AP900", RUN + " --on-nan halt", "must be one of .*(stop)", RUN + " --on-nan {0}"),
    Case(
        "AP901",
        "run async.json --steps 1 --clip-norm 1",
        "such as (1f1b), or remove these options",
        "run async.json --steps 1",
        before=("plan model.py --cluster cpu:2 --parallel pp=2,schedule=pipedream -o async.json",),
    ),
    Case("AP905", RUN + " --wandb mine", r"(--metrics FILE.jsonl)", RUN + " {0}"),
    Case(
        "AP101",
        RUN + " --metrics model.py/run.jsonl",
        "another place by --metrics",
        RUN + " --metrics run.jsonl",
    ),
    Case(
        "AP101",
        RUN + " --trace-steps 1 --trace none/t.json",
        "(mkdir -p none)",
        RUN + " --trace-steps 1 --trace t.json",
    ),
    Case(
        "AP801",
        RUN,
        "",
        RUN,
        files={
            "model.py": MODEL
            + DATA.replace("while True:", "raise OSError('no such disk')\n    while True:")
        },
        mended=WAS,
        exit_code=20,
    ),
    Case(
        "AP802",
        RUN + " --timeout 1",
        "(--timeout)",
        RUN + " {0} 60",
        files={
            "model.py": MODEL
            + DATA.replace("while True:", "__import__('time').sleep(3)\n    while True:")
        },
        exit_code=21,
    ),
    Case(
        "AP910",
        RUN + " --on-nan stop",
        "",
        RUN,
        files={
            "model.py": MODEL
            + DATA.replace(
                "example_batch(global_batch)",
                "{**example_batch(global_batch), 'x': torch.full((global_batch, 8), float('nan'))}",
            )
        },
        mended=WAS,
        exit_code=20,
    ),
    Case(
        "AP959",
        "run served.json --steps 1 --clip-norm 1",
        "remove it, or plan without servers",
        "run served.json --steps 1",
    ),
    Case(
        "AP960",
        "verify free.json",
        "(consistency=bsp)",
        "verify model.py --cluster cpu:2 --parallel servers=1,{0}",
        before=("plan model.py --cluster cpu:2 --parallel servers=1,consistency=asp -o free.json",),
    ),
)


def mended(
    code: str,
    advice: str,
    text: str,
    *,
    exit_code: int = 2,
    after: str = MODEL,
    wrong: str = RUN,
    right: str = RUN,
) -> Case:
    """Make the case of a model file of this text."""
    return Case(
        code,
        wrong,
        advice,
        right,
        files={"model.py": text},
        mended={"model.py": after},
        exit_code=exit_code,
    )


CONTRACT = (
    mended("AP118", "", MODEL + "\n\ndef build_data(rank, world):\n    return []\n"),
    mended(
        "AP118",
        "take start modulo the number of batches",
        MODEL + FINITE,
        after=MODEL + FINITE.replace("if start < 2:", "start %= 2\n    if True:"),
        wrong=RUN.replace("1", "4"),
        right=RUN.replace("1", "4"),
    ),
    mended(
        "AP130",
        "the batch has no y",
        MODEL + DATA.replace("example_batch(global_batch)", "{'x': torch.randn(global_batch, 8)}"),
    ),
    mended(
        "AP130",
        "pass the global batch that was planned",
        MODEL
        + DATA.replace(
            "example_batch(global_batch)",
            "{'x': torch.randn(global_batch, 9), 'y': torch.arange(global_batch) % 4}",
        ),
        after=MODEL + DATA,
    ),
    mended(
        "AP902",
        "return one of torch.optim.lr_scheduler",
        MODEL + "\n\ndef build_scheduler(optimizer):\n    return 1\n",
        after=MODEL + "\n\ndef build_scheduler(optimizer):\n"
        "    return torch.optim.lr_scheduler.ConstantLR(optimizer)\n",
    ),
    mended(
        "AP903",
        r"return torch.optim.AdamW\(parameters\)",
        MODEL + "\n\ndef build_optimizer(parameters):\n    torch.optim.AdamW(parameters)\n",
        after=MODEL
        + "\n\ndef build_optimizer(parameters):\n    return torch.optim.AdamW(parameters)\n",
    ),
    mended(
        "AP904",
        "take the parameters that build_optimizer is given",
        MODEL + "\n\ndef build_optimizer(parameters):\n"
        "    return torch.optim.SGD(Net(8, 8).parameters(), lr=0.1)\n",
        after=MODEL + SGD,
    ),
    mended(
        "AP907",
        "return a list of autoparallel.Callback objects",
        MODEL + "\n\ndef callbacks():\n    return [1]\n",
        after=MODEL
        + "\n\ndef callbacks():\n    import autoparallel\n\n    return [autoparallel.Callback()]\n",
    ),
    mended("AP907", "ZeroDivisionError", MODEL + "\n\ndef callbacks():\n    return [1 / 0]\n"),
    mended(
        "AP955",
        "one of .*(SGD); or a plan without servers",
        MODEL + "\n\ndef build_optimizer(parameters):\n    return torch.optim.LBFGS(parameters)\n",
        after=MODEL + SGD,
        wrong="run model.py --cluster cpu:2 --parallel servers=1 --steps 1",
        right="run model.py --cluster cpu:2 --parallel servers=1 --steps 1",
    ),
)

CASES = (*HOSTS, *OPTIONS, *CONTRACT)
