"""The package: its public names, and what importing it costs."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import ms_lossscale


def test_its_public_names():
    names = {
        "DynamicLossScale",
        "FiniteGradients",
        "FixedLossScale",
        "FloatStatusRegister",
        "OverflowDetector",
        "ScaledTrainOneStepCell",
        "ScheduledLossScale",
        "all_finite",
        "build_train_network",
    }
    for name in names:
        assert getattr(ms_lossscale, name).__doc__, name
        assert getattr(ms_lossscale, name).__module__.startswith("ms_lossscale.")


def test_importing_it_imports_nothing_of_the_examples():
    # Beyond what MindSpore imports, which may be some of it.
    program = (
        "import sys, mindspore; before = set(sys.modules); import ms_lossscale; "
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    paths = [str(Path(ms_lossscale.__file__).parent.parent), *sys.path]
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
    )
    imported = ast.literal_eval(ran.stdout.splitlines()[-1])
    assert "ms_lossscale" in imported
    assert not {"matplotlib", "mlxtend", "tqdm", "hypothesis", "pytest"} & set(imported)
