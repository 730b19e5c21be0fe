"""The Python code in docs/ runs and prints what the page says, and the README's runs."""

import ast
import re

import mindspore
import numpy as np
import pytest
from support.in_mode import in_mode
from support.python_process import ROOT, check_python, import_code

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"```python\n((?:(?!```).)*)```\n\n((?:    [^\n]*\n)+)", re.S)
PROGRAMS = [
    (page, *match) for page in sorted((ROOT / "docs").glob("*.md")) for match in BLOCK.findall(page.read_text())
]


@pytest.mark.parametrize("page, program, output", PROGRAMS, ids=[page.stem for page, _, _ in PROGRAMS])
def test_program_prints_what_the_page_says(page, program, output, tmp_path, capsys):
    # Some pages set another mode.
    with in_mode(mindspore.get_context("mode")):
        import_code(tmp_path, program)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [line.strip() for line in output.splitlines()]


def test_there_are_programs():
    assert {"gan_training", "hand_written_gan", "skipped_step", "step"} <= {page.stem for page, _, _ in PROGRAMS}


HAND_WRITTEN_STEP = """
class HandWrittenStep:
    def __init__(self, network, optimizer, loss_scale, has_aux=False):
        self.network, self.optimizer, self.has_aux = network, optimizer, has_aux
        self.gradient = ops.value_and_grad(network, None, optimizer.parameters, has_aux=has_aux)

    def set_train(self):
        self.network.set_train()
        return self

    def __call__(self, *inputs):
        outputs, grads = self.gradient(*inputs)
        self.optimizer(grads)
        return (outputs[0], None, None, outputs[1:]) if self.has_aux else (outputs, None, None)


mindspore.set_seed(0)
"""


def test_a_cell_for_each_network_is_bit_for_bit_what_one_writes_by_hand(mode, tmp_path):
    (program,) = (program for page, program, _ in PROGRAMS if page.stem == "gan_training")
    by_hand = program.replace("mindspore.set_seed(0)\n", HAND_WRITTEN_STEP).partition("print(")[0]
    assert by_hand.count("= ScaledTrainOneStepCell(") == 2
    by_hand = by_hand.replace("= ScaledTrainOneStepCell(", "= HandWrittenStep(")
    modules = [import_code(tmp_path, code) for code in (program, by_hand)]
    values, expected = (
        [*module.losses, *module.generator.trainable_params(), *module.discriminator.trainable_params()]
        for module in modules
    )
    assert len(values) == len(expected) == 30 + 8
    for value, its_expected in zip(values, expected):
        assert value.asnumpy().tobytes() == its_expected.asnumpy().tobytes()


README = (ROOT / "README.md").read_text()
LOSS = re.compile(r"loss (\d\S*),")


def test_the_readme_prints_what_it_says_and_its_differences_run(tmp_path):
    ((program, output),) = BLOCK.findall(README)
    cell, loop = re.findall(r"```diff\n(.*?)```", README, re.S)
    imports = "from ms_lossscale import ManualStep\nnp.random.seed(0)\n"
    ends = [
        "print(float(loss), cell.counters())\n",
        "print(float(loss), step.counters())\n",
        "print(float(loss), bool(finite))\n",
    ]
    code = [side_of(cell, "+"), ends[0], side_of(loop, "+"), ends[1], side_of(loop, "-"), ends[2]]
    script = tmp_path / "program.py"
    script.write_text("".join([program, imports, *code]))
    printed = check_python(script, cwd=tmp_path).splitlines()
    expected = [line.strip() for line in output.splitlines()]
    assert [LOSS.sub("", line) for line in printed[:-3]] == [LOSS.sub("", line) for line in expected]
    # In float16, MindSpore's versions round otherwise.
    losses, its_losses = ([float(value) for value in LOSS.findall("\n".join(lines))] for lines in (printed, expected))
    np.testing.assert_allclose(losses, its_losses, rtol=3e-3)
    assert len(losses) == 4
    for line in printed[-3:-1]:
        loss, _, counters = line.partition(" ")
        assert float(loss) < 0.1
        assert ast.literal_eval(counters)["applied_steps"] == 16
    assert printed[-1].endswith("True")
    assert len(README.split()) <= 900


def side_of(difference, sign):
    """The code before (-) or after (+) a difference."""
    lines = (line for line in difference.splitlines() if line[:1] in ("", " ", sign))
    return "".join(f"{line[1:]}\n" for line in lines)


def test_what_the_readme_replaces_is_what_mindspore_refuses_on_cpu(tmp_path):
    (program, _), cell = BLOCK.findall(README)[0], re.search(r"```diff\n(.*?)```", README, re.S)[1]
    program = program.replace("train(10,", "train(1,")
    with pytest.raises(RuntimeError, match="NPUGetFloatStatusV2"):
        import_code(tmp_path, program + side_of(cell, "-"))
