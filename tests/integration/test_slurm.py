"""The Slurm script, with stand-ins for Slurm's own commands: warned, it saves and is requeued."""

from __future__ import annotations

import signal

import pytest
from killed_runs import make_data
from test_resume import command
from train_runs import ROOT, SECONDS, environment, events, started, wait_for

SRUN = """#!/usr/bin/env bash
# Passes signals on to the one task, as srun does to all.
echo "$@" >> {folder}/srun
shift
"$@" &
task=$!
trap 'kill -USR1 $task' USR1
while kill -0 $task 2>/dev/null; do wait $task; done
wait $task
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >> {folder}/scontrol
"""


@pytest.fixture
def job(tmp_path):
    """The arguments and variables of a job in a folder with data and stand-ins."""
    make_data(tmp_path / "data")
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text.format(folder=tmp_path))
        (commands / name).chmod(0o755)
    variables = {
        "PATH": f"{commands}:{environment()['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    options = command("torch", "unused", "--model", "linear")[2:]
    i = options.index("--checkpoint-dir")
    return [ROOT / "scripts" / "slurm.sbatch", *options[:i], *options[i + 2 :]], variables


def test_a_job_that_is_warned_saves_is_requeued_and_goes_on_to_its_end(job, tmp_path):
    start, variables = job
    log = tmp_path / "unused-log"
    with started([*start, "--epochs", "100000"], tmp_path, **variables) as process:
        wait_for(lambda: any(e["event"] == "step" for e in events(log)), process, "it trains")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(SECONDS) == 75, (tmp_path / "output").read_text()
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"
    stopped = events(log)[-1]
    assert (stopped["event"], stopped["reason"]) == ("stopped", "SIGUSR1 on rank 0")

    # Slurm starts it again; with fewer epochs it is soon over.
    with started([*start, "--epochs", "1"], tmp_path, **variables) as process:
        assert process.wait(SECONDS) == 0, (tmp_path / "output").read_text()
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"
    assert events(log)[-1]["event"] == "end"
    assert events(log)[-2]["resumed_from"] == stopped["step"]
    assert "--mpi=pmix python -m hvdsync.train" in (tmp_path / "srun").read_text()


def test_a_job_that_fails_is_not_requeued(job, tmp_path):
    start, variables = job
    with started([*start, "--epochs", "many"], tmp_path, **variables) as process:
        assert process.wait(SECONDS) == 2
    assert not (tmp_path / "scontrol").exists()


def test_a_job_of_which_no_rank_started_has_failed(job, tmp_path):
    start, variables = job
    with started([*start, "--epochs", "1"], tmp_path, **variables, LAUNCH="true") as process:
        assert process.wait(SECONDS) == 1
    said = (tmp_path / "output").read_text()
    assert "true ended with code 0, but no rank has made runs/slurm-17" in said
    assert not (tmp_path / "scontrol").exists()


def test_a_job_that_is_cancelled_saves_and_stays_cancelled(job, tmp_path):
    start, variables = job
    log = tmp_path / "unused-log"
    with started([*start, "--epochs", "100000"], tmp_path, **variables) as process:
        wait_for(lambda: any(e["event"] == "step" for e in events(log)), process, "it trains")
        process.terminate()
        assert process.wait(SECONDS) == 75, (tmp_path / "output").read_text()
    assert events(log)[-1]["event"] == "stopped"
    assert not (tmp_path / "scontrol").exists()


def test_a_job_that_is_warned_while_its_ranks_start_is_requeued(job, tmp_path):
    start, variables = job
    srun = tmp_path / "commands" / "srun"
    srun.write_text(f"#!/usr/bin/env bash\ntouch {tmp_path}/starts\nexec sleep 300\n")
    with started(start, tmp_path, **variables) as process:
        wait_for((tmp_path / "starts").exists, process, "it starts")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(SECONDS) == 128 + signal.SIGUSR1
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"


def test_horovodrun_gets_the_hosts_of_the_job_with_their_slots(job, tmp_path):
    start, variables = job
    commands = tmp_path / "commands"
    (commands / "horovodrun").write_text(
        f'#!/usr/bin/env bash\necho "$@" > {tmp_path}/given; mkdir -p runs/slurm-17\n'
    )
    (commands / "horovodrun").chmod(0o755)
    (commands / "scontrol").write_text("#!/usr/bin/env bash\nprintf '%s\\n' a1 a2 b7\n")
    tasks = {"SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NTASKS": "11", "SLURM_JOB_NODELIST": "x"}
    with started(start, tmp_path, **variables, **tasks, LAUNCH="horovodrun") as process:
        assert process.wait(SECONDS) == 0
    assert (tmp_path / "given").read_text().startswith("--gloo -np 11 -H a1:4,a2:4,b7:3 python -m")
