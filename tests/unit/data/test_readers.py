"""Files, streams, seeds, noise and counts, for any rank of any world, without one."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from hvdsync.data import augmentation, rank_seed, shard_files, worker_shard
from hvdsync.data.arrays import Array
from hvdsync.data.coverage import Leg, describe, simulate
from hvdsync.data.gathering import gather_in_order
from hvdsync.errors import DataError


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 7, 12])
def test_every_file_is_read_once_whatever_order_the_disk_has(size: int, length: int) -> None:
    files = [f"{i}.tar" for i in range(length)]
    parts = [shard_files(files[::-1] if r else files, 3, rank=r, size=size) for r in range(size)]
    assert Counter(itertools.chain(*parts)) == Counter(files)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_files_of_unequal_numbers_are_doubled_or_left_out_by_policy() -> None:
    files = [f"{i}.tar" for i in range(7)]
    padded = [shard_files(files, uneven="pad", rank=r, size=3) for r in range(3)]
    assert [len(part) for part in padded] == [3, 3, 3]
    assert set(itertools.chain(*padded)) == set(files)
    dropped = [shard_files(files, uneven="drop", rank=r, size=3) for r in range(3)]
    assert [len(part) for part in dropped] == [2, 2, 2]
    assert len(set(itertools.chain(*dropped))) == 6
    with pytest.raises(DataError, match="found 7 files for 8 readers"):
        shard_files(files, uneven="drop", rank=0, size=8)
    with pytest.raises(DataError, match=r"1\.tar is in the list twice"):
        shard_files([*files, "1.tar"], rank=0, size=1)
    with pytest.raises(DataError, match="expected both or neither"):
        shard_files(files, rank=0)


def test_the_order_of_files_changes_with_epoch_and_seed_only_when_shuffled() -> None:
    files = [f"{i}" for i in range(9)]

    def order(epoch: int, seed: int, shuffle: bool = True) -> list[str]:
        return shard_files(files, epoch, shuffle, seed, rank=0, size=1)

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(epoch, seed)) for epoch in range(2) for seed in range(2)}) == 4
    assert order(5, 5, shuffle=False) == files


@pytest.mark.parametrize("length", [0, 1, 2, 5, 6, 11])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_elements_of_a_stream_are_dealt_out_in_rounds(length: int, size: int) -> None:
    def parts(uneven: Any) -> list[list[int]]:
        return [
            list(worker_shard(iter(range(length)), uneven, rank=r, size=size)) for r in range(size)
        ]

    assert sorted(itertools.chain(*parts("exact"))) == list(range(length))
    dropped = parts("drop")
    assert sorted(itertools.chain(*dropped)) == list(range(length - length % size))
    padded = parts("pad")
    assert {len(part) for part in padded} == {-(-length // size)}
    assert set(itertools.chain(*padded)) == set(range(length))
    with pytest.raises(DataError, match="expected one of pad, drop, exact"):
        worker_shard([], "wrong", rank=0, size=1)  # type: ignore[arg-type]


def test_ranks_have_seeds_of_their_own_that_repeat() -> None:
    seeds = [rank_seed(3, rank) for rank in range(1000)]
    assert len(set(seeds)) == 1000
    assert seeds == [rank_seed(3, rank) for rank in range(1000)]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert rank_seed(3) == seeds[0]
    assert not set(seeds) & {rank_seed(4, rank) for rank in range(1000)}
    with pytest.raises(DataError, match="seed=-1"):
        rank_seed(-1)


def shifts(images: Array, noise: Any) -> list[tuple[int, int]]:
    """By how much each image with one bright pixel in its middle has moved."""
    moved = augmentation.shift_randomly(images, noise)
    assert moved.shape == images.shape and moved.dtype == images.dtype
    middle = images.shape[1] // 2, images.shape[2] // 2
    places = [np.unravel_index(image[..., 0].argmax(), image.shape[:2]) for image in moved]
    return [(int(y) - middle[0], int(x) - middle[1]) for y, x in places]


def test_images_are_shifted_by_up_to_two_pixels_each_way_and_all_shifts_occur() -> None:
    images = np.zeros((500, 28, 20, 1), np.float32)
    images[:, 14, 10] = 1
    found = Counter(shifts(images, augmentation.sample_noise(500, seed=1, epoch=0)))
    assert set(found) == {(y, x) for y in range(-2, 3) for x in range(-2, 3)}
    assert max(found.values()) < 50  # of 20 on average


def test_what_moves_in_is_zero_and_small_images_move_less() -> None:
    ones = np.ones((4, 16, 16, 2), np.float32)
    noise = np.array([0, 4, 4 << 32, 2 | 2 << 32], np.uint64)
    moved = augmentation.shift_randomly(ones, noise)
    assert [int(image[..., 0].sum()) for image in moved] == [14 * 14, 14 * 14, 14 * 14, 16 * 16]
    assert not moved[0, :2].any() and not moved[1, -2:].any() and not moved[2, :, -2:].any()
    assert (augmentation.shift_randomly(ones[:, :8, :8], noise) != ones[:, :8, :8]).any()
    tiny = ones[:, :7, :9]
    assert augmentation.shift_randomly(tiny, noise) is tiny


def test_the_noise_of_a_sample_is_that_of_its_index_seed_and_epoch() -> None:
    noise = augmentation.sample_noise(100, seed=1, epoch=2)
    assert noise.dtype == np.uint64
    # NumPy keeps this stream for ever; a resumed run relies on it.
    assert (
        noise[:3]
        == np.array([6661174643155770020, 18396570279626124206, 14622603499951982353], np.uint64)
    ).all()
    assert (noise[:50] == augmentation.sample_noise(50, seed=1, epoch=2)).all()
    for other in (augmentation.sample_noise(100, 1, 3), augmentation.sample_noise(100, 2, 2)):
        assert not (noise == other).any()


def test_results_of_one_process_are_put_in_order() -> None:
    values = np.array([[3.0], [1.0], [2.0], [2.5]])
    gathered = gather_in_order(values, [2, 0, 1, 1])
    assert gathered.tolist() == [[1.0], [2.0], [3.0]]
    with pytest.raises(DataError, match="rank 0 gave 2 values for 1 indices"):
        gather_in_order([1, 2], [0])
    with pytest.raises(DataError, match=r"2 of 4 samples have no result \(0, 2\)"):
        gather_in_order([1, 2], [1, 3], length=4)
    with pytest.raises(DataError, match=r"1 of 1 samples are none of the data set \(1\)"):
        gather_in_order([1, 2], [0, 1], length=1)


def test_coverage_counts_what_the_sampler_gives() -> None:
    assert describe(simulate(12, [Leg(4)])) == [(1, 12)]
    assert describe(simulate(13, [Leg(4)])) == [(1, 10), (2, 3)]
    assert describe(simulate(13, [Leg(4)], uneven="drop")) == [(0, 1), (1, 12)]
    assert describe(simulate(13, [Leg(4)], uneven="exact", epochs=3)) == [(3, 13)]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_resumed_at_other_numbers_of_ranks_each_sample_is_read_once(
    batch_size: int, shuffle: bool
) -> None:
    legs = [Leg(4, 5), Leg(3, 2), Leg(1, 7), Leg(7)]
    counts = simulate(
        101, legs, batch_size=batch_size, shuffle=shuffle, seed=9, uneven="exact", epochs=2
    )
    assert describe(counts) == [(2, 101)]


def test_runs_that_read_too_much_or_too_little_are_refused() -> None:
    with pytest.raises(DataError, match="must read the epoch to its end"):
        simulate(10, [Leg(2, 3)])
    with pytest.raises(DataError, match="have read the whole epoch"):
        simulate(10, [Leg(2, 5), Leg(2)])
