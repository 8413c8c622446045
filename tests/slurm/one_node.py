"""A Slurm of one node on this machine: a folder in, running daemons and their configuration out.

Its own keys, sockets, ports and logs, all in the folder; root is needed, and Debian's packages
slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel")
_SECONDS = 60
_CORES = 2
_JOBS = 100

_CONFIGURATION = """\
ClusterName=one
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def absent() -> str:
    """Why there can be no Slurm here, or nothing."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"there is no {', '.join(missing)}: make test-slurm installs them" if missing else ""


@contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """The daemons, until the end of the context; gives the variables of Slurm's commands."""
    host = socket.gethostname().split(".")[0]
    with ExitStack() as daemons:
        munge = folder / "munge"
        munge.mkdir(mode=0o755)
        key = munge / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        shutil.chown(munge, "root", "root")
        places = [f"--{what}={munge / what}" for what in ("socket", "pid-file", "log-file")]
        places += [f"--seed-file={munge / 'seed'}", f"--key-file={key}"]
        daemons.enter_context(_daemon(["munged", "--foreground", "--force", *places], folder, {}))
        _wait_for((munge / "socket").exists, "munged listens", folder)

        configuration = folder / "slurm.conf"
        # Killed jobs leave PMIx's folders in /tmp, under their numbers.
        first_job = 100_000 + _JOBS * secrets.randbelow(10_000)
        daemons.callback(_remove_folders_of_pmix, range(first_job, first_job + _JOBS))
        configuration.write_text(
            _CONFIGURATION.format(
                folder=folder,
                host=host,
                ports=_free_ports(2),
                cores=_CORES,
                first_job=first_job,
            )
        )
        for name in ("state", "spool"):
            (folder / name).mkdir()
        variables = {"SLURM_CONF": str(configuration)}
        daemons.enter_context(_daemon(["slurmctld", "-D", "-c"], folder, variables))
        daemons.enter_context(_daemon(["slurmd", "-D", "-N", host], folder, variables))
        _wait_for(lambda: _is_idle(variables), "the node is idle", folder)
        try:
            yield variables
        finally:
            # Jobs outlive the daemons.
            _call(["scancel", "--quiet", "--user=root"], variables)
            _wait_for(lambda: not _call(["squeue", "-h"], variables), "no job is left", folder)


@contextmanager
def _daemon(command: list[str], folder: Path, variables: dict[str, str]) -> Iterator[None]:
    with (folder / f"{command[0]}.out").open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _remove_folders_of_pmix(jobs: range) -> None:
    for folder in Path("/tmp").glob("spmix_appdir_*"):
        job, _, step = folder.name.rpartition("_")[2].partition(".")
        if step.isdecimal() and job.isdecimal() and int(job) in jobs:
            shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _is_idle(variables: dict[str, str]) -> bool:
    return _call(["sinfo", "--noheader", "--format=%t"], variables) == "idle"


def _call(command: list[str], variables: dict[str, str]) -> str:
    called = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    return called.stdout.strip()


def _wait_for(happened, what: str, folder: Path) -> None:
    deadline = time.monotonic() + _SECONDS
    while not happened():
        if time.monotonic() > deadline:
            said = "\n".join(
                f"== {log.name}\n{log.read_text()[-2000:]}" for log in folder.glob("*.[lo][ou][gt]")
            )
            raise AssertionError(f"waited in vain until {what}\n{said}")
        time.sleep(0.1)
