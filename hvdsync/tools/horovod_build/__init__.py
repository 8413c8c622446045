"""Build Horovod 0.28.1 for the frameworks of this Python environment.

In: the pinned sdist and what the environment holds. Out: a cached wheel per framework, and their
union installed. ``source`` fetches and unpacks, ``patches`` mends, ``toolchain`` looks around,
``compiling`` runs the compiler, ``wheels`` merges, ``installed`` reads what is there,
``proof`` tries it, ``build`` leads.
"""
