"""``autoparallel launch``: write the files that start a plan on every host of its cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autoparallel.commands.inspect import PlanArgument

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SlurmOption = Annotated[bool, typer.Option("--slurm", help="a job for sbatch")]
KubernetesOption = Annotated[
    bool, typer.Option("--k8s", help="an Indexed Job with a headless Service, for kubectl apply")
]
SshOption = Annotated[bool, typer.Option("--ssh", help="a script that starts each host over ssh")]
FolderOption = Annotated[
    str, typer.Option("-o", "--output", metavar="DIR", help="folder to write the files to")
]
HostsOption = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="A,B,…|FILE",
        help="names of the hosts in the plan's order; needed by --ssh, and where hosts differ",
    ),
]
NameOption = Annotated[str, typer.Option("--name", help="what the job is called")]
PartitionOption = Annotated[str | None, typer.Option("--partition", help="Slurm's partition")]
AccountOption = Annotated[str | None, typer.Option("--account", help="Slurm's account")]
TimeOption = Annotated[
    str | None, typer.Option("--time", metavar="HH:MM:SS", help="Slurm's limit of time")
]
ImageOption = Annotated[
    str | None, typer.Option("--image", help="container image of the pods, with this package")
]
ClaimOption = Annotated[
    str | None,
    typer.Option("--claim", help="PersistentVolumeClaim that pods mount at --workdir"),
]
WorkdirOption = Annotated[
    str | None,
    typer.Option(
        "--workdir", help="where the run starts, with the model's file; default: this folder"
    ),
]
SetupOption = Annotated[
    str,
    typer.Option(
        "--setup",
        metavar="COMMAND",
        help="shell command that each host runs first: 'source venv/bin/activate'",
    ),
]
PortOption = Annotated[
    int,
    typer.Option("--port", min=1, max=65534, help="first of two free ports of the first host"),
]
RestartsOption = Annotated[
    int, typer.Option("--max-restarts", min=0, help="how often torchrun starts all ranks again")
]
RunArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- RUN_OPTIONS]", help="options of `autoparallel run`, after --"),
]


def launch(
    plan: PlanArgument,
    run_options: RunArguments = None,
    *,
    slurm: SlurmOption = False,
    k8s: KubernetesOption = False,
    ssh: SshOption = False,
    output: FolderOption = "launch",
    hosts: HostsOption = None,
    name: NameOption = "autoparallel",
    partition: PartitionOption = None,
    account: AccountOption = None,
    time: TimeOption = None,
    image: ImageOption = None,
    claim: ClaimOption = None,
    workdir: WorkdirOption = None,
    setup: SetupOption = "",
    port: PortOption = 29400,
    max_restarts: RestartsOption = 0,
) -> None:
    """Write the files that start a plan on every host: a check of the cluster, then the run."""
    from pathlib import Path

    from autoparallel.launching.job import PLAN_FILE, job_of, read_hosts
    from autoparallel.launching.kubernetes import MANIFEST, kubernetes_files
    from autoparallel.launching.slurm import BATCH_SCRIPT, slurm_files
    from autoparallel.launching.ssh import START_SCRIPT, ssh_files
    from autoparallel.planner.errors import UsageError
    from autoparallel.planner.plan_file import dumps
    from autoparallel.planning.plan_files import load_plan
    from autoparallel.target.trust import check_trusted

    if slurm + k8s + ssh != 1:
        raise UsageError(
            "AP370", "one launcher must be chosen", fix="give one of --slurm, --k8s and --ssh"
        )
    loaded = load_plan(plan)
    folder = Path(output)
    job = job_of(
        loaded, name=name, hosts=read_hosts(hosts), folder=folder, setup=setup,
        arguments=run_options or (), port=port, max_restarts=max_restarts,
    )  # fmt: skip
    if workdir is not None:
        job = job.moved(folder=job.folder, workdir=workdir)
    elif not k8s:  # the run starts in this folder, and would only say so on the hosts
        check_trusted(
            loaded, folder / PLAN_FILE, trust="--trust" in job.arguments,
            how="give the run's option: launch … -- --trust; or start it in that folder",
        )  # fmt: skip
    files: Mapping[str, str]
    if slurm:
        files = slurm_files(job, partition=partition, account=account, time=time)
        start = f"sbatch {folder / BATCH_SCRIPT}"
    elif ssh:
        files, start = ssh_files(job), f"bash {folder / START_SCRIPT}"
    else:
        files = kubernetes_files(
            job, dumps(loaded), image=image, claim=claim, workdir=workdir or "/workspace"
        )
        start = f"kubectl apply -f {folder / MANIFEST}"
    _write(folder, files if k8s else {**files, PLAN_FILE: dumps(loaded)})
    typer.echo(f"{', '.join(files)} for {job.num_hosts} hosts in {folder}; start with:\n  {start}")


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the files; scripts can be executed. Raises UsageError AP379 where that fails."""
    from autoparallel.planner.errors import UsageError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = folder / name
            path.write_text(text, encoding="utf-8")
            if text.startswith("#!"):
                path.chmod(0o755)
    except OSError as error:
        raise UsageError(
            "AP379", f"the files cannot be written to {folder}", why=str(error), fix="-o DIR"
        ) from error
