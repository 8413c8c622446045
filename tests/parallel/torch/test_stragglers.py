"""The rank that holds the others up is named, and why; what the others wait is no computing."""

import logging

import pytest
import torch

import hvdsync.torch as hvd
from tests.parallel import slowness

STEPS = 12


def train(stragglers, case=None, folder=None, after_step=lambda step: None):
    """Some steps, in which the last rank is slow; gives the last report."""
    slow = hvd.rank() == hvd.size() - 1
    where = slowness.CASES[case][0] if case else None
    path = slowness.make_file(folder) if case == "slow disk" else None
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model, optimizer = hvd.distribute(model, torch.optim.SGD(model.parameters(), 0.01))

    def load():
        for _ in range(STEPS + 1):
            if slow and where == "loader":
                slowness.slow_down(case, path)
            yield torch.ones(4, 8)

    report = None
    for step, x in enumerate(stragglers.watch(load())):
        optimizer.zero_grad()
        if slow and where == "step":
            slowness.slow_down(case, path)
        model(x).square().mean().backward()
        optimizer.step()
        after_step(step)
        report = stragglers.step() or report
    return report


@pytest.mark.usefixtures("several_ranks")
@pytest.mark.parametrize("case", slowness.CASES)
def test_a_slow_rank_is_named_with_what_it_does(case, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "hvdsync.guard.stragglers"):
        report = train(hvd.Stragglers(every=STEPS), case, tmp_path)
    slowness.assert_verdict(report, case, hvd.size())
    assert hvd.allgather_object(str(report)) == [str(report)] * hvd.size()
    told = [(r.levelname, r.message) for r in caplog.records]
    assert told == ([("WARNING", str(report))] if hvd.rank() == 0 else [])


@pytest.mark.usefixtures("several_ranks")
def test_the_rank_that_saves_is_named_for_it(shared_path, monkeypatch):
    from hvdsync.checkpoint.store import Store

    checkpoint = hvd.Checkpoint(shared_path)
    write = Store.write

    def write_slowly(*arguments):
        slowness.sleep()
        return write(*arguments)

    monkeypatch.setattr(Store, "write", write_slowly)
    weight = torch.nn.Linear(1, 1)
    report = train(
        hvd.Stragglers(every=STEPS), after_step=lambda step: checkpoint.save(step, model=weight)
    )
    checkpoint.close()
    assert (report.slowest, report.kind, report.why) == (0, "checkpoint", "it saves"), str(report)
    means = {kind: values.mean(axis=1) for kind, values in report.seconds.items()}
    assert means["checkpoint"][0] > 0.9 * slowness.SECONDS
    assert means["waiting"][1] > 0.9 * slowness.SECONDS > means["checkpoint"][1]


@pytest.mark.usefixtures("several_ranks")
def test_a_verdict_that_stays_is_said_once_and_level_ranks_are_no_news(caplog):
    stragglers = hvd.Stragglers(every=STEPS // 2)
    with caplog.at_level(logging.INFO, "hvdsync.guard.stragglers"):
        train(stragglers, "idle step")
    levels = [record.levelname for record in caplog.records]
    # No share of the time is more than all of it.
    caplog.clear()
    with caplog.at_level(logging.INFO, "hvdsync.guard.stragglers"):
        train(hvd.Stragglers(every=STEPS, tolerance=1.0), "idle step")
    assert levels == (["WARNING", "INFO"] if hvd.rank() == 0 else [])
    assert {record.levelname for record in caplog.records} <= {"INFO"}


def test_one_exchange_for_so_many_steps(monkeypatch):
    from hvdsync.comm import world

    comm = world.current()
    names = []
    gather = type(comm).allgather

    def counted(self, array, name, group=None):
        names.append((name, array.nbytes))
        return gather(self, array, name, group)

    monkeypatch.setattr(type(comm), "allgather", counted)
    stragglers = hvd.Stragglers(every=5)
    reports = [stragglers.step() for _ in range(11)]
    assert [i for i, report in enumerate(reports) if report] == [5, 10]
    exchanges = [size for name, size in names if name == "hvdsync.stragglers"]
    assert exchanges == ([5 * 16 + 8 * 4] * 2 if hvd.size() > 1 else [])
    assert (reports[10].first_step, reports[10].last_step) == (7, 11)
