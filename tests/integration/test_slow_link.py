"""``python -m hvdsync bench link``, as root starts it."""

from __future__ import annotations

import json
import sys

import pytest
from train_runs import succeed

from hvdsync.tools.hosts import missing

REASON = missing()
SECONDS = 600


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.skipif(REASON is not None, reason=f"two hosts cannot be made: {REASON}")
def test_rules_and_compressions_are_raced_over_a_slow_link(tmp_path):
    # So slow that what travels decides, whatever else this machine does.
    brief = ("--link", "20Mbit", "--model", "deep", "--rounds", "1")
    bench = (sys.executable, "-m", "hvdsync", "bench", "link", *brief, "--out", ".")
    output = succeed(bench, tmp_path, SECONDS)
    assert "Training step, 20 Mbit/s" in output
    (link,) = json.loads((tmp_path / "link.json").read_text())["links"]
    assert 14e6 < link["carried"] < 20.4e6
    nbytes = 4 * link["parameters"]
    assert nbytes == 4 * (785 * 64 + 38 * 65 * 64 + 65 * 10)
    sent, taken = link["sent_bytes_per_step"], link["seconds_per_step"]
    assert len(taken) == 17
    # Each of two ranks sends as many bytes as it has gradients; headers come to that.
    for name in ("synchronous", "raw Horovod", "DDP, 25 MB buckets"):
        assert nbytes < sent[name] < 1.2 * nbytes
    assert nbytes / 2 < sent["synchronous, fp16"] < 0.6 * nbytes
    assert sent["synchronous, powersgd:1"] < 0.2 * nbytes
    assert nbytes / 4 < sent["local SGD, period 4"] < 0.35 * nbytes
    for name in ("local SGD, period 16", "synchronous, fp16"):
        assert taken[name][0] < taken["synchronous"][0]
