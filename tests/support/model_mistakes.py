"""Mistakes in model files: see ``command_cases``."""

from __future__ import annotations

from collections.abc import Mapping

from command_cases import MODEL, Case, model
from planning_mistakes import DP

BATCH = MODEL[MODEL.index("def example_batch") :]
WAS = {"model.py": MODEL}


def wrong_model(
    code: str,
    advice: str,
    *changes: tuple[str, str],
    right: str = DP,
    wrong: str = DP,
    exit_code: int = 2,
    mended: Mapping[str, str] = WAS,
) -> Case:
    """Make the case of a model file with these changes."""
    return Case(
        code,
        wrong,
        advice,
        right,
        files={"model.py": model(*changes)},
        mended=mended,
        exit_code=exit_code,
    )


RETURN = "return functional.cross_entropy(self.head(self.layers(x)), y)"


def registered(name: str) -> str:
    """A function of this name that is registered as an op."""
    return (
        "import autoparallel\n\n\n"
        '@autoparallel.register_op("b h -> b h")\n'
        f"def {name}(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n\n\n"
        "class Layer(nn.Module)"
    )


def scheduled(name: str, kinds: str = "FB") -> str:
    """The model file with a schedule of this name that has actions of these kinds."""
    text = (
        "import autoparallel\n\n\n"
        f'@autoparallel.register_schedule("{name}")\n'
        "def own(num_ranks, num_microbatches):\n"
        "    for rank in range(num_ranks):\n"
        f'        yield [f"{{rank}}{{k}}{{m}}" for k in "{kinds}" for m in range(num_microbatches)]'
        "\n\n\nclass Layer(nn.Module)"
    )
    return model(("class Layer(nn.Module)", text))


