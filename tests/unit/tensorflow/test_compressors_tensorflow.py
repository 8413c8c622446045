"""The compressors' mathematics on TensorFlow tensors; see ``tests/compressors.py``."""

import numpy as np
import pytest
import tensorflow as tf

from hvdsync.sync.compression import tensorflow_compression
from hvdsync.sync.compression.tensorflow_arrays import TensorFlowArrays
from tests import compressors
from tests.compression_ranks import Ranks
from tests.compressors import LOSSY, WITHOUT_MOMENTUM

Compression = tensorflow_compression(tf)


@pytest.fixture
def ranks():
    return lambda compressor, shapes, count: Ranks(
        TensorFlowArrays(tf), tf.constant, np.array, compressor, shapes, count
    )


def test_fp16_sends_two_bytes_an_element_and_averages(ranks):
    compressors.check_fp16(ranks, Compression.fp16)


def test_fp16_sums_cannot_overflow(ranks):
    compressors.check_fp16_of_large_numbers(ranks, Compression.fp16)


def test_bf16_sends_two_bytes_an_element_and_adds_up_in_full_precision(ranks):
    compressors.check_bf16(ranks, Compression.bf16)


def test_bf16_has_the_range_of_float32(ranks):
    compressors.check_bf16_of_large_numbers(ranks, Compression.bf16)


def test_topk_sends_the_largest_and_remembers_the_rest(ranks):
    compressors.check_topk(ranks)


def test_topk_of_many_elements_is_exact(ranks):
    compressors.check_topk_of_many_elements_is_exact(ranks)


def test_topk_corrects_momentum(ranks):
    compressors.check_topk_corrects_momentum(ranks)


def test_onebit_sends_signs_and_one_scale(ranks):
    compressors.check_onebit(ranks)


def test_powersgd_is_power_iteration_with_error_feedback(ranks):
    compressors.check_powersgd(ranks)


def test_powersgd_is_exact_for_matrices_of_its_rank(ranks):
    compressors.check_powersgd_is_exact_for_matrices_of_its_rank(ranks)


@WITHOUT_MOMENTUM
def test_what_was_not_sent_is_kept(ranks, compressor):
    compressors.check_what_was_not_sent_is_kept(ranks, compressor)


@LOSSY
def test_what_is_not_finite_is_seen(ranks, compressor):
    compressors.check_what_is_not_finite_is_seen(ranks, compressor)


@LOSSY
def test_zeros_stay_zeros(ranks, compressor):
    compressors.check_zeros_stay_zeros(ranks, compressor)
