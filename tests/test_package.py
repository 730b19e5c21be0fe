"""The package: its public names, and what importing it costs."""

import ast

from support.python_process import check_python

import ms_lossscale


def test_its_public_names():
    names = {
        "ActivationReport",
        "DynamicLossScale",
        "FiniteGradients",
        "FixedLossScale",
        "FloatStatusRegister",
        "GradientReport",
        "LossScaleMonitor",
        "OverflowDetector",
        "OverflowTrace",
        "ScaledTrainOneStepCell",
        "ScheduledLossScale",
        "all_finite",
        "build_train_network",
        "locate_overflow",
        "profile_activations",
        "profile_gradients",
        "suggest_schedule",
    }
    for name in names:
        assert getattr(ms_lossscale, name).__doc__, name
        assert getattr(ms_lossscale, name).__module__.startswith("ms_lossscale.")


def test_importing_it_imports_nothing_of_the_examples(tmp_path):
    # Beyond what MindSpore imports, which may be some of it.
    program = (
        "import sys, mindspore; before = set(sys.modules); import ms_lossscale; "
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    imported = ast.literal_eval(check_python("-c", program, cwd=tmp_path).splitlines()[-1])
    assert "ms_lossscale" in imported
    assert not {"matplotlib", "mlxtend", "tqdm", "hypothesis", "pytest"} & set(imported)
