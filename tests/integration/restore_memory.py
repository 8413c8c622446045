"""One rank that restores a large model: the state's MB, and how many MB more the peak took.

    horovodrun -np 2 python restore_memory.py torch|keras save|restore DIRECTORY

Rank 0 prints. The model itself is there before; restoring may hold one more copy of its state.
"""

import sys
from pathlib import Path

MEGABYTES = 320
UNITS = 2048  # a square matrix of 16 MB


def torch_model():
    import torch

    import hvdsync.torch as hvd

    model = torch.nn.Sequential(
        *(torch.nn.Linear(UNITS, UNITS, bias=False) for _ in range(MEGABYTES // 16))
    )
    return hvd, model, lambda: float(model[-1].weight.sum())


def keras_model():
    import keras

    import hvdsync.keras as hvd

    layers = [keras.layers.Dense(UNITS, use_bias=False) for _ in range(MEGABYTES // 16)]
    model = keras.Sequential([keras.Input((UNITS,)), *layers])
    return hvd, model, lambda: float(keras.ops.sum(model.layers[-1].kernel))


def peak(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) // 1024


def main():
    framework, action, directory = sys.argv[1:]
    make = {"torch": torch_model, "keras": keras_model}[framework]
    if framework == "keras":
        import hvdsync.keras as hvd
    else:
        import hvdsync.torch as hvd
    hvd.init()
    hvd, model, total = make()
    checkpoint = hvd.Checkpoint(directory)
    if action == "save":
        checkpoint.save(1, model=model)
        return
    own = total()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak("VmRSS")
    checkpoint.restore(model=model)
    more = peak("VmHWM") - before
    everyone = hvd.allgather_object((total(), more))
    assert len({total for total, _ in everyone}) == 1
    assert own != total(), "restored what was there already"
    if hvd.rank() == 0:
        print(f"state {MEGABYTES} MB, more at the peak by rank:", *(more for _, more in everyone))


if __name__ == "__main__":
    main()
