"""Mistakes in plans, profiles and other files: see ``command_cases``."""

from __future__ import annotations

from command_cases import MODEL, SMALL, Case, model
from planning_mistakes import DP

MEASURE = "profile model.py --cluster cpu:1 --set depth=1 --global-batch 8 --budget 1"
BIAS = "self.head = nn.Linear(width, 4)"
PLANS = (
    Case("AP101", "inspect plam.json", r"did you mean (\S+)\?", "inspect plan.json && inspect {0}"),
    Case(
        "AP101",
        "inspect mistral-seven.json",
        r"autoparallel (plan) TARGET (-o) plan.json",
        "{0} model.py --cluster cpu:2 --global-batch 8 --parallel dp=2 {1} mistral-seven.json",
    ),
    Case(
        "AP155",
        "show program plan.json -o stage.lp",
        "add (--trust)",
        "show program plan.json -o stage.lp {0}",
        before=("plan ../model.py --cluster cpu:2 --parallel dp=2 -o plan.json",),
        files={"../model.py": MODEL},
    ),
    Case(
        "AP332",
        "show program plan.json -o stage.txt",
        r"(-o stage.mps)",
        "show program plan.json {0}",
    ),
    Case(
        "AP101",
        "show program plan.json -o out/stage.mps",
        "(mkdir -p out)",
        "show program plan.json -o stage.mps",
    ),
    Case(
        "AP332",
        "show program plan.json -o stage.mps --stage 3",
        r"(--stage 0) to 0",
        "show program plan.json -o stage.mps {0}",
    ),
    Case(
        "AP332",
        "show program plan.json -o stage.mps --objective cost",
        r"is not one of (\w+)",
        "show program plan.json -o stage.mps --objective {0}",
    ),
    Case(
        "AP342",
        "inspect plan.json",
        "run the plan again, or (delete the file)",
        "inspect plan.json",
        files={"plan.measured.json": "{"},
        mended={"plan.measured.json": None},
    ),
    Case(
        "AP101",
        "inspect plan.json --html out/page.html",
        "(mkdir -p out)",
        "inspect plan.json --html page.html",
    ),
    Case(
        "AP501",
        "inspect plan.json",
        "plan again",
        DP + " -o plan.json && inspect plan.json",
        files={"plan.json": "{"},
        exit_code=6,
    ),
    Case(
        "AP501",
        "inspect plan.json",
        "autoparallel plan TARGET (-o plan.json)",
        DP + " {0} && inspect plan.json",
        files={"plan.json": "[]"},
        exit_code=6,
    ),
    Case(
        "AP502",
        "inspect plan.json",
        "plan again",
        DP + " -o plan.json && inspect plan.json",
        files={"plan.json": '{"schema": 99}'},
        exit_code=6,
    ),
    Case(
        "AP503",
        "inspect plan.json",
        "plan again",
        DP + " -o plan.json && inspect plan.json",
        files={"plan.json": '{"schema": 6}'},
        exit_code=6,
    ),
    Case(
        "AP550",
        "verify plan.json",
        "plan again",
        DP + " -o plan.json && explain plan.json zero",
        files={"model.py": model((BIAS, "self.head = nn.Linear(width, 4, bias=False)"))},
        exit_code=6,
    ),
    Case("AP353", "compare plan.json fsdb", r"did you mean (\w+)\?", "compare plan.json {0}"),
    Case("AP353", "compare plan.json zzz", r"or (ddp)", "compare plan.json {0}"),
    Case(
        "AP353",
        "compare gpus.json 3d",
        r"for example: (3d:tp)=8,pp=4",
        "compare gpus.json {0}=2,pp=1",
    ),
    Case(
        "AP353",
        "compare plan.json empty",
        "name a plan, or the file that (run --metrics) wrote",
        "compare plan.json run.jsonl",
        files={"empty/x": ""},
        before=("run alone.json --steps 2 --metrics run.jsonl",),
    ),
    Case("AP354", "compare ddp fsdp", "name a plan file too", "compare plan.json ddp fsdp"),
    Case(
        "AP355",
        "compare plan.json notes.jsonl",
        r"autoparallel (run plan.json --metrics) run.jsonl",
        "{0} notes2.jsonl --steps 1",
        files={"notes.jsonl": "{}"},
    ),
    Case("AP356", "compare plan.json", "compare (plan.json fsdp)", "compare {0}"),
    Case(
        "AP124",
        "compare plan.json ddp:microbatches=3",
        "microbatches= of a multiple of dp rows",
        "compare plan.json ddp:microbatches=2",
    ),
    Case(
        "AP127", "compare plan.json tp3", r"degrees whose product .*(2)", "compare plan.json tp{0}"
    ),
    Case(
        "AP357",
        "explain plan.json layers.0.linaer.weight",
        "(layers.0.linear.weight)",
        "explain plan.json {0}",
    ),
    Case("AP357", "explain plan.json zzz", "or .*(zero), ", "explain plan.json {0}"),
    Case("AP357", "explain plan.json 'stage 7'", "(stage 0)", "explain plan.json '{0}'"),
    Case(
        "AP358",
        "explain gpus.json --what-if link.inter.bytes_per_secnod=1",
        "similar names: (link.intra.bytes_per_second|link.inter.bytes_per_second|\\S+)",
        "explain gpus.json --what-if {0}=50e9",
    ),
    Case(
        "AP358",
        "explain gpus.json --what-if colour=blue",
        "one of ([^ ,]+)",
        "explain gpus.json --what-if {0}=40GiB",
    ),
    Case(
        "AP358",
        "explain gpus.json --what-if fast",
        "FIGURE|for example: (--what-if link.inter.bytes_per_second=50e9)",
        "explain gpus.json --what-if device.memory_bytes=40GiB",
    ),
    Case(
        "AP359",
        "explain gpus.json --what-if device.memory_bytes=much",
        "80(GiB)",
        "explain gpus.json --what-if device.memory_bytes=80{0}",
    ),
    Case("AP360", "explain plan.json", "autoparallel (explain plan.json zero)", "{0}"),
    Case(
        "AP112",
        "explain plan.json --why-not dq=2",
        "--parallel dp=2",
        "explain plan.json --why-not tp=2",
    ),
    Case("AP370", "launch gpus.json", "one of (--slurm)", "launch gpus.json {0}"),
    Case(
        "AP371",
        "launch plan.json --ssh --hosts a",
        "autoparallel (run plan.json), on that host",
        "{0} --steps 1",
    ),
    Case(
        "AP372",
        "launch hosts.json --ssh --hosts a",
        "one host for each of the cluster's",
        "launch hosts.json --ssh --hosts a,b",
    ),
    Case(
        "AP373",
        "launch hosts.json --ssh --hosts a,a",
        "host names separated by commas",
        "launch hosts.json --ssh --hosts a,b",
    ),
    Case(
        "AP374",
        "launch mixed.json --slurm",
        "--hosts node1,node2",
        "launch mixed.json --slurm --hosts node1,node2",
    ),
    Case(
        "AP374",
        "launch uneven.json --slurm --hosts a,b",
        "start it with (--ssh)",
        "launch uneven.json {0} --hosts a,b",
    ),
    Case(
        "AP375", "launch hosts.json --ssh", r"(--hosts node1,node2)", "launch hosts.json --ssh {0}"
    ),
    Case("AP376", "launch hosts.json --k8s", r"(--image) NAME", "launch hosts.json --k8s {0} name"),
    Case(
        "AP377",
        "launch mixed.json --k8s --image name",
        r"--ssh, or with (--slurm) and (--hosts)",
        "launch mixed.json {0} {1} a,b",
    ),
    Case(
        "AP378",
        "launch hosts.json --k8s --image name --name My_Job",
        "small letters, digits and -",
        "launch hosts.json --k8s --image name --name my-job",
    ),
    Case(
        "AP101",
        "launch hosts.json --slurm -o plan.json/x",
        "another place by (--output)",
        "launch hosts.json --slurm {0} files",
    ),
    Case(
        "AP379",
        "explain llama.json --trust --lengths lengths.txt",
        "the number of positions of one sequence on each line",
        "explain llama.json --trust --lengths lengths.txt",
        files={"lengths.txt": "many\n"},
        mended={"lengths.txt": "16\n3\n"},
    ),
    Case("AP380", "doctor --plan plan.json --cluster cpu:2", "give one", "doctor"),
    Case("AP361", "export plan.json -o out", "(--to) python", "export plan.json -o out {0} python"),
    Case(
        "AP361", "export plan.json --to hf -o out", "(--to python)", "export plan.json -o out {0}"
    ),
    Case(
        "AP362",
        "export saved/step-00000002 --to python -o out",
        "of a checkpoint: (--to safetensors)",
        "export saved/step-00000002 {0} -o out",
    ),
    Case(
        "AP363",
        "export plan.json --to python --dtype fp32 -o out",
        "leave these options out",
        "export plan.json --to python -o out",
    ),
    Case(
        "AP365",
        "export plan.json --to megatron -o out",
        "plan for GPUs: (--cluster 8xH100)",
        f"plan model.py {SMALL} --parallel dp=8" + " {0}",
    ),
    Case(
        "AP870",
        "export plan.json --to pyhton -o out",
        r"did you mean (\w+)\?",
        "export plan.json --to {0} -o out",
    ),
    Case(
        "AP869",
        "export plan.json --to python -o old",
        "(--force)",
        "export plan.json --to python -o old {0}",
        files={"old/x": ""},
    ),
    Case(
        "AP869",
        "export plan.json --to python -o .",
        "(-o exported)",
        "export plan.json --to python {0}",
    ),
    Case(
        "AP869",
        "export plan.json --to python -o model.py",
        "is a file, not a folder",
        "export plan.json --to python -o out",
    ),
    Case(
        "AP366",
        "export plan.json --to python -o out",
        "move what needs autoparallel out",
        "export plan.json --to python -o out",
        files={"model.py": "import autoparallel\n" + MODEL},
        mended={"model.py": MODEL},
        exit_code=6,
    ),
    Case(
        "AP366",
        "export served.json --to python -o out",
        "plan with (--deny servers)",
        DP + " {0}",
        exit_code=6,
    ),
    Case(
        "AP368",
        "export split.json --to python -o out",
        "plan with dp and ZeRO 0 alone",
        "export zero0.json --to python -o out",
        exit_code=6,
        files={
            "model.py": MODEL + "\nclass Own(torch.optim.SGD):\n    pass\n\n\n"
            "def build_optimizer(params):\n    return Own(params, lr=0.1)\n"
        },
        before=(
            "plan model.py --cluster cpu:2 --parallel dp=2,zero=1 -o split.json",
            "plan model.py --cluster cpu:2 --parallel dp=2,zero=0 -o zero0.json",
        ),
    ),
)

