"""A collective that only some ranks call is found by the condition around a line of the stack."""

import textwrap

import pytest

from hvdsync.guard.watch.condition import rank_condition
from hvdsync.guard.watch.stacks import Frame

SCRIPT = """
def plain():
    reduce()

if hvd.rank() == 0:
    def defined_here():
        reduce()

def branch():
    if hvd.rank() == 0:
        for x in range(3):
            reduce()
    reduce()

def otherwise():
    if local_rank > 0:
        pass
    else:
        reduce()

def loop():
    while busy and hvd.rank() == 0:
        reduce()

def inline():
    x = reduce() if self.rank == 0 else None

def tested():
    if reduce() and rank == 0:
        pass

def unrelated():
    if hvd.size() > 1 and step % 10 == 0:
        reduce()

def agreed():
    if hvd.agree_any(hvd.rank() == 0 and full()):
        reduce()

def first():
    with hvd.rank_zero_first():
        reduce()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def frame_in(script, function, nth=0):
    """The nth call of reduce() in a function of the script."""
    lines = script.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if f"def {function}(" in line)
    calls = [i for i, line in enumerate(lines) if i > start and "reduce()" in line]
    return Frame(str(script), calls[nth] + 1, function, lines[calls[nth]].strip())


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("branch", "if hvd.rank() == 0:"),
        ("otherwise", "if local_rank > 0:"),
        ("loop", "while busy and hvd.rank() == 0:"),
        ("inline", "x = reduce() if self.rank == 0 else None"),
        ("first", "with hvd.rank_zero_first():"),
    ],
)
def test_a_condition_on_the_rank_is_found_with_its_line(function, text, script):
    found = rank_condition([frame_in(script, function)])
    assert (found.file, found.text) == (str(script), text)
    assert script.read_text().splitlines()[found.line - 1].strip() == text


@pytest.mark.parametrize("function", ["plain", "defined_here", "tested", "unrelated", "agreed"])
def test_other_lines_have_none(function, script):
    assert rank_condition([frame_in(script, function)]) is None


def test_a_line_behind_the_branch_is_not_in_it(script):
    assert rank_condition([frame_in(script, "branch", nth=1)]) is None


def test_the_condition_may_be_around_a_call_further_out(script, tmp_path):
    helper = tmp_path / "helper.py"
    helper.write_text("def evaluate():\n    reduce()\n")
    inner = Frame(str(helper), 2, "evaluate", "reduce()")
    library = Frame("/usr/lib/python3/dist-packages/horovod/ops.py", 5, "synchronize")
    found = rank_condition([frame_in(script, "branch"), inner, library])
    assert found.text == "if hvd.rank() == 0:"


def test_a_function_of_rank_zero_only_is_one(script):
    decorator = Frame("/somewhere/hvdsync/comm/verbs.py", 7, "on_rank_zero")
    stack = [frame_in(script, "plain"), decorator, frame_in(script, "plain")]
    found = rank_condition(stack)
    assert found.text == "rank_zero_only: reduce()"
    assert (found.file, found.line) == (stack[0].file, stack[0].line)


def test_a_source_that_is_gone_or_no_python_has_none(tmp_path):
    path = tmp_path / "template.py"
    path.write_text(textwrap.dedent("{% if rank() %}"))
    assert rank_condition([Frame(str(path), 1, "f"), Frame("<string>", 1, "g")]) is None
