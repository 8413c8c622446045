"""Launch detection: the variables of each launcher, and of none."""

import pytest

from hvdsync.comm import world
from hvdsync.comm.launch import LaunchInfo, detect
from hvdsync.errors import LaunchError

ENVIRONMENTS = {
    "horovodrun": {
        "HOROVOD_RANK": "3",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
    },
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "mpiexec": {
        "PMI_RANK": "3",
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "2",
    },
    "torchrun": {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    },
    "srun": {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    },
}


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_each_launcher_is_known_by_its_variables(launcher):
    assert detect(ENVIRONMENTS[launcher]) == LaunchInfo(launcher, 3, 4, 1, 2)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "1", "WORLD_SIZE": "2"},  # anybody may set these
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script before srun
        {"HOROVOD_RANK": "1"},
    ],
)
def test_a_process_started_by_hand_has_no_launcher(environ):
    assert detect(environ) is None


def test_the_innermost_launcher_decides():
    both = {**ENVIRONMENTS["srun"], **ENVIRONMENTS["mpirun"], "OMPI_COMM_WORLD_RANK": "0"}
    assert detect(both) == LaunchInfo("mpirun", 0, 4, 1, 2)


def test_elastic_launches_say_so():
    assert detect({**ENVIRONMENTS["horovodrun"], "HOROVOD_ELASTIC": "1"}).elastic


def test_a_missing_local_position_is_read_as_one_host():
    environ = {"PMI_RANK": "2", "PMI_SIZE": "3"}
    assert detect(environ) == LaunchInfo("mpiexec", 2, 3, 2, 3)


def test_verbs_before_init_refuse_to_believe_that_they_are_alone(monkeypatch):
    for name, value in ENVIRONMENTS["mpirun"].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"mpirun .* rank 3 of 4.*init\(\)"):
        world.current()


def test_without_a_launcher_the_world_is_one_process():
    assert (world.current().rank, world.current().size) == (0, 1)
