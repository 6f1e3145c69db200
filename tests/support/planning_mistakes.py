"""Mistakes in options of planning: see ``command_cases``."""

from __future__ import annotations

from command_cases import Case

TWO = "model.py --cluster cpu:2 --global-batch 8"
FOUR = "model.py --cluster cpu:4 --global-batch 8"
DP = "plan model.py --cluster cpu:2 --global-batch 8 --parallel dp=2"
PP = "simulate model.py --cluster cpu:2 --global-batch 8 --parallel pp=2,microbatches=4"
EIGHT = "model.py --set depth=1 --global-batch 8 --cluster 8xH100 --parallel dp=8"
GPT = "gpt.py --set d_model=16 --set n_head=2 --set n_layer=2 --global-batch 4"

TARGETS = (
    Case(
        "AP101",
        "plan modle.py --cluster cpu:2",
        r"did you mean (\S+)\?",
        "plan {0} --cluster cpu:2 --global-batch 8 --parallel dp=2",
    ),
    Case(
        "AP101",
        "plan train.py",
        r"work holds .*(model.py)",
        "plan {0} --cluster cpu:2 --global-batch 8 --parallel dp=2",
    ),
    Case(
        "AP101",
        "plan modle:build_model",
        r"did you mean (\S+)\?",
        "plan {0} --cluster cpu:2 --global-batch 8 --parallel dp=2",
    ),
    Case(
        "AP101",
        "plan elsewhere:build_model",
        r"a file with its ending: (\S+)",
        "plan {0} --cluster cpu:2 --global-batch 8 --parallel dp=2",
    ),
    Case(
        "AP102",
        "plan model:build-it",
        r"use (model.py),",
        "plan {0} --cluster cpu:2 --global-batch 8 --parallel dp=2",
    ),
    Case(
        "AP104",
        "plan model.py:build_mdel",
        r"did you mean (\S+)\?",
        "plan model.py:{0} --cluster cpu:2 --global-batch 8 --parallel dp=2",
    ),
    Case("AP105", f"{DP} --set widht=16", r"did you mean (\S+)\?", DP + " --set {0}=8"),
    Case("AP105", f"{DP} --set hidden=16", r"it takes (\w+), depth", DP + " --set {0}=8"),
    Case("AP107", f"{DP} --seq 8", r"remove --seq", DP),
    Case("AP111", f"{DP} --set width", r"for example: (--set \w+=)", DP + " --set width=8"),
    Case(
        "AP111",
        f"{DP} --set width=8 --set width=8",
        r"--set gives 'width' twice",
        DP + " --set width=8",
    ),
)

