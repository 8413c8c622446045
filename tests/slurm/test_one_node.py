"""The Slurm script and ``srun`` on a real Slurm: a job is warned, saves, is requeued, goes on."""

from __future__ import annotations

import re
import subprocess
import time

import pytest
from killed_runs import make_data
from train_runs import ROOT, environment, events

SECONDS = 300
pytestmark = pytest.mark.timeout(2 * SECONDS)


@pytest.fixture
def run(slurm, tmp_path):
    """Runs one of Slurm's commands in a folder with data; gives what it wrote."""
    make_data(tmp_path / "data")

    def command(*words, **variables):
        result = subprocess.run(
            [str(word) for word in words],
            cwd=tmp_path,
            env={**environment(), **slurm, **variables},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return command


def train(tmp_path, *more):
    shared = ("--framework", "torch", "--model", "linear", "--batch-size", "8", "--lr", "0.01")
    return [*shared, "--dataset", tmp_path / "data", "--log-dir", tmp_path / "log", *more]


def submit(run, *options, **variables):
    tasks = ("--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1")
    return re.search(r"batch job (\d+)", run("sbatch", *tasks, *options, **variables))[1]


def wait_for(happened, run, job, what):
    deadline = time.monotonic() + SECONDS
    while not (result := happened()):
        state = run("scontrol", "show", "job", job)
        assert time.monotonic() < deadline, f"waited in vain until {what}\n{state}"
        time.sleep(0.2)
    return result


def state(run, job):
    return re.search(r"JobState=(\w+)", run("scontrol", "show", "job", job))[1]


def test_srun_with_pmix_gives_each_rank_its_place(run):
    script = (
        "import hvdsync.torch as hvd, torch; hvd.init(); "
        "print('place', hvd.rank(), hvd.size(), hvd.local_rank(), "
        "hvd.allreduce(torch.ones(1), op=hvd.Sum).item())"
    )
    output = run("srun", "-n", "2", "--mpi=pmix", "python", "-c", script)
    assert sorted(re.findall("place .*", output)) == ["place 0 2 0 2.0", "place 1 2 1 2.0"]
    seen = run("srun", "-n", "2", "--mpi=pmix", "python", "-m", "hvdsync", "doctor", "--quick")
    assert "srun: rank 0 of 2, local rank 0 of 2" in seen


def test_a_job_that_is_warned_saves_is_requeued_and_goes_on(run, tmp_path):
    log = tmp_path / "log"
    script = ROOT / "scripts" / "slurm.sbatch"
    job = submit(run, script, *train(tmp_path, "--epochs", "100000"))
    wait_for(lambda: any(e["event"] == "step" for e in events(log)), run, job, "it trains")
    # To the script alone, as Slurm itself does before the time limit.
    run("scancel", "--signal=USR1", "--batch", job)
    stopped = wait_for(
        lambda: [e for e in events(log) if e["event"] == "stopped"], run, job, "it stops"
    )
    assert stopped[0]["reason"].startswith("SIGUSR1 on rank")
    resumed = wait_for(
        lambda: [e for e in events(log) if e.get("resumed_from")], run, job, "it starts again"
    )
    assert resumed[0]["resumed_from"] == stopped[0]["step"]
    assert re.search(r"Restarts=1\b", run("scontrol", "show", "job", job))
    run("scancel", job)
    wait_for(lambda: state(run, job) == "CANCELLED", run, job, "it is cancelled")


@pytest.mark.parametrize("launch", ["srun", "horovodrun"])
def test_a_job_that_comes_to_its_end_is_complete(run, tmp_path, launch):
    script = ROOT / "scripts" / "slurm.sbatch"
    job = submit(run, script, *train(tmp_path, "--epochs", "1"), LAUNCH=launch)
    ended = wait_for(
        lambda: (now := state(run, job)) not in ("PENDING", "RUNNING", "COMPLETING") and now,
        run,
        job,
        "it ends",
    )
    assert ended == "COMPLETED", (tmp_path / f"slurm-{job}.out").read_text()
    told = events(tmp_path / "log")
    assert told[-1]["event"] == "end"
    assert (tmp_path / "runs" / f"slurm-{job}").is_dir()
