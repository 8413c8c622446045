"""``python -m hvdsync plan``: what a step will take on links and numbers of workers one has not.

Costs are pure functions of measured and given numbers (``network``, ``payload``, ``timeline``,
``predict``); ``costs`` measures this machine, ``check`` compares with what ``bench link`` kept.
"""

from hvdsync.tools.plan.command import command

__all__ = ["command"]
