"""The model behind ``plan``: collectives, bytes, overlap and choices, in numbers worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hvdsync.sync.compression import torch_compression
from hvdsync.sync.compression.exchange import Part
from hvdsync.sync.torch_wire import Wire
from hvdsync.tools.plan import costs
from hvdsync.tools.plan.network import Network, in_memory
from hvdsync.tools.plan.payload import Bucket, Leg, buckets_of, sent_on_network
from hvdsync.tools.plan.planned import Plan, Settings
from hvdsync.tools.plan.predict import (
    PLAIN,
    Choice,
    Cost,
    Machine,
    Prediction,
    best,
    break_even,
    predict,
)
from hvdsync.tools.plan.timeline import Journey, Transfer, step_seconds

# A megabyte per second and direction, a millisecond for a message.
SLOW = Network(8e6, 0.001, 0.01, 8e9)
# A kilobyte per second, and nothing else that takes time.
BARE = Network(8e3, 0.0, 0.0, 8e9, meeting_seconds=0.0)
BUCKET = Bucket((Part("0", (996,)),))  # with its four flags 1,000 elements, 4,000 bytes
MACHINE = Machine(
    1.0, {"none": Cost(0.0, 0.0), "fp16": Cost(1e-5, 2e-5), "onebit": Cost(0, 0, 1e-4)}, 0, 0, 4
)


def test_a_ring_sends_almost_twice_the_bytes_in_two_turns_for_each_other_worker():
    assert SLOW.ring(4, 1e6) == pytest.approx(6 * 0.001 + 1.5)


def test_a_tree_has_few_turns_and_sends_everything_in_each():
    assert SLOW.tree(4, 1e6) == pytest.approx(4 * 1.001)
    assert SLOW.tree(5, 1e6) == pytest.approx(6 * 1.001)


def test_small_all_reduces_go_along_a_tree_over_mpi_only():
    over_mpi = replace(SLOW, is_mpi=True)
    assert SLOW.all_reduce(8, 100) == pytest.approx(14 * 0.001 + 1.75e-4)
    assert over_mpi.all_reduce(8, 100) == pytest.approx(6 * (0.001 + 1e-4))
    assert over_mpi.all_reduce(8, 1e6) == pytest.approx(SLOW.ring(8, 1e6))


def test_gathered_bytes_pass_every_worker():
    assert SLOW.all_gather(4, 1e5) == pytest.approx(3 * 0.101)


def test_workers_of_a_host_share_its_link_for_what_each_sends_to_each():
    assert SLOW.all_to_all(4, 1e6) == pytest.approx(3 * 0.001 + 0.75)
    assert replace(SLOW, workers_per_host=2).all_to_all(4, 1e6) == pytest.approx(0.003 + 1.0)


def test_by_hosts_the_ring_is_one_of_hosts():
    pairs = replace(SLOW, workers_per_host=2)
    assert pairs.by_hosts(4, 1e6, 1e-9) == pytest.approx(0.003 + 2 * 0.001 + 1.0)
    assert pairs.by_hosts(2, 1e6, 1e-9) == pytest.approx(0.003)
    assert replace(SLOW, carried=None).by_hosts(8, 1e6, 1e-9) == pytest.approx(0.003)


def test_in_memory_a_few_add_up_everything_and_many_a_share():
    assert [in_memory(n, 10, 1.0) for n in (1, 2, 3, 4, 64)] == [0, 30, 40, 30, 30]


def test_within_a_host_the_link_does_not_count():
    four = replace(SLOW, workers_per_host=4)
    assert four.ring(4, 1e6) == pytest.approx(0.006 + 1.5e-3)
    assert four.ring(8, 1e6) == pytest.approx(0.014 + 1.75)


def test_a_call_waits_for_the_agreement_of_all():
    assert SLOW.delay(2) == pytest.approx(0.01 + 2 * 0.001)
    assert SLOW.delay(8) == pytest.approx(0.01 + 14 * 0.001)


def test_what_a_call_costs_is_taken_from_an_empty_all_reduce():
    tuned = SLOW.after_empty(0.05, 0.2)
    assert tuned.delay(2) + tuned.all_reduce(2, 0) == pytest.approx(0.05)
    assert tuned.skew_seconds == pytest.approx(0.15)
    least = SLOW.after_empty(0.05, 0.04)
    assert least.skew_seconds == 0 and SLOW.after_empty(0.0, 0.0).call_seconds == 0


def test_headers_take_a_twentieth_of_a_link():
    more = {"hop_seconds": 0.0, "call_seconds": 0.0, "local_carried": 8e9}
    assert Network.of_link(1e9, **more).carried == pytest.approx(9.5e8)
    assert Network.of_link(None, **more).carried is None


@pytest.mark.parametrize(
    ("compression", "legs"),
    [
        ("none", [Leg("sum", 4 * 2653)]),
        ("fp16", [Leg("sum", 2 * 2653)]),
        ("bf16", [Leg("alltoall", 2 * 664 * 4), Leg("gather", 2 * 664)]),
        # Only 60 x 40 has a low rank worth sending; 180 + 63 others and 10 flags stay.
        ("powersgd:2", [Leg("sum", 4 * (2 * 60 + 253)), Leg("sum", 4 * 2 * 40)]),
        ("topk:0.05", [Leg("gather", 8 * 120 + 4 * 253)]),
        ("onebit", [Leg("gather", 300 + 4 + 4 * 253)]),
    ],
)
def test_what_travels_is_what_the_documents_say(compression, legs):
    (bucket,) = buckets_of([(60, 40), (60,), (3, 60), (3,)])
    assert bucket.elements == 2400 + 60 + 180 + 3 + 10
    assert bucket.legs(compression, 4) == legs


def test_what_does_not_shrink_travels_once():
    assert BUCKET.legs("powersgd:4", 2) == [Leg("sum", 4000)]


def test_buckets_are_those_of_training_the_last_parameters_first():
    shapes = [
        [part.shape for part in b.parts] for b in buckets_of([(1024, 1024), (512, 512), (9,)])
    ]
    assert shapes == [[(9,)], [(512, 512)], [(1024, 1024)]]


def test_bytes_on_the_network_are_those_of_rings():
    legs = [Leg("sum", 1000), Leg("gather", 100), Leg("alltoall", 1000)]
    assert sent_on_network(legs, 4) == 1500 + 300 + 750


@pytest.mark.parametrize(("travel", "seconds"), [(60.0, 10 + 60), (6.0, 30)])
def test_small_buckets_hide_behind_backward(travel, seconds):
    count = 1000
    journeys = [Journey(1 / count, 0, [Transfer(0, travel / count)], 0)] * count
    assert step_seconds(30.0, journeys) == pytest.approx(seconds, abs=0.1)


def test_one_bucket_hides_nothing():
    assert step_seconds(30.0, [Journey(1.0, 0, [Transfer(0, 7)], 0)]) == pytest.approx(37)


def test_calls_are_agreed_on_while_others_travel():
    # Ready at 2 and 3, called until 3 and 4; neither waits for the other.
    journeys = [Journey(0.5, 0, [Transfer(1, 0.5)], 0)] * 2
    assert step_seconds(3.0, journeys) == pytest.approx(4.5)


def test_second_collectives_begin_when_the_first_have_come():
    one = Journey(1.0, 1, [Transfer(1, 2), Transfer(1, 3)], 1)
    assert step_seconds(0.0, [one]) == pytest.approx(1 + 1 + 2 + 1 + 3 + 1)
    # The wire is never idle: four transfers of one second.
    two = [Journey(0.5, 0, [Transfer(0, 1), Transfer(0, 1)], 0)] * 2
    assert step_seconds(0.0, two) == pytest.approx(4)


def test_second_collectives_hide_behind_backward_when_later_buckets_leave():
    # They leave at 3, 4, 5 and 6; with each of the last three the second of the one before.
    journeys = [Journey(0.25, 0, [Transfer(0, 0.5), Transfer(0, 0.5)], 0)] * 4
    assert step_seconds(6.0, journeys) == pytest.approx(7.5)


def test_synchronous_computes_and_sends():
    told = predict(PLAIN, MACHINE, [BUCKET], BARE, 2)
    assert told.seconds == pytest.approx(1 + 4) and told.efficiency == pytest.approx(0.2)
    assert told.sent_bytes == 4000
    assert predict(PLAIN, MACHINE, [BUCKET], BARE, 4).seconds == pytest.approx(1 + 6)


def test_one_worker_sends_nothing():
    assert predict(PLAIN, MACHINE, [BUCKET], BARE, 1) == Prediction(1.0, 1.0, 0.0)


def test_compressing_takes_time_before_and_after():
    told = predict(Choice("fp16"), MACHINE, [BUCKET], BARE, 2)
    assert told.seconds == pytest.approx(1 + 4000 * 1e-5 + 2 + 4000 * 2e-5)


def test_gathered_parts_are_decompressed_for_each_worker():
    told = predict(Choice("onebit"), MACHINE, [BUCKET], BARE, 4)
    # Too small to be compressed: 4,000 bytes to each of three others.
    assert told.seconds == pytest.approx(1 + 12 + 4 * 4000 * 1e-4)


def test_local_rules_share_a_meeting_among_their_steps():
    machine = replace(MACHINE, copied=1e-4)
    # DiLoCo's outer step passes over memory five times.
    meeting = 4
    local = predict(Choice(rule="local SGD", period=4), machine, [BUCKET], BARE, 2)
    outer = predict(Choice(rule="DiLoCo", period=4), machine, [BUCKET], BARE, 2)
    assert local.seconds == pytest.approx(1 + meeting / 4) and local.sent_bytes == 1000
    assert outer.seconds == pytest.approx(1 + (meeting + 5 * 0.4) / 4)


def test_the_later_worker_is_waited_for_once_in_a_step_or_meeting():
    network = replace(BARE, skew_seconds=0.5)
    half = Bucket((Part("0", (496,)),))
    told = predict(PLAIN, MACHINE, [half, half], network, 2)
    assert told.seconds == predict(PLAIN, MACHINE, [half, half], BARE, 2).seconds + 0.5
    told = predict(Choice(rule="local SGD", period=4), MACHINE, [BUCKET], network, 2)
    assert told.seconds == pytest.approx(1 + (4 + 0.5) / 4)


def test_on_one_host_workers_share_cores_and_memory():
    machine = replace(MACHINE, added=1e-3, cores=2)
    together = replace(BARE, carried=None, meeting_seconds=0.5)
    told = predict(PLAIN, machine, [BUCKET], together, 4)
    assert told.seconds == pytest.approx(2 * (1 + 3 * 4) + 0.5)
    assert told.efficiency == pytest.approx(1 / 26.5)
    # Between hosts nobody meets in memory.
    told = predict(PLAIN, machine, [BUCKET], replace(BARE, meeting_seconds=0.5), 4)
    assert told.seconds == pytest.approx(1 + 6)


def test_on_one_host_without_a_free_core_nothing_travels_beside_computing():
    network = Network(None, 0.0, 0.0, 8e3)
    half = Bucket((Part("0", (496,)),))
    # The first is compressed in 0.02 s, after half of backward where that overlaps; two seconds of
    # travel follow without a gap, and 0.04 s of decompressing the second.
    for cores, called in ((2, 1 + 0.02), (4, 2 / 3 + 0.02)):
        machine = replace(MACHINE, cores=cores)
        told = predict(Choice("fp16"), machine, [half, half], network, 2)
        assert told.seconds == pytest.approx(called + 2 + 0.04)
    # Nor do two buckets' ranks agree at the same time.
    slow = replace(network, call_seconds=0.5)
    for cores, called in ((2, 1 + 0.02 + 2 * 0.5), (4, 2 / 3 + 0.02 + 0.5)):
        machine = replace(MACHINE, cores=cores)
        told = predict(Choice("fp16"), machine, [half, half], slow, 2)
        assert told.seconds == pytest.approx(called + 2 + 0.04)


def test_the_simplest_of_those_that_are_hardly_slower_is_best():
    def of(*seconds: float) -> Choice:
        choices = (PLAIN, Choice("fp16"), Choice("bf16"))
        told = [Prediction(one, 1.0, 0.0) for one in seconds]
        return best(dict(zip(choices, told, strict=True)))

    assert of(1.029, 1.01, 1.0) == PLAIN
    assert of(1.04, 1.02, 1.0) == Choice("fp16")
    assert of(2.0, 1.5, 1.0) == Choice("bf16")


def test_a_compression_breaks_even_where_the_bytes_it_spares_take_as_long_as_itself():
    assert break_even(lambda rate: (1 + 2e9 / rate, 4e9 / rate)) == pytest.approx(2e9, rel=2e-3)
    assert break_even(lambda rate: (2.0, 1.0)) is None
    assert break_even(lambda rate: (1.0, 2.0)) == math.inf


def test_the_plan_says_below_which_rate_a_compression_wins():
    settings = Settings(hop_seconds=0.0, call_seconds=0.0, over="mpi")
    plan = Plan(settings, MACHINE, [BUCKET])
    # 2,000 bytes less, 0.12 s more; headers take 5 % of the rate.
    rate = plan.break_even(Choice("fp16"), 2)
    assert rate == pytest.approx(16_000 / 0.12 / 0.95, rel=2e-3)


@pytest.mark.parametrize("together", [1, 2])
def test_costs_are_measured_of_each_compression_alone_or_side_by_side(together):
    pytest.importorskip("torch")
    names = ["none", "fp16", "bf16", "powersgd:1", "topk:0.01", "onebit"]
    machine = costs.measure("linear", names, 0.5, together)
    assert machine.compute == 0.5 and machine.copied > 0 and machine.added > 0
    assert list(machine.costs) == names
    assert all(cost.before > 0 and cost.after >= 0 for cost in machine.costs.values())


@pytest.mark.parametrize("name", ["none", "fp16", "bf16", "onebit"])
def test_the_mean_over_workers_that_are_alike_is_what_each_has(name):
    torch = pytest.importorskip("torch")
    hvd = costs._Alike(3)
    wire = Wire(torch, hvd, "plan", compression=torch_compression(torch).named(name), op="average")
    flat = torch.tensor([1.0, -1.0] * 8)
    result = torch.empty(16)
    wire.receive(result, wire.send(flat.clone(), "flat", [Part("0", (4, 4))]))
    torch.testing.assert_close(result, flat, rtol=1e-3, atol=0)


def test_choices_are_named_as_in_bench_link():
    assert PLAIN.name == "synchronous"
    assert Choice("fp16", "DiLoCo", 16).name == "DiLoCo, period 16, fp16"
