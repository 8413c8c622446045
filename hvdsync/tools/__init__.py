"""The commands behind ``python -m hvdsync``, one module each, usable as plain functions.

Nothing here imports a framework at module level, so that every ``--help`` is quick.
"""
