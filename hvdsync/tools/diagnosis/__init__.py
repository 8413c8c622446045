"""What is found on this machine and what that means.

In: this environment. Out: ``findings.gather()`` looks and tries, ``verdicts.judge(findings)``
turns that into sentences with cures; the second is a pure function.
"""
