"""``python -m hvdsync bench``: measurements that users repeat on their own machines.

Each is started on all ranks; rank 0 shows a table, and writes the numbers behind it.
"""

from hvdsync.tools.bench.command import command

__all__ = ["command"]
