"""What is noted before ranks are compared; the comparison itself needs several ranks."""

import pytest

from tests.parallel.processes import alone


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_init_notes_the_versions(framework):
    pytest.importorskip(framework)
    alone(f"""
    import hvdsync.{framework} as hvd
    from hvdsync.comm.comparison import installation, noted

    hvd.init()
    assert noted() == {{"installed versions": installation("{framework}")}}
    """)
