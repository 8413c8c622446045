"""What each compressor sends of one small net, by the formulas of ``docs/compression.md``.

The net of the suites in all frameworks: 40 inputs, 60 hidden units, 3 outputs, in float32.
"""

import math

LARGE = 40 * 60
SMALL = 60 + 60 * 3 + 3  # biases and a narrow matrix, which error feedback leaves as they are
TORCH_FLAGS = 2 * 4 + 2  # two for each of four tensors, two for the bucket


def sent_bytes(name, ranks, steps=1, flags=0):
    """Bytes that one rank gives to collectives in so many first steps, ``flags`` in each."""
    whole = min(3, steps) if name == "powersgd:2,3" else 0
    return whole * _of_a_step("none", ranks, flags) + (steps - whole) * _of_a_step(
        name, ranks, flags
    )


def _of_a_step(name, ranks, flags):
    small = SMALL + flags
    if name == "none":
        return 4 * (LARGE + small)
    if name == "fp16":
        return 2 * (LARGE + small)
    if name == "bf16":
        return 2 * math.ceil((LARGE + small) / ranks) * (ranks + 1)
    if name == "onebit":
        return LARGE // 8 + 4 + 4 * small
    if name.startswith("topk"):
        return 8 * math.ceil(0.05 * LARGE) + 4 * small
    return 4 * 2 * (60 + 40) + 4 * small
