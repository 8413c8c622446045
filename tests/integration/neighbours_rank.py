"""A rank beside other processes: loader workers of its own, a second front door, a second job."""

import os
import signal
import sys


def front_door(framework):
    if framework == "torch":
        import torch

        import hvdsync.torch as hvd

        return hvd, lambda value: hvd.allreduce(torch.tensor([float(value)]), op=hvd.Sum).item()
    import tensorflow as tf

    import hvdsync.tensorflow as hvd

    return hvd, lambda value: float(hvd.allreduce(tf.constant([float(value)]), op=hvd.Sum)[0])


def init(framework):
    """Say what this rank sees after init, in one write: ranks share the stream."""
    hvd, total = front_door(framework)
    hvd.init()
    sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}: {total(hvd.rank() + 1)}\n")


def job(number):
    """Many exchanges that would not fit if the ranks of another job answered."""
    hvd, total = front_door("torch")
    hvd.init()
    for step in range(200):
        assert total(int(number) * 1000 + step) == hvd.size() * (int(number) * 1000 + step)
    sys.stdout.write(f"job {number} rank {hvd.rank()} is right\n")


def threads(framework):
    hvd, total = front_door(framework)
    hvd.init()
    if framework == "torch":
        import torch

        count = torch.get_num_threads()
    else:
        import tensorflow as tf

        count = tf.config.threading.get_intra_op_parallelism_threads()
        # What an operation may use: the setting has come in time.
        assert total(1) == hvd.size()
    sys.stdout.write(f"threads {count}\n")


def torch_loader(fate):
    import torch

    hvd, total = front_door("torch")

    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            # A worker knows whose it is.
            return torch.tensor([index**2, hvd.rank(), os.getpid()])

    hvd.init()
    sampler = hvd.DistributedSampler(64, shuffle=True)
    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=4, sampler=sampler, num_workers=2, multiprocessing_context="fork"
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = workers = 0
        for step, batch in enumerate(loader):
            assert (batch[:, 1] == hvd.rank()).all() and (batch[:, 2] != os.getpid()).all()
            seen += total(batch[:, 0].sum())
            workers += len(batch[:, 2].unique())
            if fate == "killed" and epoch == 1 and step == 3 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        assert seen == sum(i**2 for i in range(64)), seen
    sys.stdout.write(f"rank {hvd.rank()} has read all\n")
    hvd.shutdown()


def tensorflow_loader(fate):
    import multiprocessing

    import tensorflow as tf

    hvd, total = front_door("tensorflow")
    hvd.init()
    dataset = hvd.shard(tf.data.Dataset.range(64)).map(lambda i: i**2, num_parallel_calls=2)
    for _ in range(2):
        seen = sum(total(sum(map(int, batch))) for batch in dataset.batch(4).prefetch(2))
        assert seen == sum(i**2 for i in range(64)), seen
    # As a loader of plain Python does: forked beside Horovod's threads.
    with multiprocessing.get_context("fork").Pool(2) as pool:
        squares = pool.map(square, range(hvd.rank(), 64, hvd.size()))
    assert total(sum(squares)) == sum(i**2 for i in range(64))
    sys.stdout.write(f"rank {hvd.rank()} has read all\n")
    hvd.shutdown()


def square(number):
    return number**2


def both(order):
    """Both front doors are imported, and both are initialised, the second in vain."""
    from hvdsync.errors import LaunchError

    first, second = order.split("+")
    one, total = front_door(first)
    other, _ = front_door(second)
    one.init()
    assert total(1) == one.size() == 2
    try:
        other.init()
    except LaunchError as error:
        sys.stdout.write(f"{error}\n")
    # The first goes on, and speaks for the process.
    assert total(2) == 4
    assert other.agree_any(one.rank() == 1) and not other.agree_all(one.rank() == 1)
    one.shutdown()


PARTS = {
    "init": init,
    "job": job,
    "threads": threads,
    "torch_loader": torch_loader,
    "tensorflow_loader": tensorflow_loader,
    "both": both,
}
if __name__ == "__main__":
    PARTS[sys.argv[1]](sys.argv[2])
