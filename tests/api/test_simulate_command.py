"""``autoparallel simulate``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoparallel.__main__ import run_command

DEEP = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Net(nn.Module):
    def __init__(self, width=64, depth=8):
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def build_model(width=64, depth=8):
    return Net(width, depth)

def example_batch(global_batch, seq=None):
    return {"x": torch.zeros(global_batch, 16), "y": torch.zeros(global_batch, 16)}

def loss_fn(outputs, batch):
    return (outputs - batch["y"]).square().mean()
"""


@pytest.fixture(scope="module")
def deep_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "deep.py"
    path.write_text(DEEP)
    return str(path)


def simulate(target: str, parallel: str, *more: str) -> int:
    return run_command(
        [
            "simulate",
            target,
            "--cluster",
            "8xA100-80GB",
            "--global-batch",
            "64",
            "--parallel",
            parallel,
            *more,
        ]
    )


def figures(capsys: pytest.CaptureFixture[str], target: str, parallel: str, *more: str) -> dict:
    assert simulate(target, parallel, "--json", *more) == 0
    return json.loads(capsys.readouterr().out)["result"]


def test_the_page_fits_80_columns_and_draws_a_line_per_pipeline_rank(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(deep_file, "tp=2,pp=4,zero=0,microbatches=16,schedule=1f1b") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "tp=2 pp=4 · ZeRO 0 · 1F1B · 16 micro-batches of 4" in out
    drawn = [line.split() for line in out.splitlines() if line.startswith("  rank ")]
    assert [words[1] for words in drawn] == ["0", "1", "2", "3"]
    assert {len(words[2]) for words in drawn} == {68}
    assert drawn[0][2].startswith("F")
    assert drawn[3][2].startswith(".")


def test_the_step_is_what_its_stages_add_up_to(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One device: N (f + b) and the optimizer, no bubble; a pass takes its own work or more."""
    found = figures(capsys, deep_file, "dp=8,microbatches=4", "--no-overlap")
    (stage,) = found["stage_seconds"]
    for way in ("forward", "backward"):
        device = sum(stage[f"{way}_{part}"] for part in ("compute", "communication", "states"))
        issue = stage[f"{way}_issue"]
        assert max(device, issue) <= stage[way] * (1 + 1e-9)
        assert stage[way] <= device + issue
    passes = stage["forward"] + stage["backward"]
    step = 4 * passes + stage["gradient_sync"] + stage["optimizer"]
    assert found["step_seconds"] == pytest.approx(step)
    assert found["bubble_fraction"] == pytest.approx(0.0, abs=1e-12)
    assert found["replicas"] == [8]
    assert found["configuration"]["micro_batch"] == 2


def test_chunks_make_a_smaller_bubble_and_hold_more(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of layers so wide that messages are short beside passes: a chunk waits for one more."""
    wide = ("--global-batch", "16384", "--set", "width=1024")
    plain, looped = (
        figures(capsys, deep_file, f"pp=4,dp=2,microbatches=8{more}", *wide)
        for more in ("", ",schedule=interleaved-1f1b,chunks=2")
    )
    assert looped["bubble_fraction"] < plain["bubble_fraction"]
    assert len(looped["stage_seconds"]) == 2 * len(plain["stage_seconds"])
    assert looped["memory_bytes"][0]["activations"] > plain["memory_bytes"][0]["activations"]


def test_overlap_hides_gradient_sums_and_slows_compute(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    late = figures(capsys, deep_file, "dp=8,microbatches=2", "--no-overlap")
    early = figures(capsys, deep_file, "dp=8,microbatches=2")
    free = figures(capsys, deep_file, "dp=8,microbatches=2", "--slowdown", "1")
    assert late["slowdown_seconds"] == [0.0]
    assert early["slowdown_seconds"][0] > 0
    assert free["step_seconds"] <= early["step_seconds"] < late["step_seconds"]
    assert (
        early["exposed_seconds"][0]["gradient_sync"] < late["exposed_seconds"][0]["gradient_sync"]
    )


def test_what_zero_3_gathers_is_hidden_beside_compute(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    late = figures(capsys, deep_file, "dp=8,microbatches=2,zero=3", "--no-overlap")
    early = figures(capsys, deep_file, "dp=8,microbatches=2,zero=3")
    inside = [each["exposed_seconds"][0]["inside"] for each in (early, late)]
    assert 0 < inside[0] < inside[1]
    assert early["step_seconds"] < late["step_seconds"]


def test_layers_per_stage_move_the_load(deep_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    even = figures(capsys, deep_file, "pp=2,dp=4,microbatches=8")
    given = figures(capsys, deep_file, "pp=2,dp=4,microbatches=8", "--layers-per-stage", "6,2")
    forward = [stage["forward_compute"] for stage in given["stage_seconds"]]
    assert forward[0] > 2 * forward[1]
    assert given["step_seconds"] > even["step_seconds"]


def test_the_trace_is_written_and_ends_with_the_step(
    deep_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    found = figures(capsys, deep_file, "pp=4,dp=2,microbatches=8", "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(found["step_seconds"] * 1e6)
    assert {event["pid"] for event in events} == {0, 1, 2, 3}


def test_a_configuration_that_does_not_fit_is_priced_and_says_so(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(deep_file, "dp=8", "--set", "width=40000") == 0
    assert "does not fit: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("parallel", "more", "code", "says"),
    [
        ("schedule=zigzag", (), "AP150", "unknown schedule 'zigzag'"),
        ("schedule=inference", (), "AP122", "schedule=inference is not one of"),
        ("dp=3,pp=2", (), "AP127", "is 6 devices, the cluster has 8"),
        ("tp=16", (), "AP127", "is 16 devices"),
        ("pp=8,chunks=2,schedule=bfs", (), "AP128", "16 stages need at least one layer each"),
        ("pp=2", ("--layers-per-stage", "4,5"), "AP128", "has 9 layers in 2 stages, not 8 in 2"),
        ("pp=2", ("--layers-per-stage", "8"), "AP128", "8 layers in 1 stages"),
        ("pp=2", ("--layers-per-stage", "8,0"), "AP112", "whole numbers above 0"),
        ("pp=2,chunks=2,microbatches=4", (), "AP153", "runs one chunk per rank"),
        ("pp=2,chunks=two", (), "AP112", "chunks=two"),
        ("dp=8", ("--kernels", "fuse"), "AP112", "'fuse' is not one of eager, compiled, fused"),
        ("tp=2,etp=2", (), "AP112", "etp=2 beside tp=2"),
        ("tp=2,etp=4", ("--as", "megatron"), "AP112", "etp=4 beside tp=2"),
        (
            "dp=2,tp=2,cp=2,ep=8",
            ("--dispatcher", "gather"),
            "AP127",
            "ep=8 spreads experts over cp=2 ranks too",
        ),
        ("pp=2,pipe=2", (), "AP112", "'pipe' is not one of"),
        ("pp=2,schedule=bfs,schedule=bfs", (), "AP112", "given twice"),
        ("microbatches=7", (), "AP124", "7 micro-batches of 9 samples are not"),
        ("dp=8", ("--trace", "/no/such/folder/t.json"), "AP101", "cannot write"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_words(
    deep_file: str,
    parallel: str,
    more: tuple[str, ...],
    code: str,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate(deep_file, parallel, *more) == 2
    captured = capsys.readouterr()
    assert f"error[{code}]" in captured.err
    assert says in captured.err
    assert captured.out == ""


WRITTEN = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)

    def forward(self, x):
        q, k, v = (
            each.view(*x.shape[:2], 4, 64).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)
        )
        scores = torch.softmax(q @ k.transpose(-1, -2) / 8, -1)
        return x + self.out((scores @ v).transpose(1, 2).flatten(2))

def build_model():
    return nn.Sequential(*(Attention() for _ in range(4)))

def example_batch(global_batch, seq=1024):
    return {"input": torch.zeros(global_batch, seq or 1024, 256)}

def loss_fn(outputs, batch):
    return outputs.square().mean()
"""


def test_kernels_that_fuse_products_keep_and_move_no_scores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scores of a layer, 64 rows × 4 heads × 1024 × 1024 in bfloat16, take half a GiB."""
    path = tmp_path / "written.py"
    path.write_text(WRITTEN)
    setting = ("dp=1,microbatches=1", "--cluster", "1xA100-80GB", "--precision", "bf16")
    found = [
        figures(capsys, str(path), *setting, "--kernels", kernels)
        for kernels in ("eager", "compiled", "fused")
    ]
    eager, compiled, fused = (each["step_seconds"] for each in found)
    assert fused < compiled < eager
    peaks = [sum(each["memory_bytes"][0].values()) for each in found]
    assert peaks[0] > peaks[2] + 4 * 2**29
    assert simulate(str(path), "dp=8", "--kernels", "fused") == 0
    assert "fused kernels" in capsys.readouterr().out


def test_experts_are_spread_over_tensor_and_context_parallel_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ("--seq", "32", "--as", "megatron")
    assert simulate("hf:tests/models/mixtral", "dp=2,tp=2,cp=2,ep=4", *more) == 0
    folded = capsys.readouterr().out
    assert "experts on ep=4 ranks of tp, cp, dp" in folded.replace("\n", " ")
    assert simulate("hf:tests/models/mixtral", "dp=2,tp=2,cp=2,ep=2,etp=2", *more) == 0
    assert "experts on ep=2 ranks of cp, dp" in capsys.readouterr().out.replace("\n", " ")


def test_a_micro_batch_is_of_one_rank(deep_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--global-batch", "64", "--micro-batch", "2")
    found = figures(capsys, deep_file, "dp=4,pp=2", *more)
    assert found["configuration"]["micro_batch"] == 2
    assert found["configuration"]["microbatches"] == 8
    asked = figures(capsys, deep_file, "dp=4,pp=2,microbatches=8", "--global-batch", "64")
    assert asked["step_seconds"] == found["step_seconds"]


def test_a_version_in_mixed_precision_has_no_master_copy(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parallel = "dp=2,pp=4,microbatches=16,schedule=pipedream"
    found = figures(capsys, deep_file, parallel, "--precision", "bf16")
    first = found["memory_bytes"][0]
    assert first["versions"] == 3 * first["parameters"] * 2 / (2 + 4)


PINNED = "layers.*.up.weight"


def test_a_pin_decides_how_a_weight_lies(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """First columns, then rows is what is best anyway; the other way round more is summed."""

    def seconds(up: str, down: str) -> float:
        pins = (f"layers.*.up.weight={up}@tp", f"layers.*.down.weight={down}@tp")
        asked = [part for pin in pins for part in ("--pin", pin)]
        return figures(capsys, deep_file, "dp=4,tp=2,microbatches=16", *asked)["step_seconds"]

    free = figures(capsys, deep_file, "dp=4,tp=2,microbatches=16")["step_seconds"]
    assert seconds("S(0)", "S(1)") == pytest.approx(free)
    assert seconds("S(1)", "S(0)") > free


def test_a_pin_on_one_layer_leaves_the_layers_as_they_are_counted(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parallel = "dp=2,tp=2,pp=2,microbatches=16"
    free, pinned = (
        figures(capsys, deep_file, parallel, *pin)["stage_seconds"]
        for pin in ((), ("--pin", "layers.3.up.weight=S(1)@tp"))
    )
    assert len(pinned) == 2
    assert pinned[0] != free[0]
    assert pinned[1] == free[1]


def test_a_pin_that_the_configuration_cannot_keep_is_refused(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(deep_file, "dp=8,microbatches=8", "--pin", f"{PINNED}=S(0)@tp") == 2
    assert "error[AP184]" in capsys.readouterr().err
    assert simulate(deep_file, "dp=8,microbatches=8", "--pin", "layers.*.upp.weight=R@tp") == 2
    assert "error[AP181]" in capsys.readouterr().err


def test_measured_times_are_asked_for_as_when_planning(
    deep_file: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    missing = str(tmp_path / "none.db")
    assert simulate(deep_file, "dp=8,microbatches=8", "--database", missing) == 2
    assert "error[AP171]" in capsys.readouterr().err
    plain = figures(capsys, deep_file, "dp=8,microbatches=8", "--profile", "analytic")
    assert plain["step_seconds"] > 0


@pytest.mark.slow
def test_slices_of_sequences_keep_more_than_whole_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Keys and values of earlier slices, and masks; more slices keep more of them."""
    gpt = str(Path(__file__).parents[2] / "examples" / "gpt.py")
    held = [
        figures(
            capsys,
            gpt,
            f"dp=4,pp=2,microbatches=4,schedule={schedule}",
            "--seq",
            "64",
            "--set",
            "n_layer=4",
        )["memory_bytes"][0]["activations"]
        for schedule in ("gpipe", "terapipe,slices=2", "terapipe,slices=4")
    ]
    assert held[0] < held[1] < held[2]


def test_a_plan_of_the_same_degrees_has_the_same_price(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parallel = "dp=8,tp=1,pp=1,zero=1,microbatches=4,recompute=full"
    step = figures(capsys, deep_file, parallel)["step_seconds"]
    command = [
        "plan",
        deep_file,
        "--cluster",
        "8xA100-80GB",
        "--global-batch",
        "64",
        "--parallel",
        parallel,
        "--json",
    ]
    assert run_command(command) == 0
    plan = json.loads(capsys.readouterr().out)["result"]
    assert {block["recompute"] for block in plan["stages"][0]["blocks"]} == {"full"}
    assert step == pytest.approx(plan["prediction"]["step_seconds"], rel=1e-9)


def test_the_page_says_how_blocks_are_recomputed(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(deep_file, "dp=8,microbatches=4,recompute=selective") == 0
    assert "selective recompute" in capsys.readouterr().out


def test_a_configuration_is_priced_as_a_named_system_trains_it(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = figures(capsys, deep_file, "tp=2,dp=4", "--precision", "bf16")
    found = figures(capsys, deep_file, "tp=2,dp=4", "--precision", "bf16", "--as", "megatron")
    assert (own["priced_as"], found["priced_as"]) == ("run", "megatron")
    assert not own["configuration"]["compiled"]
    assert found["configuration"]["compiled"]
    assert found["configuration"]["fuses_products"]
    assert simulate(deep_file, "tp=2,dp=4", "--as", "megatron") == 0
    assert "as Megatron-LM trains" in capsys.readouterr().out
    asked = ("--as", "megatron", "--kernels", "eager", "--dispatcher", "gather")
    other = figures(capsys, deep_file, "tp=2,dp=4", *asked)
    assert not other["configuration"]["compiled"]


def test_recomputed_parts_make_recomputation_selective(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = figures(capsys, deep_file, "dp=8", "--recompute-parts", "mlp, layernorm")
    assert found["configuration"]["recompute"] == "selective"


@pytest.mark.parametrize(
    ("more", "says", "fix"),
    [
        (
            ("--as", "megatro"),
            "--as: 'megatro' is not one of run, megatron",
            "did you mean megatron?",
        ),
        (("--recompute-parts", "mpl"), "'mpl' is not one of core_attn", "did you mean mlp?"),
        (("--kernels", "fuzed"), "'fuzed' is not one of eager", "did you mean fused?"),
    ],
)
def test_unknown_values_name_those_that_are_known(
    deep_file: str, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], says: str, fix: str
) -> None:
    assert simulate(deep_file, "dp=8", *more) == 2
    error = capsys.readouterr().err
    assert says in error
    assert fix in error


def test_parts_beside_full_recomputation_are_refused(
    deep_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(deep_file, "dp=8,recompute=full", "--recompute-parts", "mlp") == 2
    assert "--recompute-parts mlp beside recompute=full" in capsys.readouterr().err
