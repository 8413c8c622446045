"""A rank that computes wrong numbers is named by the probe (1, 2 and 4 ranks)."""

import logging

import pytest
import torch

import hvdsync.torch as hvd
from hvdsync.errors import HvdsyncError, ReplicaMismatch, SilentCorruption


def net():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7),
        torch.nn.BatchNorm1d(7),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.5),
        torch.nn.Linear(7, 1),
    )


def batch():
    generator = torch.Generator().manual_seed(hvd.rank())
    return {"x": torch.randn(6, 5, generator=generator), "y": torch.ones(6, 1)}


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


class Wrong:
    """The loss, by a factor too large on one rank; one that grows where ``unsteady``."""

    def __init__(self, rank, factor=1.5, unsteady=False):
        self.rank, self.factor, self.unsteady = rank, factor, unsteady
        self.now = factor

    def __call__(self, model, batch):
        right = loss(model, batch)
        if hvd.rank() != self.rank:
            return right
        if self.unsteady:
            self.now *= self.factor
        return right * self.now


def text_of(probe, model=None, steps=1):
    with pytest.raises(SilentCorruption) as error:
        for _ in range(steps):
            probe.check(model or net(), batch())
    text = str(error.value)
    assert text.startswith(f"rank {hvd.rank()} of {hvd.size()}: ")
    assert len(set(hvd.allgather_object(text.partition(": ")[2]))) == 1
    return text


def test_ranks_that_compute_alike_pass_whatever_noise_and_statistics_the_model_has():
    model = net()
    if hvd.rank() == 0:
        model[1].running_mean += 1  # a rank's own
    torch.manual_seed(hvd.rank())
    probe = hvd.CorruptionProbe(loss, every=1, tolerance=0 if hvd.size() == 1 else 1e-6)
    for _ in range(hvd.size() * (hvd.size() - 1) + 1):
        assert probe.check(model, batch()) == ()


def test_training_goes_on_as_if_there_had_been_no_probe():
    def train(probe):
        torch.manual_seed(5)
        model = net()
        guard = hvd.Guard()
        model, optimizer = hvd.distribute(
            model, torch.optim.SGD(model.parameters(), 0.1), guard=guard
        )
        for _ in range(3):
            optimizer.zero_grad()
            loss(model, batch()).backward()
            if probe is not None:
                probe.check(model, batch())
            optimizer.step()
        return list(model.state_dict().values())

    probed = train(hvd.CorruptionProbe(loss, every=1))
    for found, expected in zip(probed, train(None), strict=True):
        assert torch.equal(found, expected)


def test_a_rank_that_does_not_reproduce_itself_is_named():
    # Both ranks of the first pair, 0 and 1, compute.
    wrong = 1 if hvd.size() > 1 else 0
    text = text_of(hvd.CorruptionProbe(Wrong(wrong, unsteady=True), every=2), steps=2)
    assert f"step 2: rank {wrong} computes wrong numbers: given the same batch twice" in text
    assert "'0.weight' (float32 (7, 5))" in text
    assert "go back to a checkpoint from before this run" in text


def test_between_two_ranks_it_is_said_that_they_differ():
    if hvd.size() != 2:
        pytest.skip("a matter of two ranks")
    text = text_of(hvd.CorruptionProbe(Wrong(1), every=1))
    assert "one of two ranks computes wrong numbers: for one batch of rank 0 ranks 0, 1" in text
    assert "'0.weight' (float32 (7, 5)), in " in text and " of 35 elements" in text
    assert "each comes to its own results again" in text


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_third_rank_tells_which_of_two_is_wrong(wrong):
    if hvd.size() < 3:
        pytest.skip("takes three ranks")
    text = text_of(hvd.CorruptionProbe(Wrong(wrong), every=1))
    right = f"ranks {1 - wrong}, 2"
    assert f"rank {wrong} computes wrong numbers: for one batch of rank 0 ranks 0, 1" in text
    assert f"and {right} agree" in text
    assert "Take its device or host out of the run" in text


def test_a_wrong_rank_is_found_when_its_turn_comes():
    if hvd.size() < 3:
        pytest.skip("takes three ranks")
    text = text_of(hvd.CorruptionProbe(Wrong(hvd.size() - 1), every=1), steps=hvd.size())
    assert f"rank {hvd.size() - 1} computes wrong numbers" in text


def test_the_checkpoint_to_go_back_to_is_older_than_the_last_probe_of_that_rank():
    if hvd.size() != 4:
        pytest.skip("a matter of turns among four")
    wrong = Wrong(1, factor=1.0)
    probe = hvd.CorruptionProbe(wrong, every=1)
    for _ in range(2):  # of ranks 0 and 1, of 1 and 2
        assert probe.check(net(), batch()) == ()
    wrong.now = 1.5
    text = text_of(probe, steps=4)  # not those of 2 and 3, 3 and 0, 0 and 2, but of 1 and 3
    assert "step 6: rank 1 computes wrong numbers" in text
    assert "go back to a checkpoint of step 2 or before" in text


def test_what_is_below_the_tolerance_is_no_difference():
    probe = hvd.CorruptionProbe(Wrong(0, factor=1 + 1e-6), every=1)
    assert probe.check(net(), batch()) == ()


def test_warn_gives_the_ranks_and_rank_zero_says_so(caplog):
    probe = hvd.CorruptionProbe(Wrong(0, unsteady=True), every=1, on_corruption="warn")
    with caplog.at_level(logging.WARNING, logger="hvdsync.guard.probe"):
        assert probe.check(net(), batch()) == (0,)
    told = [r.getMessage() for r in caplog.records if "wrong numbers" in r.getMessage()]
    assert len(told) == (hvd.rank() == 0)


def test_replicas_that_differ_are_no_corruption():
    if hvd.size() < 2:
        pytest.skip("one rank")
    model = net()
    if hvd.rank() == 0:
        model[0].weight.data[0, 0] += 1
    with pytest.raises(ReplicaMismatch, match=r"0\.weight"):
        hvd.CorruptionProbe(loss, every=1).check(model, batch())


def test_a_loss_that_fails_on_one_rank_fails_on_all():
    def failing(model, batch):
        if hvd.rank() == 0:
            raise OSError("no loss here")
        return loss(model, batch)

    with pytest.raises(OSError if hvd.rank() == 0 else HvdsyncError, match="no loss here"):
        hvd.CorruptionProbe(failing, every=1).check(net(), batch())


def test_parameters_without_a_gradient_are_left_out():
    model = net()
    model[4].bias.requires_grad_(False)
    model.spare = torch.nn.Linear(2, 2)
    short = torch.nn.Sequential(*list(model)[:5])
    short.spare = model.spare
    short.forward = lambda x: torch.nn.Sequential(*list(model)[:5])(x)
    assert hvd.CorruptionProbe(loss, every=1).check(short, batch()) == ()
