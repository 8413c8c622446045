"""Rank 1 fails while rank 0 waits for it, and both close their checkpoints on the way out.

horovodrun -np 2 python fails_alone.py with|finally DIRECTORY
"""

import sys

import hvdsync.torch as hvd


def train(checkpoint):
    checkpoint.save(1, epoch=1)
    checkpoint.wait()
    if hvd.rank() == 1:
        raise ZeroDivisionError("rank 1 alone")
    hvd.agree_any(False)


def main():
    way, directory = sys.argv[1:]
    hvd.init()
    checkpoint = hvd.Checkpoint(directory, background=True)
    if way == "with":
        with checkpoint:
            train(checkpoint)
    else:
        try:
            train(checkpoint)
        finally:
            checkpoint.close()


if __name__ == "__main__":
    main()
