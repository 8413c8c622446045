"""A function run on several ranks: on this machine, on Spark's executors or on a Ray cluster."""

from hvdsync.launch.run import run

__all__ = ["run"]