OTHERS = (
    Case("AP167", "show ops lineer", r"did you mean (\S+)\?", "show ops {0}"),
    Case(
        "AP171",
        "profile --list --database none.sqlite",
        r"autoparallel (profile) TARGET (--database \S+) makes one",
        "{0} model.py --cluster cpu:1 --set depth=1 --global-batch 8 --budget 1 {1}",
    ),
    Case(
        "AP172",
        "profile --import none.jsonl",
        "",
        "profile --import made.jsonl",
        before=(
            MEASURE + " --database d.sqlite",
            "profile --export made.jsonl --database d.sqlite",
        ),
    ),
    Case(
        "AP172",
        "profile --list --database model.py",
        "",
        MEASURE + " --database new.sqlite",
    ),
    Case(
        "AP170",
        "plan model.py --cluster cpu:3 --parallel dp=3 --set depth=1 --global-batch 6 "
        "--profile measured --database d.sqlite",
        r"autoparallel (profile \S+ --cluster \S+ --database \S+), with the same",
        "{0} --parallel dp=3 --set depth=1 --global-batch 6 --budget 2",
        before=(MEASURE + " --database d.sqlite",),
    ),
    Case(
        "AP174",
        "profile model.py --cluster 1x1xA100+1x1xH100",
        "on a cluster of that kind",
        MEASURE,
    ),
    Case(
        "AP175",
        "profile",
        "TARGET, (--list)",
        "profile {0}",
        before=(MEASURE,),
    ),
    Case(
        "AP350",
        "estimate model.py --devices ,",
        r"(--devices RTX4090),A100-80GB,H100",
        "estimate model.py {0}",
    ),
    Case(
        "AP350", "estimate model.py --devices H1000", r"(H100)", "estimate model.py --devices {0}"
    ),
    Case(
        "AP352",
        "estimate model.py --devices H100 --tokens many",
        "(--tokens 15e12)",
        "estimate model.py --devices H100 {0}",
    ),
    Case(
        "AP301",
        DP + " --memory-limit 1kB --time-limit 1",
        r"without (--memory-limit)",
        DP,
        exit_code=4,
    ),
    Case(
        "AP301",
        "plan model.py --cluster cpu:2 --global-batch 8 --parallel servers=1 "
        "--memory-limit 1kB --time-limit 1",
        "without (--memory-limit)",
        "plan model.py --cluster cpu:2 --global-batch 8 --parallel servers=1",
        exit_code=4,
    ),
    Case(
        "AP115",
        "show cluster file.toml",
        "",
        "show cluster file.toml",
        files={"file.toml": "[[hosts]]\nnum_devices = 2\ndevice = 'H1O0'\n"},
        mended={"file.toml": "[[hosts]]\nnum_devices = 2\ndevice = 'H100'\n"},
    ),
    Case(
        "AP115",
        "plan model.py --cluster none.toml",
        "No such file",
        "plan model.py --cluster file.toml",
        files={"file.toml": "[[hosts]]\nnum_devices = 2\ndevice = 'H100'\n"},
    ),
)

CASES = (*PLANS, *OTHERS)
