"""What MindSpore's errors mean is said; networks' own stay as they are."""

from pathlib import Path

from support.python_process import check_python

TESTS = Path(__file__).parent / "support" / "failing_compilations.py"


def test_in_a_process_of_its_own(tmp_path):
    check_python("-m", "pytest", "-n", "0", str(TESTS), cwd=tmp_path)
