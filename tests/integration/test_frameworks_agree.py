"""The same net, weights and batches give the same weights in every framework, on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BATCHES, SAMPLES = 12, 16


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    """Weights, batches, and what one plain NumPy process makes of them in float64."""
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=s, scale=0.4) for s in ((6, 8), (8,), (8, 3), (3,))]
    weights = [w.astype(np.float32) for w in weights]
    x = rng.normal(size=(BATCHES, SAMPLES, 6)).astype(np.float32)
    y = rng.integers(3, size=(BATCHES, SAMPLES))
    path = tmp_path_factory.mktemp("problem") / "given.npz"
    np.savez(path, x=x, y=y, **{f"weight{i}": w for i, w in enumerate(weights)})
    return path, train_by_hand(weights, x, y)


def train_by_hand(weights, x, y, rate=0.1, momentum=0.9):
    """Softmax cross-entropy, tanh, SGD with momentum: written out, in float64."""
    w1, b1, w2, b2 = (w.astype(np.float64) for w in weights)
    velocity = [np.zeros_like(w) for w in (w1, b1, w2, b2)]
    for batch, labels in zip(x.astype(np.float64), y, strict=True):
        hidden = np.tanh(batch @ w1 + b1)
        logits = hidden @ w2 + b2
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(labels)), labels] -= 1
        d_logits = p / len(labels)
        d_hidden = (d_logits @ w2.T) * (1 - hidden**2)
        gradients = [batch.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_logits, d_logits.sum(0)]
        for w, v, g in zip((w1, b1, w2, b2), velocity, gradients, strict=True):
            v[...] = momentum * v + g
            w -= rate * v
    return [w1, b1, w2, b2]


@pytest.mark.parametrize(
    ("framework", "backend"),
    [("torch", ""), ("tensorflow", "tensorflow"), ("keras", "tensorflow"), ("keras", "torch")],
)
def test_two_ranks_of_each_framework_reach_the_weights_worked_out_by_hand(
    problem, tmp_path, framework, backend
):
    given, expected = problem
    target = tmp_path / "trained.npz"
    worker = Path(__file__).with_name("same_net.py")
    command = ["horovodrun", "--gloo", "-np", "2", sys.executable, worker, framework, given, target]
    environment = {**os.environ, "KERAS_BACKEND": backend or "tensorflow"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    run = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stdout + run.stderr
    trained = np.load(target)
    for name, value in zip(trained.files, expected, strict=True):
        # float32 has 24 bits; twelve steps of sums over 16 samples lose a few of them.
        np.testing.assert_allclose(trained[name], value, rtol=1e-4, atol=1e-6)