PARALLEL = (
    Case(
        "AP112",
        f"plan {TWO} --parallel dp",
        r"(--parallel dp=2),tp=2,pp=2,zero=1,recompute=full,schedule=1f1b",
        "plan " + TWO + " {0}",
    ),
    Case(
        "AP112",
        f"plan {FOUR} --parallel microbatch=4",
        r"did you mean (\w+)\?",
        "plan " + FOUR + " --parallel {0}=4",
    ),
    Case(
        "AP112", f"plan {FOUR} --parallel dp=2,dp=2", r"(--parallel dp=2)", "plan " + FOUR + " {0}"
    ),
    Case("AP112", f"plan {TWO} --parallel zero=4", r"(zero=1)", "plan " + TWO + " --parallel {0}"),
    Case(
        "AP127",
        f"plan {FOUR} --parallel dp=4,shard=3",
        r"shard= one of (\d), 4",
        "plan " + FOUR + " --parallel dp=4,shard={0}",
    ),
    Case("AP112", f"plan {TWO} --parallel dp=two", r"(dp=2)", "plan " + TWO + " --parallel {0}"),
    Case(
        "AP150",
        f"plan {TWO} --parallel schedule=zigzag",
        r"use one of (\w+),",
        "plan " + TWO + " --parallel schedule={0}",
    ),
    Case(
        "AP112",
        f"plan {TWO} --parallel recompute=some",
        r"(recompute=full)",
        "plan " + TWO + " --parallel {0}",
    ),
    Case(
        "AP112",
        f"simulate {TWO} --parallel schedule=bfs,schedule=bfs,pp=2",
        r"twice",
        f"simulate {TWO} --parallel schedule=bfs,pp=2",
    ),
    Case(
        "AP112",
        f"simulate {TWO} --parallel pp=2,chunks=two,schedule=bfs",
        r"a whole number above 0",
        f"simulate {TWO} --parallel pp=2,chunks=2,schedule=bfs",
    ),
    Case(
        "AP112",
        f"{PP} --layers-per-stage 4,0",
        r"for example: (--layers-per-stage) 7,8,8,7",
        PP + " {0} 2,2",
    ),
    Case(
        "AP112",
        f"simulate {FOUR} --parallel servers=1",
        r"autoparallel plan ... (--parallel servers=1)",
        "plan " + FOUR + " {0}",
    ),
    Case(
        "AP112",
        f"simulate {TWO} --parallel dp=2,allreduce=ring",
        "leave allreduce and gradients out",
        f"simulate {TWO} --parallel dp=2",
    ),
    Case(
        "AP112",
        f"simulate {TWO} --parallel pp=2,slices=2",
        "(schedule=terapipe), or leave slices out",
        "simulate " + GPT + " --cluster cpu:2 --parallel pp=2,slices=2,{0}",
    ),
    Case(
        "AP120",
        f"plan {TWO} --parallel pp=2,slices=2",
        "needs (schedule=terapipe)",
        "plan " + GPT + " --cluster cpu:2 --parallel pp=2,slices=2,{0}",
    ),
    Case(
        "AP120",
        f"plan {FOUR} --parallel consistency=bsp",
        "needs (servers=)",
        "plan " + FOUR + " --parallel consistency=bsp,{0}1",
    ),
    Case(
        "AP124",
        f"plan {TWO} --global-batch 8 --micro-batch 3",
        r"a divisor of 8: 1, (\d+)",
        "plan " + TWO + " --global-batch 8 --micro-batch {0}",
    ),
    Case(
        "AP124",
        f"plan {TWO} --global-batch 8 --parallel microbatches=3",
        r"a divisor of 8: 1, (\d+)",
        "plan " + TWO + " --global-batch 8 --parallel microbatches={0}",
    ),
    Case(
        "AP124",
        f"plan {FOUR} --global-batch 6 --parallel dp=4",
        r"a --global-batch that is a multiple of dp=4, such as (\d+)",
        "plan " + FOUR + " --global-batch {0} --parallel dp=4",
    ),
    Case(
        "AP124",
        f"plan {TWO} --global-batch 8 --micro-batch 8 --parallel dp=2",
        r"divides 8 / \(dp=2\): (--micro-batch) 1, (2) or 4",
        "plan " + TWO + " --global-batch 8 {0} {1} --parallel dp=2",
    ),
    Case(
        "AP124",
        f"plan {TWO} --global-batch 8 --parallel dp=2,microbatches=8",
        r"(microbatches=) one of 1, (2), 4",
        "plan " + TWO + " --global-batch 8 --parallel dp=2,{0}{1}",
    ),
    Case(
        "AP124",
        f"simulate {TWO} --global-batch 9 --parallel dp=2,microbatches=2",
        r"a multiple of dp=2, such as (\d+)",
        "simulate " + TWO + " --global-batch {0} --parallel dp=2",
    ),
    Case(
        "AP124",
        f"simulate {TWO} --global-batch 8 --parallel dp=2,microbatches=8",
        r"(microbatches=) one of 1, (2), 4",
        "simulate " + TWO + " --global-batch 8 --parallel dp=2,{0}{1}",
    ),
    Case(
        "AP124",
        f"plan {TWO} --global-batch 8 --micro-batch 1 --parallel microbatches=2",
        r"(microbatches=8), or leave it out",
        "plan " + TWO + " --global-batch 8 --micro-batch 1 --parallel {0}",
    ),
    Case(
        "AP124",
        f"simulate {TWO} --global-batch 9 --parallel dp=2,microbatches=3",
        r"such as (\d+)",
        "simulate " + TWO + " --parallel dp=2 --global-batch {0}",
    ),
    Case(
        "AP112",
        f"simulate {FOUR} --dispatcher deppep",
        r"did you mean (deepep)\?",
        "simulate " + FOUR + " --dispatcher {0}",
    ),
    Case(
        "AP112",
        f"simulate {FOUR} --scaling rowwise",
        r"--precision fp8, or leave (--scaling) out",
        "simulate " + FOUR,
    ),
    Case(
        "AP127",
        f"simulate {FOUR} --parallel dp=4,ep=3",
        r"ep= one of (1)",
        "simulate " + FOUR + " --parallel dp=4,ep={0}",
    ),
    Case(
        "AP127",
        f"plan {FOUR} --parallel dp=3",
        r"degrees whose product divides 4: 1, 2, (\d+)",
        "plan " + FOUR + " --parallel dp={0}",
    ),
    Case(
        "AP127",
        f"plan {FOUR} --parallel dp=2,tp=2,pp=2",
        r"degrees whose product is (\d+)",
        "plan " + FOUR + " --parallel dp={0},tp=1,pp=1",
    ),
    Case(
        "AP127",
        f"simulate {FOUR} --parallel dp=3",
        r"degrees whose product is (\d+)",
        "simulate " + FOUR + " --parallel dp={0}",
    ),
    Case(
        "AP127",
        f"simulate {FOUR} --parallel tp=8",
        r"degrees whose product is (\d+)",
        "simulate " + FOUR + " --parallel tp={0}",
    ),
    Case(
        "AP128",
        "plan model.py --cluster cpu:16 --parallel pp=16",
        r"pp= one of .* (\d+)",
        "plan model.py --cluster cpu:16 --global-batch 16 --parallel dp=4,pp={0}",
    ),
    Case(
        "AP128",
        "simulate model.py --cluster cpu:8 --parallel pp=8",
        r"at most (4), with degrees whose product is (8)",
        "simulate model.py --cluster cpu:8 --parallel dp=2,pp=4",
    ),
    Case(
        "AP128",
        f"{PP} --layers-per-stage 2,1",
        r"for example: (\S+)",
        PP + " --layers-per-stage {0}",
    ),
    Case(
        "AP150",
        f"simulate {TWO} --parallel pp=2,schedule=zigzag",
        r"use one of (\w+),",
        "simulate " + TWO + " --parallel pp=2,schedule={0}",
    ),
    Case("AP150", "show schedules zigzag", r"use one of (\w+),", "show schedules {0}"),
    Case("AP153", f"{PP},chunks=2", r"one of (\w+),", PP + ",chunks=2,schedule={0}"),
    Case(
        "AP153",
        PP + ",chunks=3,schedule=zbv --set depth=7",
        "(chunks=2)",
        PP + ",schedule=zbv,{0}",
    ),
    Case(
        "AP153",
        "show schedules interleaved --stages 4 --chunks 2 --microbatches 9",
        r"a multiple of (\d+) micro-batches",
        "show schedules interleaved --stages 4 --chunks 2 --microbatches {0}",
    ),
    Case(
        "AP153",
        "show schedules dualpipev --stages 4 --microbatches 4",
        r"as many micro-batches as stages, (\d+)",
        "show schedules dualpipev --stages 4 --microbatches {0}",
    ),
    Case(
        "AP153",
        "show schedules chimera --stages 3",
        "an even number of ranks",
        "show schedules chimera --stages 4",
    ),
    Case(
        "AP158",
        f"plan {TWO} --parallel schedule=pipedream",
        r"(pp=2) or more",
        "plan " + TWO + " --parallel schedule=pipedream,{0}",
    ),
    Case(
        "AP158",
        f"plan {TWO} --parallel schedule=pipedream,pp=2,zero=1",
        "(zero=0)",
        "plan " + TWO + " --parallel schedule=pipedream,pp=2,{0}",
    ),
    Case(
        "AP158",
        f"plan {TWO} --parallel schedule=ampnet,pp=2,recompute=full",
        "(recompute=none)",
        "plan " + TWO + " --parallel schedule=ampnet,pp=2,{0}",
    ),
    Case(
        "AP158",
        f"plan {GPT} --cluster cpu:2 --set tied=True --parallel schedule=pipedream,pp=2",
        "without tied parameters, or a synchronous schedule",
        f"plan {GPT} --cluster cpu:2 --parallel schedule=pipedream,pp=2",
    ),
    Case(
        "AP191",
        f"plan {TWO} --parallel schedule=pipedream,pp=2,offload=optimizer",
        "a synchronous schedule, or no offload",
        f"plan {TWO} --parallel schedule=pipedream,pp=2",
    ),
    Case(
        "AP195",
        f"plan {TWO} --parallel dp=2,zero=1,allreduce=ring",
        "(zero=0), or leave allreduce",
        "plan " + TWO + " --parallel dp=2,allreduce=ring,{0}",
    ),
    Case(
        "AP196",
        f"plan {EIGHT},allreduce=ring",
        r"allreduce= one of (\w+)",
        "plan " + EIGHT + ",allreduce={0}",
    ),
    Case(
        "AP197",
        f"plan {TWO} --parallel tp=2,gradients=priority",
        r"(gradients=backward), or dp= of all devices with zero=0 on CPUs",
        "plan " + TWO + " --parallel tp=2,{0}",
    ),
    Case(
        "AP546",
        f"plan {TWO} --parallel schedule=bfs,chunks=8,pp=2",
        "fewer chunks",
        f"plan {TWO} --parallel schedule=bfs,chunks=2,pp=2",
    ),
    Case(
        "AP546",
        f"plan {TWO} --parallel schedule=bfs,chunks=8",
        "a schedule of one stage per rank, fewer chunks",
        f"plan {TWO} --parallel schedule=bfs,chunks=2",
    ),
    Case(
        "AP546",
        f"plan {TWO} --parallel pp=2,chunks=2",
        r"schedule=, one of (\w+)",
        "plan " + TWO + " --parallel pp=2,chunks=2,schedule={0},microbatches=4",
    ),
    Case(
        "AP546",
        f"plan {TWO} --parallel pp=2,chunks=3,schedule=zbv",
        "(chunks=2)",
        "plan " + TWO + " --parallel pp=2,schedule=zbv,{0}",
    ),
    Case(
        "AP546",
        f"plan {TWO} --parallel pp=1,schedule=chimera",
        "(pp=2) or more",
        "plan " + TWO + " --parallel schedule=chimera,{0}",
    ),
    Case(
        "AP549",
        f"plan {GPT} --cluster cpu:4 --parallel cp=2,pp=2,schedule=terapipe",
        "remove cp",
        f"plan {GPT} --cluster cpu:4 --parallel pp=2,schedule=terapipe",
    ),
    Case(
        "AP549",
        f"plan {GPT} --cluster cpu:2 --parallel pp=2,schedule=terapipe,slices=16",
        r"at most (\d+) slices",
        "plan " + GPT + " --cluster cpu:2 --parallel pp=2,schedule=terapipe,slices={0}",
    ),
)

CASES = (*TARGETS, *PARALLEL)
