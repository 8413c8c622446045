"""``python -m hvdsync.train``: hands the command line to :mod:`hvdsync.train.cli`.

In: the arguments of the process. Out: its exit code.
"""

from hvdsync.train.cli import main

if __name__ == "__main__":
    main()
