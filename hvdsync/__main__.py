"""``python -m hvdsync``: hands the command line to :mod:`hvdsync.tools.cli`.

In: the arguments of the process. Out: its exit code.
"""

from hvdsync.tools.cli import main

if __name__ == "__main__":
    main()
