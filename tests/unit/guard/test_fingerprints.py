"""A fingerprint changes with every bit, with dtype and shape, and with nothing else."""

import numpy as np
import pytest

from hvdsync.guard.fingerprints import (
    array_entry,
    combine,
    fingerprint,
    flatten,
    plain_entry,
    without,
)


def entry_of(array, name="w"):
    return array_entry(name, name, f"{array.dtype} {array.shape}", lambda: array)


def digest_of(*arrays):
    return combine(fingerprint(entry_of(a, f"w{i}")) for i, a in enumerate(arrays))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "bool", "complex64"])
def test_each_single_bit_of_a_tensor_counts(dtype):
    array = np.random.default_rng(0).normal(size=(3, 5)).astype(dtype)
    bits = array.reshape(-1).view(np.uint8)
    seen = {digest_of(array)}
    for i in range(len(bits)):
        for bit in range(8):
            bits[i] ^= 1 << bit
            seen.add(digest_of(array))
            bits[i] ^= 1 << bit
    assert len(seen) == 1 + 8 * array.nbytes


@pytest.mark.parametrize("position", [0, 1_234_567, 2_999_999])
def test_the_lowest_mantissa_bit_of_one_among_millions_counts(position):
    array = np.random.default_rng(0).normal(size=3_000_000).astype(np.float32)
    before = digest_of(array)
    array.view(np.uint32)[position] ^= 1
    assert digest_of(array) != before


def test_equal_arrays_in_different_memory_have_equal_fingerprints():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    holes = np.zeros((3, 8), np.float32)[:, ::2]
    holes[...] = array
    assert digest_of(np.asfortranarray(array)) == digest_of(holes) == digest_of(array)


def test_shape_dtype_and_place_count():
    array = np.arange(12, dtype=np.float32)
    others = [array.reshape(3, 4), array.view(np.int32), array[::-1]]
    assert len({digest_of(a) for a in [array, *others]}) == 4
    assert digest_of(array, array + 1) != digest_of(array + 1, array)


def test_signed_zeros_differ_and_the_names_shown_do_not_count():
    assert digest_of(np.array([0.0])) != digest_of(np.array([-0.0]))
    array = np.ones(3)
    one, other = (
        array_entry("model.0", name, "f8", lambda: array) for name in ("dense", "dense_1")
    )
    assert combine([fingerprint(one)]) == combine([fingerprint(other)])


def test_the_order_in_which_entries_are_listed_does_not_count():
    found = [fingerprint(entry_of(np.full(2, i), f"w{i}")) for i in range(3)]
    assert combine(found) == combine(found[::-1])


def test_plain_values_differ_by_value_and_type():
    values = [0.1, np.nextafter(0.1, 1).item(), 1, 1.0, True, None, "a", 2**70]
    found = [combine([fingerprint(plain_entry("lr", value))]) for value in values]
    assert len(set(found)) == len(values)
    assert plain_entry("lr", 0.1).numbers() == 0.1
    assert plain_entry("lr", "a").numbers() is None


def test_nested_state_is_found_under_dotted_names():
    tree = {"betas": (0.9, 0.99), "lr": 1, "old": [{"a": 2}]}
    found = dict(flatten("g", tree))
    assert found == {"g.betas.0": 0.9, "g.betas.1": 0.99, "g.lr": 1, "g.old.0.a": 2}


def test_patterns_leave_entries_out():
    entries = [plain_entry(name, 1) for name in ("bn.running_mean", "bn.weight")]
    assert [e.name for e in without(entries, ["*.running_*"])] == ["bn.weight"]
    assert [e.name for e in without(entries, "*.running_*")] == ["bn.weight"]
