"""The bucket plan: every tensor once, in order, within limits, alike for alike arguments."""

import pytest

from hvdsync.sync.buckets import Bucket, group_positions, itemsize, plan_buckets

F, H = "float32", "float16"


def test_consecutive_tensors_fill_buckets_up_to_the_limit():
    plan = plan_buckets([3, 1, 2, 4], [F] * 4, limit_bytes=16, first_bytes=None)
    assert plan == (Bucket(F, (0, 1), (3, 1)), Bucket(F, (2,), (2,)), Bucket(F, (3,), (4,)))


def test_the_first_bucket_has_its_own_smaller_limit():
    plan = plan_buckets([1, 1, 1, 1], [F] * 4, limit_bytes=12, first_bytes=4)
    assert [b.members for b in plan] == [(0,), (1, 2, 3)]


def test_a_tensor_beyond_the_limit_has_a_bucket_of_its_own():
    plan = plan_buckets([1, 100, 1], [F] * 3, limit_bytes=8, first_bytes=None)
    assert [b.members for b in plan] == [(0,), (1,), (2,)]


def test_dtypes_do_not_share_buckets_but_keep_filling_their_own():
    plan = plan_buckets([1, 2, 3, 4], [F, H, F, H], limit_bytes=100, first_bytes=None)
    assert plan == (Bucket(F, (0, 2), (1, 3)), Bucket(H, (1, 3), (2, 4)))
    assert [b.length for b in plan] == [4, 6]


def test_groups_travel_together_and_the_rest_is_cut_as_usual():
    plan = plan_buckets(
        [5, 1, 1, 1], [F, F, H, F], limit_bytes=4, first_bytes=None, groups=[[0, 2, 3]]
    )
    assert [(b.dtype, b.members) for b in plan] == [(F, (0, 3)), (H, (2,)), (F, (1,))]


@pytest.mark.parametrize("limit", [1, 7, 64, 1000])
def test_every_tensor_is_in_exactly_one_bucket(limit):
    sizes = [(7 * i) % 13 + 1 for i in range(40)]
    dtypes = [F if i % 3 else H for i in range(40)]
    plan = plan_buckets(sizes, dtypes, limit_bytes=limit, first_bytes=limit // 2)
    assert sorted(m for b in plan for m in b.members) == list(range(40))
    for bucket in plan:
        assert bucket.sizes == tuple(sizes[m] for m in bucket.members)
        assert len(bucket.members) == 1 or bucket.length * itemsize(bucket.dtype) <= limit


def test_nothing_to_reduce_is_no_bucket():
    assert plan_buckets([], []) == ()


def test_bfloat16_counts_two_bytes():
    assert [itemsize(d) for d in ("bfloat16", "float16", "float64")] == [2, 2, 8]


def test_groups_of_a_user_become_positions():
    assert group_positions(None, "abcde") is None
    assert group_positions(2, "abcde") == ((0, 1), (2, 3, 4))
    assert group_positions(9, "ab") == ((0,), (1,))
    assert group_positions([["d", "a"], ["x", "c"]], "abcd") == ((3, 0), (2,))
