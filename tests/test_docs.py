"""The Python code in docs/ runs and prints what the page says, and the README's runs."""

import re

import mindspore
import pytest
from support.in_mode import in_mode
from support.python_process import ROOT, check_python, import_code

pytestmark = pytest.mark.long

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
    assert {"gan_training", "migration", "step"} <= {page.stem for page, _, _ in PROGRAMS}


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


def test_the_code_of_the_readme_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) >= 2
    script = tmp_path / "program.py"
    # Each goes on where the one before it has ended.
    script.write_text("\n".join(blocks))
    printed = check_python(script, cwd=tmp_path)
    assert len(re.findall(r"loss is \d", printed)) == 5 * 8
    assert {"gradients.png", "scale.csv"} <= {path.name for path in tmp_path.iterdir()}
