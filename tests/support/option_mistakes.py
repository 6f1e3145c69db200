"""Mistakes in options of planning beside the degrees, as tables of ``command_cases.Case``."""

from __future__ import annotations

from command_cases import Case
from planning_mistakes import DP, FOUR, GPT, TWO

SERVERS = (
    Case(
        "AP950",
        f"plan {TWO} --parallel servers=2",
        "fewer servers, or (place=beside)",
        "plan " + TWO + " --parallel servers=2,{0}",
    ),
    Case(
        "AP951",
        f"plan {FOUR} --parallel servers=1,microbatches=2 --global-batch 24",
        r"(microbatches=) one of (3)",
        "plan " + FOUR + " --global-batch 24 --parallel servers=1,{0}{1}",
    ),
    Case(
        "AP951",
        f"plan {FOUR} --parallel servers=1,consistency=asp",
        r"(--global-batch \d+)",
        "plan " + FOUR + " --parallel servers=1,consistency=asp {0}",
    ),
    Case(
        "AP952",
        f"plan {FOUR} --parallel servers=1,tp=2",
        "remove tp",
        f"plan {FOUR} --parallel servers=1",
    ),
    Case(
        "AP952",
        f"plan {FOUR} --parallel servers=1,schedule=1f1b",
        "remove schedule",
        f"plan {FOUR} --parallel servers=1",
    ),
    Case(
        "AP953",
        "plan model.py --cluster 8xH100 --parallel servers=1",
        "a cluster such as (cpu:4)",
        "plan model.py --cluster {0} --global-batch 8 --parallel servers=1",
    ),
    Case(
        "AP956",
        f"plan {FOUR} --parallel servers=1 --precision bf16",
        "(fp32)",
        "plan " + FOUR + " --parallel servers=1 --precision {0}",
    ),
    Case(
        "AP957",
        f"plan {TWO} --parallel servers=1,consistency=ssp",
        "(consistency=ssp,staleness=2)",
        "plan " + TWO + " --parallel servers=1,{0}",
    ),
)

