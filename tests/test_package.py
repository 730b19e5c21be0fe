"""The package: its public names, and what importing it costs."""

import ast
from types import ModuleType

from support.python_process import check_python

import ms_lossscale

# Written down here and not taken from the package, which could have lost one.
CLASSES_AND_FUNCTIONS = {
    "ActivationReport",
    "AlternatingTrainOneStepCell",
    "DynamicLossScale",
    "FiniteGradients",
    "FixedLossScale",
    "FloatStatusRegister",
    "FlushAccumulation",
    "GradientReport",
    "InputGradient",
    "LossScale",
    "LossScaleMonitor",
    "OverflowDetector",
    "OverflowTrace",
    "ScaledTrainOneStepCell",
    "ScheduledLossScale",
    "SimultaneousTrainOneStepCell",
    "all_finite",
    "build_train_network",
    "locate_overflow",
    "plot_scale",
    "profile_activations",
    "profile_gradients",
    "suggest_schedule",
}


def test_its_public_names():
    public = {name: value for name, value in vars(ms_lossscale).items() if not name.startswith("_")}
    assert {name for name, value in public.items() if not isinstance(value, ModuleType)} == CLASSES_AND_FUNCTIONS
    for name in CLASSES_AND_FUNCTIONS:
        assert public[name].__doc__, name
        assert public[name].__module__.startswith("ms_lossscale.")


def test_its_public_module():
    for name in ("Register", "Saturate", "saturate", "saturation_mode"):
        assert getattr(ms_lossscale.emulation, name).__doc__, name


def test_importing_it_imports_nothing_of_the_examples(tmp_path):
    # Beyond what MindSpore imports, which may be some of it.
    program = (
        "import sys, mindspore; before = set(sys.modules); import ms_lossscale; "
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    imported = ast.literal_eval(check_python("-c", program, cwd=tmp_path).splitlines()[-1])
    assert "ms_lossscale" in imported
    assert not {"matplotlib", "mlxtend", "tqdm", "tensorboardX", "hypothesis", "pytest"} & set(imported)
