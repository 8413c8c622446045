"""Where the ranks of a process group meet: from arguments, from launchers, and from neither."""

import pytest
import torch

from hvdsync.comm import meeting
from hvdsync.comm.meeting import Place, find_place
from hvdsync.errors import LaunchError
from tests.unit.comm.test_launch import ENVIRONMENTS

BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_arguments_decide_whatever_the_environment_says():
    place = find_place(1, 3, "node2", 1234, environ=ENVIRONMENTS["horovodrun"])
    assert place == Place(1, 3, "arguments", "node2", 1234)


def test_one_process_needs_no_master():
    assert find_place(0, 1, environ={}) == Place(0, 1, "arguments")
    assert find_place(environ={}) == Place(0, 1, "hand")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rank": 1}, "given rank= but not size=, master_address=, master_port="),
        ({"rank": 0, "size": 2, "master_port": 1}, "but not master_address="),
        ({"size": 1}, "but not rank="),
        (
            {"rank": 2, "size": 2, "master_address": "a", "master_port": 1},
            "rank is 2 and size is 2",
        ),
    ],
)
def test_incomplete_arguments_name_what_is_missing(arguments, said):
    with pytest.raises(LaunchError, match=said):
        find_place(**arguments, environ={})


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_a_launcher_says_which_rank_this_is(launcher):
    assert find_place(environ=ENVIRONMENTS[launcher]) == Place(3, 4, launcher, local=(1, 2))


@pytest.mark.parametrize("launcher", sorted(set(ENVIRONMENTS) - {"horovodrun"}))
def test_a_master_in_the_environment_is_taken(launcher):
    environ = {**ENVIRONMENTS[launcher], "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    place = find_place(environ=environ)
    assert (place.address, place.port) == ("node1", 29500)


def test_horovodrun_has_a_store_of_its_own():
    environ = {**ENVIRONMENTS["horovodrun"], "MASTER_ADDR": "old", "MASTER_PORT": "1"}
    assert find_place(environ=environ).address is None


def test_variables_set_by_hand_count_if_all_are_there():
    assert find_place(environ=BY_HAND) == Place(1, 2, "environment", "node1", 29500)
    assert find_place(environ={**BY_HAND, "MASTER_PORT": ""}) == Place(0, 1, "hand")


def test_an_elastic_job_is_refused():
    environ = {**ENVIRONMENTS["horovodrun"], "HOROVOD_ELASTIC": "1"}
    with pytest.raises(LaunchError, match="ranks come and go"):
        find_place(environ=environ)


def test_a_launcher_that_tells_no_address_says_what_to_set():
    place = Place(1, 2, "srun", local=(1, 2))
    with pytest.raises(LaunchError, match="export MASTER_ADDR"):
        meeting.open_store(torch, place, seconds=1)


def test_a_master_that_does_not_answer_is_named():
    with meeting.socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = Place(1, 2, "arguments", "127.0.0.1", port)
    with pytest.raises(LaunchError, match=f"did not meet at 127.0.0.1:{port}"):
        meeting.open_store(torch, place, seconds=1)
