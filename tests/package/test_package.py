"""The package: its public names and their type hints, and what importing it costs."""

import ast
import inspect
import re
import typing
from types import ModuleType

import mypy.api
import pytest
from support.python_process import ROOT, run_python

import ms_lossscale

NAMES = sorted(set(ms_lossscale.__all__) - {"emulation"})
# Each once, as the API reference lists them.
PAGES = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
LISTED = sorted(re.findall(r"^::: ms_lossscale\.(?:\w+\.)*(\w+)$", PAGES, re.M))
EMULATION = {"Register", "Saturate", "saturate", "saturation_mode"}


def test_its_public_names():
    public = {name: value for name, value in vars(ms_lossscale).items() if not name.startswith("_")}
    assert sorted(name for name, value in public.items() if not isinstance(value, ModuleType)) == NAMES
    assert [name for name in LISTED if name in ms_lossscale.__all__] == sorted(ms_lossscale.__all__)
    for name in NAMES:
        assert public[name].__doc__, name
        assert public[name].__module__.startswith("ms_lossscale.")
    assert all(getattr(ms_lossscale.emulation, name).__doc__ for name in EMULATION)


def test_importing_it_prints_nothing_and_imports_nothing_of_the_examples(tmp_path):
    """Beyond what MindSpore does; that may be some of it."""
    program = (
        "import sys, mindspore; before = set(sys.modules); print('imported', file=sys.stderr, flush=True); "
        "import ms_lossscale; print({name.split('.')[0] for name in set(sys.modules) - before})"
    )
    result = run_python("-c", program, cwd=tmp_path)
    imported = ast.literal_eval(result.stdout)
    assert (result.returncode, result.stderr.partition("imported\n")[2]) == (0, "")
    assert "ms_lossscale" in imported
    assert not {"matplotlib", "mlxtend", "tqdm", "tensorboardX", "hypothesis", "pytest"} & imported


def functions_of(value):
    """A function itself; of a class what its users call, be it inherited: constructor, methods and properties."""
    if inspect.isfunction(value):
        return [value]
    # What MindSpore's graph mode calls, users do not.
    names = [name for name in dir(value) if name == "__init__" or not name.startswith(("_", "construct"))]
    members = [inspect.getattr_static(value, name) for name in names]
    functions = [member.fget if isinstance(member, property) else member for member in members]
    return [each for each in functions if inspect.isfunction(each) and each.__module__.startswith("ms_lossscale.")]


def test_its_type_hints_are_complete():
    names = [(ms_lossscale, name) for name in NAMES]
    for module, name in [*names, *((ms_lossscale.emulation, name) for name in EMULATION)]:
        for function in functions_of(getattr(module, name)):
            expected = {*inspect.signature(function).parameters, "return"} - {"self"}
            assert typing.get_type_hints(function).keys() - {"self"} == expected, function.__qualname__


# What type checkers are to see; MindSpore has no type hints, so that a Tensor is Any.
TYPED = """
from mindspore import Tensor, nn
from ms_lossscale import *

network, optimizer, x = nn.Dense(1, 1), nn.SGD([]), Tensor(1.0)
plain = ScaledTrainOneStepCell(network, optimizer, DynamicLossScale(), clip_norm=1.0, has_aux=True)
loss, overflow, loss_scale, aux = plain(x)
SimultaneousTrainOneStepCell([network], [optimizer], max_retries=1, clip_norm=[None])
AlternatingTrainOneStepCell([network], [optimizer], every=(1,), has_aux=[True])
reveal_type(plain.get_loss_scale())  # float | list[float]
ScaledTrainOneStepCell(network, optimizer, klip_norm=1.0)  # error: Unexpected keyword argument "klip_norm"
step = ManualStep([network], optimizer, DynamicLossScale(), clip_norm=1.0)
reveal_type(step.begin(x, x))  # Any
reveal_type(step.end((x,), loss=x))  # Any
reveal_type(step.scale(x))  # Any
reveal_type(step.steps_made())  # int
step.end((x,), lost=x)  # error: Unexpected keyword argument "lost"
ManualStep(network, optimizer, max_retries=1)  # error: Unexpected keyword argument "max_retries"
def forward(x: Tensor) -> Tensor:
    return step.scale(x)
profile_gradients(forward, [x], parameters=step.parameters)
monitor = LossScaleMonitor()
with monitor.watching(step):
    reveal_type(monitor.after_step(x, step.end((x,)), inputs=(x, x)))  # None
monitor.after_step(*plain(x), batch=x)  # error: Unexpected keyword argument "batch"
"""


@pytest.mark.slow
def test_type_checkers_know_keywords_and_what_methods_return(tmp_path):
    path = tmp_path / "typed.py"
    path.write_text(TYPED)
    printed, errors, _ = mypy.api.run(["--config-file=", "--ignore-missing-imports", str(path)])
    assert not errors
    told = r"typed\.py:(\d+): (?:note: Revealed type is \"(.*)\"|(error: .*?)(?: for .*)?  \[.*)$"
    # The first for each line.
    found = {int(line): revealed or error for line, revealed, error in reversed(re.findall(told, printed, re.M))}
    lines = enumerate(TYPED.splitlines(), start=1)
    assert found == {number: line.partition("  # ")[2] for number, line in lines if "  # " in line}
