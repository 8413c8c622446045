"""Every verb in a world of one, without any init or launcher."""

import numpy as np
import pytest

from hvdsync.comm import trees, verbs


def test_verbs_give_back_this_process_s_own_values():
    assert (verbs.rank(), verbs.size(), verbs.local_rank(), verbs.local_size()) == (0, 1, 0, 1)
    assert verbs.agree_any(True) and not verbs.agree_any(False)
    assert verbs.agree_all(True) and not verbs.agree_all(False)
    assert verbs.average_metrics({"a": np.float32(0.5)}, weight=3) == {"a": 0.5}
    assert verbs.loss_scale(17) == 1.0
    marker = object()
    assert verbs.broadcast_object(marker) is marker
    assert verbs.allgather_object(marker) == [marker]
    assert verbs.rank_zero_only(lambda: 5)() == 5
    with verbs.rank_zero_first():
        pass


def test_an_error_inside_rank_zero_first_passes_through():
    with pytest.raises(KeyError), verbs.rank_zero_first():
        raise KeyError("x")


@pytest.mark.parametrize(
    "call", [lambda: verbs.loss_scale(0), lambda: verbs.average_metrics({}, 0)]
)
def test_a_weight_of_zero_everywhere_has_no_mean(call):
    with pytest.raises(ValueError, match="weights of all ranks are 0"):
        call()


def test_trees_are_split_and_joined_with_their_containers():
    tree = {"a": [np.ones(2), 3], "b": (np.zeros(1), {"c": None})}
    skeleton, leaves = trees.split(tree, lambda node: isinstance(node, np.ndarray))
    assert skeleton == {"a": [trees.Slot(0), 3], "b": (trees.Slot(1), {"c": None})}
    joined = trees.join(skeleton, leaves)
    assert joined["a"][0] is tree["a"][0] and joined["b"][0] is tree["b"][0]
    assert joined["a"][1] == 3 and joined["b"][1] == {"c": None}