OPTIONS = (
    Case("AP113", f"{DP} --precision fp12", r"did you mean (\w+)", DP + " --precision {0}"),
    Case("AP113", f"{DP} --float32-ops all", "is not one of (autocast)", DP + " --float32-ops {0}"),
    Case(
        "AP113",
        f"{DP} --gradient-dtype half",
        "is not one of (master)",
        DP + " --gradient-dtype {0}",
    ),
    Case("AP113", f"{DP} --tf32 yes", "is not one of (none)", DP + " --tf32 {0}"),
    Case("AP114", f"{DP} --optimizer adamww", "did you mean (adamw)", DP + " --optimizer {0}"),
    Case("AP115", "plan model.py --cluster 8xH1OO", r"(H100)", "show cluster 8x{0}"),
    Case("AP115", "plan model.py --cluster cluster.tml", r"", "show cluster 8xH100"),
    Case("AP117", f"{DP} --memory-limit 72gigs", r": (72GiB)", DP + " --memory-limit {0}"),
    Case(
        "AP126",
        "plan model.py --cluster 8xT4 --parallel dp=8 --precision bf16",
        r"(--precision fp16)",
        "plan model.py --set depth=1 --global-batch 8 --cluster 8xT4 --parallel dp=8 {0}",
    ),
    Case(
        "AP126",
        "plan model.py --cluster 8xA100 --parallel dp=8 --precision fp8",
        r"(--precision bf16)",
        "plan model.py --set depth=1 --global-batch 8 --cluster 8xA100 --parallel dp=8 {0}",
    ),
    Case("AP129", f"{DP} --tf32 all", "(--tf32 none)", DP + " {0}"),
    Case("AP173", f"{DP} --profile guessed", r"is not one of (auto)", DP + " --profile {0}"),
    Case(
        "AP180",
        f"{DP} --pin layers",
        r"for example: --pin '\S+=(S\(0\)@tp)'",
        f"plan {TWO} --parallel tp=2 --pin layers.*.linear.weight=" + "{0}",
    ),
    Case(
        "AP181",
        f"plan {TWO} --parallel tp=2 --pin layers.*.linaer.weight=S(0)@tp",
        r"similar names: (\S+),",
        "plan " + TWO + " --parallel tp=2 --pin {0}=S(0)@tp",
    ),
    Case(
        "AP181",
        f"plan {TWO} --parallel pp=2 --stage-at layer.2",
        r"similar names: (\S+),",
        "plan " + TWO + " --parallel pp=2 --stage-at {0}",
    ),
    Case(
        "AP181",
        f"plan {TWO} --parallel pp=2 --stage-at body",
        r"the blocks are \S+, (\S+),",
        "plan " + TWO + " --parallel pp=2 --stage-at {0}",
    ),
    Case(
        "AP182",
        f"plan {TWO} --pin layers.*.linear.weight=S(0)@tensor",
        "one of .*(tp)",
        "plan " + TWO + " --parallel tp=2 --pin layers.*.linear.weight=S(0)@{0}",
    ),
    Case(
        "AP183",
        f"plan {TWO} --parallel tp=2 --pin layers.*.linear.weight=S(7)@tp",
        "another layout",
        f"plan {TWO} --parallel tp=2 --pin layers.*.linear.weight=S(0)@tp",
    ),
    Case(
        "AP183",
        f"plan {TWO} --parallel tp=2 --pin layers.*.linear.weight=S(0)@tp "
        "--pin layers.0.linear.weight=S(1)@tp",
        "remove one of the two",
        f"plan {TWO} --parallel tp=2 --pin layers.*.linear.weight=S(0)@tp",
    ),
    Case(
        "AP183",
        f"plan {FOUR} --parallel pp=2 --stage-at layers.1 --stage-at layers.2",
        "(pp=3), or (fewer --stage-at)",
        f"plan {FOUR} --parallel pp=2 --stage-at layers.1",
    ),
    Case(
        "AP183",
        f"plan {TWO} --stage-at layers.1 --stage-at layers.2",
        "fewer --stage-at",
        f"plan {TWO} --stage-at layers.1",
    ),
    Case(
        "AP183",
        f"plan {GPT} --cluster cpu:2 --parallel pp=2 --stage-at layers.1.mlp",
        r"(--stage-at \S+)",
        "plan " + GPT + " --cluster cpu:2 --parallel pp=2 {0}",
    ),
    Case(
        "AP184",
        f"plan {TWO} --parallel dp=2 --pin layers.*.linear.weight=S(0)@tp",
        "(--parallel tp=)N with an N",
        "plan " + TWO + " {0}2 --pin layers.*.linear.weight=S(0)@tp",
    ),
    Case(
        "AP184",
        f"simulate {TWO} --parallel dp=2 --pin layers.*.linear.weight=S(0)@tp",
        "remove a pin, or set the required axis in --parallel",
        f"simulate {TWO} --parallel tp=2 --pin layers.*.linear.weight=S(0)@tp",
    ),
    Case("AP185", f"{DP} --deny offlaod", "did you mean (offload)", DP + " --deny {0}"),
    Case(
        "AP186", f"{DP} --deny tp --allow tp", "remove it from --allow or --deny", f"{DP} --deny tp"
    ),
    Case(
        "AP186",
        f"plan {TWO} --deny 1f1b,gpipe,eager-1f1b,zb-h1,zb-h2,interleaved "
        "--deny bfs,zbv,dualpipev,chimera,terapipe",
        r"allow at least one of (\w+)",
        "plan " + TWO + " --allow {0}",
    ),
    Case(
        "AP186",
        f"plan {TWO} --stage-at layers.1 --deny pp",
        "remove one of the two",
        f"plan {TWO} --deny pp",
    ),
    Case(
        "AP186",
        f"plan {TWO} --parallel schedule=bfs,chunks=2 --deny pp",
        "remove one of the two",
        f"plan {TWO} --deny pp",
    ),
    Case(
        "AP186",
        f"plan {TWO} --parallel tp=2 --max-tp 1",
        "remove --parallel tp or --max-tp",
        f"plan {TWO} --parallel tp=2",
    ),
    Case(
        "AP186",
        f"plan {TWO} --parallel tp=2 --deny tp",
        "remove it from --parallel or --deny",
        f"plan {TWO} --parallel tp=2",
    ),
    Case("AP187", f"{DP} --gap 1.5", "between 0 and 1", f"{DP} --gap 0.5"),
    Case("AP188", f"{DP} --objective speed", "is not one of (time)", DP + " --objective {0}"),
    Case("AP188", f"{DP} --objective cost", "(--price) DOLLARS", DP + " --objective cost {0} 2.5"),
    Case(
        "AP188",
        f"{DP} --objective cost --price cheap",
        "(--price 2.5)",
        DP + " --objective cost {0}",
    ),
    Case(
        "AP189",
        f"plan {TWO} --objective devices --deadline soon",
        "(--deadline 24h/1000steps)",
        "plan " + TWO + " --objective devices {0}",
    ),
    Case(
        "AP189",
        f"plan {TWO} --objective devices",
        "(--deadline 24h/1000steps)",
        "plan " + TWO + " --objective devices {0}",
    ),
    Case(
        "AP302",
        f"{DP} --objective time --deadline 1ms/1000steps",
        "a deadline (.*) times as long",
        f"{DP} --deadline 24h/1000steps",
        exit_code=4,
    ),
    Case("AP330", f"{DP} --search all", "is not one of (dp)", DP + " --search {0}"),
    Case("AP331", f"{DP} --solver lowest", "one of (highs)", DP + " --solver {0}"),
    Case(
        "AP402",
        f"{DP} --solver gurobi",
        "installed here: (highs)",
        DP + " --solver {0}",
        exit_code=5,
    ),
    Case(
        "AP840",
        f"{DP} --measure-seconds -1",
        "(0) turns measuring before planning off",
        DP + " --measure-seconds {0}",
    ),
    Case(
        "AP840",
        DP,
        "(0) turns measuring",
        DP + " --measure-seconds {0}",
        variables={"AUTOPARALLEL_MEASURE_SECONDS": "few"},
    ),
    Case("AP841", f"{DP} --tolerance 2", r"(0\.02) treats", DP + " --tolerance {0}"),
)

CASES = (*SERVERS, *OPTIONS)