MODELS = (
    wrong_model(
        "AP103",
        "AttributeError: module 'torch.nn' has no attribute 'Modul'",
        ("(nn.Module)", "(nn.Modul)"),
    ),
    wrong_model("AP103", "SyntaxError", ("def build_model(", "def build_model((")),
    wrong_model("AP104", r"define (build_model)\(\*\*settings\)", ("def build_model", "def make")),
    wrong_model(
        "AP104",
        r"did you mean (buildmodel)\?",
        ("def build_model", "def buildmodel"),
        right="plan model.py:{0} --cluster cpu:2 --global-batch 8 --parallel dp=2",
        mended={},
    ),
    wrong_model(
        "AP104", "is a int, not a function", ("def build_model", "build_model = 1\n\ndef make")
    ),
    wrong_model(
        "AP105", r"(--set width=)VALUE", ("width=8, ", "width, "), right=DP + " {0}8", mended={}
    ),
    wrong_model("AP106", "TypeError", ("return Net(width, depth)", "return Net(width)")),
    wrong_model("AP106", "returns a NoneType", ("return Net(width, depth)", "Net(width, depth)")),
    wrong_model(
        "AP107",
        r"define (example_batch)\(global_batch, seq=None\) that returns a dict",
        (BATCH, ""),
    ),
    wrong_model("AP107", r"did you mean (examplebatch)\?", ("example_batch", "examplebatch")),
    wrong_model(
        "AP107", "RuntimeError|TypeError", ("torch.randn(global_batch, 8)", "torch.randn('8')")
    ),
    wrong_model(
        "AP107",
        r"define example_batch\(global_batch, seq=None\)",
        wrong=DP + " --seq 4",
        right=DP + " --seq 4",
        mended={
            "model.py": model(
                ("example_batch(global_batch)", "example_batch(global_batch, seq=None)")
            )
        },
    ),
    wrong_model(
        "AP108",
        "return a dict or a tuple",
        (
            'return {"x": torch.randn(global_batch, 8), "y": torch.arange(global_batch) % 4}',
            "return torch.randn(global_batch, 8)",
        ),
    ),
    wrong_model(
        "AP108",
        "whose tensors have global_batch rows",
        ("torch.randn(global_batch, 8)", "torch.randn(7, 8)"),
        ("torch.arange(global_batch) % 4", "torch.arange(7) % 4"),
        wrong=DP + " --global-batch 6",
    ),
    wrong_model(
        "AP160",
        '"b s h, h o -> b s o"',
        ("class Layer(nn.Module)", registered("ap160").replace("b h -> b h", "b h")),
        mended={"model.py": model(("class Layer(nn.Module)", registered("ap160")))},
    ),
    wrong_model(
        "AP161",
        "one group of dimension names",
        ("class Layer(nn.Module)", registered("ap161").replace("b h -> b h", "b h, h -> b h")),
        mended={"model.py": model(("class Layer(nn.Module)", registered("ap161")))},
    ),
    Case(
        "AP163",
        DP,
        r'register_op\(..., (name=)"another"\)',
        DP,
        files={
            "own.py": "import torch\n"
            + registered("twice")
            .replace('h")', 'h", name="twice")')
            .replace("class Layer(nn.Module)", ""),
            "model.py": model(
                (
                    "class Layer(nn.Module)",
                    "import own\n\n\n" + registered("twice").replace('h")', 'h", name="twice")'),
                )
            ),
        },
        mended={
            "model.py": model(
                (
                    "class Layer(nn.Module)",
                    "import own\n\n\n" + registered("twice").replace('h")', 'h", name="another")'),
                )
            )
        },
    ),
    Case(
        "AP150",
        "show schedules own --target model.py",
        r'register_schedule\("(own)"\) in the model file',
        "show schedules {0} --target model.py",
        mended={"model.py": scheduled("own")},
    ),
    Case(
        "AP159",
        "show schedules partial --target model.py",
        r"add it to rank \d",
        "show schedules partial --target model.py",
        files={"model.py": scheduled("partial", "F")},
        mended={"model.py": scheduled("partial")},
    ),
    Case(
        "AP168",
        "show schedules --target model.py",
        'another name, such as "(my-1f1b)"',
        "show schedules {0} --target model.py",
        files={"model.py": scheduled("1f1b")},
        mended={"model.py": scheduled("my-1f1b")},
    ),
    wrong_model(
        "AP201",
        "the same error there is the model's own",
        (RETURN, RETURN.replace("self.head", "self.haed")),
        exit_code=3,
    ),
    wrong_model(
        "AP202",
        r"(torch\.where)",
        (
            RETURN,
            "h = self.layers(x)\n        h = h * 2 if h.sum() > 0 else h\n        "
            + RETURN.replace("self.layers(x)", "h"),
        ),
        exit_code=3,
        mended={
            "model.py": model(
                (
                    RETURN,
                    "h = self.layers(x)\n        h = torch.where(h.sum() > 0, h * 2, h)\n        "
                    + RETURN.replace("self.layers(x)", "h"),
                )
            )
        },
    ),
    wrong_model(
        "AP203",
        r"add `(loss_fn\(outputs, batch\))`",
        (RETURN, "return {'logits': self.head(self.layers(x))}"),
        exit_code=3,
        mended={
            "model.py": model((RETURN, "return self.head(self.layers(x))"))
            + "\ndef loss_fn(outputs, batch):\n"
            '    return functional.cross_entropy(outputs, batch["y"])\n'
        },
    ),
    wrong_model(
        "AP204",
        r"reduce it \(`(.mean\(\))`\)",
        (RETURN, RETURN.replace(", y)", ', y, reduction="none")')),
        exit_code=3,
        mended={
            "model.py": model((RETURN, RETURN.replace(", y)", ', y, reduction="none").mean()')))
        },
    ),
    wrong_model(
        "AP205",
        "use `(--precision)` in place of autocast",
        (RETURN, 'with torch.autocast("cpu", torch.bfloat16):\n            ' + RETURN),
        exit_code=3,
        right=DP + " {0} bf16",
    ),
    wrong_model(
        "AP217",
        "rename it: add_module, (register_parameter), setattr",
        (
            "self.head = nn.Linear",
            'self.register_parameter("a\\x9bb", nn.Parameter(torch.ones(1)))\n'
            "        self.head = nn.Linear",
        ),
        exit_code=3,
    ),
)

SQUARES = (
    "return (self.layers(x).T @ self.layers(x)).square().mean() + self.head.weight.square().mean()"
)
MIXED = {"model.py": model((RETURN, SQUARES))}
NORM = {
    "model.py": model(
        ("nn.Linear(width, width)", "nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))")
    )
}

ROWS = (
    Case(
        "AP125",
        "plan model.py --cluster cpu:2 --parallel tp=2,microbatches=2 --global-batch 8",
        "(microbatches=1), or leave it out|--global-batch",
        "plan model.py --cluster cpu:2 --global-batch 8 --parallel tp=2,{0}",
        files=MIXED,
    ),
    Case(
        "AP547",
        "plan model.py --cluster cpu:2 --parallel schedule=chimera,pp=2",
        "such as (1f1b)",
        "plan model.py --cluster cpu:2 --parallel pp=2,schedule={0}",
        files=NORM,
        exit_code=6,
    ),
    Case(
        "AP548",
        "plan model.py --cluster cpu:2 --parallel schedule=terapipe,pp=2",
        "such as (1f1b)",
        "plan model.py --cluster cpu:2 --parallel pp=2,schedule={0}",
        exit_code=6,
    ),
    Case(
        "AP954",
        "plan model.py --cluster cpu:2 --parallel servers=1",
        "(track_running_stats=False)",
        "plan model.py --cluster cpu:2 --parallel servers=1",
        files=NORM,
        mended={
            "model.py": NORM["model.py"].replace(
                "nn.BatchNorm1d(width)", "nn.BatchNorm1d(width, track_running_stats=False)"
            )
        },
    ),
)


CASES = (*MODELS, *ROWS)
