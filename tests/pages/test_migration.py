"""The pairs of docs/migration.md: what one had and what one writes give the same losses, weights, names and scale."""

import re

import numpy as np
import pytest
from conftest import MODES, nightly
from support.in_mode import in_mode
from support.python_process import ROOT, import_code

pytestmark = pytest.mark.slow


@pytest.fixture(params=["graph", *nightly("pynative")])
def mode(request):
    with in_mode(MODES[request.param]):
        yield request.param


PAGE = (ROOT / "docs" / "migration.md").read_text()
BLOCK = re.compile(r"```python\n# (Set-up|Before: not on CPU|Before|After)\n(.*?)```", re.S)
SECTIONS = {
    part.partition("\n")[0].lstrip("# "): dict(BLOCK.findall(part)) for part in re.split(r"^(?=##)", PAGE, flags=re.M)
}
SET_UP = next(iter(SECTIONS.values()))["Set-up"]
PAIRS = [heading for heading, snippets in SECTIONS.items() if "After" in snippets]

# By which number the fifth batch is multiplied: its gradients become infinite under the scale, its loss stays finite.
OVERFLOW = 1e18
OVERFLOW_IN_FLOAT16 = 1e3
# Two ways to the same norm; each of the few operations rounds to 2**-24 = 6e-8.
CLIPPED = dict.fromkeys(
    ("Cells that accumulate", "MindFormers", "Loss per token", "mindone's ZeRO", "PyTorch's GradScaler"), 1e-6
)

# For what MindSpore lacks on CPU, its own code around a check that CPU has: what to replace, and by what.
ON_CPU = [
    (
        "losses = []\n",
        """losses = []


class StockCellOnCpu(nn.TrainOneStepWithLossScaleCell):
    def get_overflow_status(self, status, compute_output):
        return ops.logical_not(amp.all_finite(compute_output))


""",
    ),
    ("nn.TrainOneStepWithLossScaleCell(network", "StockCellOnCpu(network"),
    ("Cell(nn.TrainOneStepWithLossScaleCell)", "Cell(StockCellOnCpu)"),
    (
        'amp.build_train_network(net, optimizer, loss_fn, level="O2", loss_scale_manager=manager)',
        'StockCellOnCpu(amp.build_train_network(net, optimizer, loss_fn, level="O2", loss_scale_manager=None).network, '
        "optimizer, manager.get_update_cell()).set_train()",
    ),
]
# Where the page has no code that runs before: that of which section does, and what to replace in it.
ONE_CALL = ("Cells that accumulate", [("accumulation_steps=2", "accumulation_steps=1")])
CLIPPED_LOOP = [("unscale(grads)\n", "unscale(grads)\n    grads = ops.clip_by_global_norm(grads, 1.0)\n")]
BEFORE = {
    "Model with a loss_scale_manager": ("amp.build_train_network", []),
    "A hand-written loop that stays": ("A hand-written loop", []),
    "MindFormers": ONE_CALL,
    "mindone's ZeRO": ONE_CALL,
    "PyTorch's GradScaler": ("A hand-written loop", [*CLIPPED_LOOP, ("scale_window=3", "scale_window=2000")]),
}
# After these checkpoints were saved, training went on.
GOES_ON = {
    "Earlier checkpoints": "for x, y in dataset:\n    losses.append(float(cell(x, y)[0]))\n",
    "Earlier checkpoints of a GAN": "for x, y in dataset:\n    losses.append((d_step(x, y), g_step(y)))\n",
}


def skips(heading):
    """Whether what one had can skip a step."""
    source, _ = BEFORE.get(heading, (heading, []))
    return "Before: not on CPU" in SECTIONS[source] or source == "A hand-written loop"


def code_of(heading, snippet):
    """The code of a section after its set-ups; the fifth batch overflows where a step can be skipped."""
    factor = 1 if not skips(heading) else OVERFLOW_IN_FLOAT16 if 'level="O2"' in snippet else OVERFLOW
    overflows = f"batches[4] = (batches[4][0] * np.float32({factor}), batches[4][1])\n"
    of_gan = SECTIONS["A GAN"]["Set-up"] if "GAN" in heading else ""
    return SET_UP + overflows + of_gan + SECTIONS[heading].get("Set-up", "") + snippet


def before(folder, heading):
    """Runs what one had, as a module."""
    source, replace = BEFORE.get(heading, (heading, []))
    snippets = SECTIONS[source]
    code = code_of(source, snippets.get("Before") or snippets["Before: not on CPU"])
    if "Before: not on CPU" in SECTIONS[heading]:
        with pytest.raises((RuntimeError, ValueError), match=r"NPUGetFloatStatusV2|are supported on device `CPU`"):
            import_code(folder, code_of(heading, SECTIONS[heading]["Before: not on CPU"]))
    assert all(old in code for old, _ in replace)
    for old, new in [*replace, *(ON_CPU if "Before: not on CPU" in snippets else [])]:
        code = code.replace(old, new)
    return import_code(folder, code + GOES_ON.get(heading, ""))


def losses_of(module, capsys):
    """Those that it kept, or those that MindSpore's LossMonitor printed."""
    return np.float32(module.losses or re.findall(r"loss is (\S+)", capsys.readouterr().out))


def trained(module):
    """The trained weights, by name."""
    networks = [module.generator, module.discriminator] if hasattr(module, "generator") else [module.net]
    # One cell with two optimizers named the weights after them.
    return {
        re.sub("^[dg]_optimizer.", "", p.name): p.asnumpy() for network in networks for p in network.trainable_params()
    }


@pytest.mark.parametrize("heading", PAIRS)
def test_what_one_writes_does_what_one_had(heading, mode, tmp_path, capsys):
    had = before(tmp_path, heading)
    losses_had = losses_of(had, capsys)
    written = import_code(tmp_path, code_of(heading, SECTIONS[heading]["After"]))
    losses, tolerance = losses_of(written, capsys), CLIPPED.get(heading, 0)
    if losses.size:
        np.testing.assert_allclose(losses, losses_had, rtol=tolerance)
    assert len(losses) == 8 or heading == "Loss per token"
    expected, weights = trained(had), trained(written)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, expected[name], rtol=tolerance, atol=tolerance, err_msg=name)
    if hasattr(had, "pool"):
        np.testing.assert_array_equal(written.pool, had.pool)
    if not skips(heading):
        return
    # The fifth step was skipped, and both moved the scale for it, and for the others.
    scale = had.scaler.scale_value if hasattr(had, "scaler") else had.cell.scale_sense
    assert (written.scaler if hasattr(written, "scaler") else written.cell).get_loss_scale() == float(scale)
    if hasattr(written, "cell"):
        assert written.cell.counters()["skipped_steps"] == 1


def test_the_exceptions_above_are_sections_of_the_page():
    assert {*CLIPPED, *BEFORE, *GOES_ON} <= set(PAIRS)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in SECTIONS}
    assert set(re.findall(r"^\|.*\]\(#(.*?)\)", PAGE, flags=re.M)) <= anchors
