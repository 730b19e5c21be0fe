"""The pairs of docs/migration.md: what one had and what one writes give the same losses, weights, names and scale."""

import re

import numpy as np
import pytest
from conftest import MODES, nightly
from support.in_mode import in_mode
from support.python_process import ROOT, check_python, import_code
from support.reference import DynamicRule

pytestmark = pytest.mark.slow


@pytest.fixture(params=["graph", *nightly("pynative")])
def mode(request):
    with in_mode(MODES[request.param]):
        yield request.param


PAGE = (ROOT / "docs" / "migration.md").read_text()
BLOCK = re.compile(r"```python\n# (Set-up|Before: not on CPU|Before|After)\n(.*?)```", re.S)

# Of the fifth batch: what makes its gradients infinite under the scale, and leaves its loss finite.
OVERFLOW = 1e18
FLOAT16_OVERFLOW = 1e3

# Two ways to the same norm; each of the few operations rounds to 2**-24 = 6e-8.
CLIPPED = 1e-6

STOCK_CELL_ON_CPU = """
class StockCellOnCpu(nn.TrainOneStepWithLossScaleCell):
    # Another overflow check in the place of the one for which CPU has no kernel; the rest is MindSpore's.
    def get_overflow_status(self, status, compute_output):
        return ops.logical_not(amp.all_finite(compute_output))
"""
DEFINE_STOCK_CELL_ON_CPU = ("losses = []\n", f"losses = []\n{STOCK_CELL_ON_CPU}")


def read_sections():
    """From each heading to its snippets, by kind. The first set-up is that of all, with the heading `None`."""
    found = {}
    for part in re.split(r"^(?=##)", PAGE, flags=re.M):
        if BLOCK.search(part):
            found[part.partition("\n")[0].lstrip("# ") if found else None] = dict(BLOCK.findall(part))
    return found


SECTIONS = read_sections()


def run(folder, heading, kind, set_up_of=None, replace=(), overflow=None):
    """
    Runs a snippet after its set-ups, as a module of its own.

    Args:
        set_up_of (str): The section that holds a further set-up, if it is another one.
        replace (tuple): The pairs of what to replace in the code and by what.
        overflow (float): By how much to multiply the fifth batch.

    Returns:
        The module.
    """
    code = SECTIONS[None]["Set-up"]
    if overflow is not None:
        code += f"batches[4] = (batches[4][0] * np.float32({overflow}), batches[4][1])\n"
    code += SECTIONS[set_up_of or heading].get("Set-up", "") + SECTIONS[heading][kind]
    for old, new in replace:
        assert old in code
        code = code.replace(old, new)
    return import_code(folder, code)


def run_on_cpu(folder, heading, replace=(), **keywords):
    """Runs what is marked "not on CPU": as it is it is refused, with MindSpore's cell that checks otherwise it runs."""
    kind = "Before: not on CPU"
    with pytest.raises(RuntimeError, match="NPUGetFloatStatusV2"):
        run(folder, heading, kind, **keywords)
    stock = ("nn.TrainOneStepWithLossScaleCell", "StockCellOnCpu")
    return run(folder, heading, kind, replace=[stock, DEFINE_STOCK_CELL_ON_CPU, *replace], **keywords)


def trained(module):
    """The trained weights, by name."""
    networks = [getattr(module, name) for name in ("generator", "discriminator") if hasattr(module, name)]
    networks = networks or [module.net]
    return {p.name: p.asnumpy() for network in networks for p in network.trainable_params()}


def assert_same(before, after, tolerance=0.0):
    """Asserts equal losses and weights of the same names; bit for bit, unless there is a relative tolerance."""
    np.testing.assert_allclose(np.float32(after.losses), np.float32(before.losses), rtol=tolerance)
    assert_same_weights(before, after, tolerance)


def assert_same_weights(before, after, tolerance=0.0):
    expected, actual = trained(before), trained(after)
    assert actual.keys() == expected.keys()
    for name, weight in actual.items():
        np.testing.assert_allclose(weight, expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


def printed_losses(capsys):
    """What LossMonitor has printed."""
    return np.float32(re.findall(r"loss is (\S+)", capsys.readouterr().out))


def assert_one_skip_and_the_same_scale(before, after):
    assert float(after.cell.scale_sense) == float(before.cell.scale_sense)
    assert after.cell.counters()["skipped_steps"] == 1


def test_a_dynamic_scale(mode, tmp_path):
    heading = "TrainOneStepWithLossScaleCell, a dynamic scale"
    before = run_on_cpu(tmp_path, heading, overflow=OVERFLOW)
    after = run(tmp_path, heading, "After", overflow=OVERFLOW)
    assert_same(before, after)
    assert_one_skip_and_the_same_scale(before, after)
    # The scale grows in the third step, falls in the fifth, which overflows, and grows in the eighth.
    assert float(after.loss_scale) == 2.0**16
    assert float(before.loss_scale) == 2.0**17 == after.cell.get_loss_scale()


def test_a_fixed_scale(mode, tmp_path):
    heading = "TrainOneStepWithLossScaleCell, a fixed scale"
    before = run_on_cpu(tmp_path, heading, overflow=OVERFLOW)
    after = run(tmp_path, heading, "After", overflow=OVERFLOW)
    assert_same(before, after)
    assert_one_skip_and_the_same_scale(before, after)
    assert after.cell.get_loss_scale() == 1024.0


def float16_on_cpu(folder):
    """MindSpore's cell around what its build_train_network makes of the network, with a check that CPU has."""
    stock = 'amp.build_train_network(net, optimizer, loss_fn, level="O2", loss_scale_manager=manager)'
    converted = f"{stock.replace('=manager', '=None')}.network"
    on_cpu = f"StockCellOnCpu({converted}, optimizer, manager.get_update_cell()).set_train()"
    replace = [(stock, on_cpu), DEFINE_STOCK_CELL_ON_CPU]
    heading = "amp.build_train_network"
    return run(folder, heading, "Before: not on CPU", replace=replace, overflow=FLOAT16_OVERFLOW)


def test_model_with_a_loss_scale_manager(mode, tmp_path, capsys):
    heading = "Model with a loss_scale_manager"
    with pytest.raises(ValueError, match="are supported on device `CPU`"):
        run(tmp_path, heading, "Before: not on CPU")
    before = float16_on_cpu(tmp_path)
    capsys.readouterr()
    after = run(tmp_path, heading, "After", overflow=FLOAT16_OVERFLOW)
    np.testing.assert_array_equal(printed_losses(capsys), np.float32(before.losses))
    assert_same_weights(before, after)
    assert_one_skip_and_the_same_scale(before, after)
    inputs = after.Tensor(after.batches[0][0])
    np.testing.assert_array_equal(after.predicted.asnumpy(), after.net(inputs).asnumpy())
    with pytest.raises(RuntimeError, match=r"Model\(network\)\.predict\(x\)"):
        after.model.predict(inputs)
    assert np.isfinite(after.metrics["loss"])


def test_build_train_network(mode, tmp_path):
    heading = "amp.build_train_network"
    with pytest.raises(ValueError, match="are supported on device `CPU`"):
        run(tmp_path, heading, "Before: not on CPU")
    before = float16_on_cpu(tmp_path)
    after = run(tmp_path, heading, "After", overflow=FLOAT16_OVERFLOW)
    assert_same(before, after)
    assert_one_skip_and_the_same_scale(before, after)


def test_the_cell_of_the_tutorial(mode, tmp_path):
    heading = "The tutorial's CustomTrainOneStepCell"
    before, after = (run(tmp_path, heading, kind) for kind in ("Before", "After"))
    assert len(after.losses) == 8
    assert_same(before, after)


def test_an_optimizer_that_divides_by_the_scale(mode, tmp_path, capsys):
    heading = "An optimizer that divides by the scale"
    modules, losses = [], []
    for kind in ("Before", "After"):
        modules.append(run(tmp_path, heading, kind))
        losses.append(printed_losses(capsys))
    assert len(losses[0]) == 8
    np.testing.assert_array_equal(*losses)
    assert_same_weights(*modules)


@pytest.mark.parametrize("heading", ["A hand-written loop", "A hand-written loop that stays"])
def test_a_hand_written_loop(mode, tmp_path, heading):
    before = run(tmp_path, "A hand-written loop", "Before", overflow=OVERFLOW)
    after = run(tmp_path, heading, "After", overflow=OVERFLOW)
    assert_same(before, after)
    loss_scale = after.scaler if hasattr(after, "scaler") else after.cell
    assert loss_scale.get_loss_scale() == float(before.scaler.scale_value) == 2.0**17


@pytest.mark.parametrize("name", ["PYNATIVE_MODE", *nightly("GRAPH_MODE")])
def test_boost(tmp_path, name):
    """In processes of their own, since `AutoBoost` is one object for the whole process."""
    printed = []
    for kind in ("Before", "After"):
        script = tmp_path / f"{kind}.py"
        context = f"mindspore.set_context(mode=mindspore.{name})\n"
        show = "print([(p.name, p.asnumpy().tobytes()) for p in net.trainable_params()])\n"
        script.write_text(SECTIONS[None]["Set-up"] + context + SECTIONS["boost"][kind] + show)
        output = check_python(script, cwd=tmp_path)
        printed.append((np.float32(re.findall(r"loss is (\S+)", output)).tolist(), output.splitlines()[-1]))
    assert len(printed[0][0]) == 8
    assert "multiplier" in printed[0][1]  # What boost has made of the last layer.
    assert printed[0] == printed[1]


def test_cells_that_accumulate(mode, tmp_path):
    heading = "Cells that accumulate"
    before = run_on_cpu(tmp_path, heading, overflow=OVERFLOW)
    after = run(tmp_path, heading, "After", overflow=OVERFLOW)
    assert_same(before, after, CLIPPED)
    assert_one_skip_and_the_same_scale(before, after)
    assert after.cell.counters()["applied_steps"] == 3


def test_mindformers(mode, tmp_path):
    """Against the accumulating cell with cycles of one call, which unscales, checks, clips and updates like theirs."""
    one_call = ("accumulation_steps=2", "accumulation_steps=1")
    before = run_on_cpu(tmp_path, "Cells that accumulate", replace=[one_call], overflow=OVERFLOW)
    after = run(tmp_path, "MindFormers", "After", overflow=OVERFLOW)
    assert_same(before, after, CLIPPED)
    assert_one_skip_and_the_same_scale(before, after)
    assert float(after.learning_rate) == np.float32(0.05)
    assert 0 < after.global_norm < np.inf


def test_loss_per_token(mode, tmp_path):
    """Each call's loss is divided, or the sum of the gradients, which rounds differently."""
    before, after = (run(tmp_path, "Loss per token", kind) for kind in ("Before", "After"))
    assert_same_weights(before, after, CLIPPED)
    assert after.cell.counters()["applied_steps"] == 4


def test_zero_of_mindone(mode, tmp_path):
    """On one rank, against the same cell: what several ranks do, `test_sharded_optimizer.py` compares."""
    one_call = ("accumulation_steps=2", "accumulation_steps=1")
    before = run_on_cpu(tmp_path, "Cells that accumulate", replace=[one_call], overflow=OVERFLOW)
    after = run(tmp_path, "mindone's ZeRO", "After", overflow=OVERFLOW)
    assert_same(before, after, CLIPPED)
    assert_one_skip_and_the_same_scale(before, after)


def test_a_network_that_returns_several_losses(mode, tmp_path):
    heading = "A network that returns several losses"
    before = run(tmp_path, heading, "Before")
    after = run(tmp_path, heading, "After")
    assert_same(before, after)


def test_a_gan_with_one_cell_for_each_network(mode, tmp_path):
    heading = "A GAN: one cell for each network"
    before = run(tmp_path, heading, "Before", set_up_of="A GAN")
    after = run(tmp_path, heading, "After", set_up_of="A GAN")
    assert np.shape(after.losses) == (8, 2)
    assert_same(before, after)


def test_a_gan_with_one_cell_with_two_optimizers(mode, tmp_path):
    heading = "A GAN: one cell with two optimizers"
    before = run(tmp_path, heading, "Before", set_up_of="A GAN")
    after = run(tmp_path, heading, "After", set_up_of="A GAN")
    assert {name.partition(".")[0] for name in trained(before)} == {"d_optimizer", "g_optimizer"}
    for parameter in before.cell.trainable_params():
        parameter.name = re.sub("^[dg]_optimizer.", "", parameter.name)
    assert np.shape(after.losses) == (8, 2)
    assert_same(before, after)


def test_a_gan_whose_loss_cell_returns_more(mode, tmp_path):
    heading = "A GAN: loss cells with several outputs"
    snippets = SECTIONS["A GAN"]["Set-up"] + SECTIONS[heading]["Set-up"]
    define = [(SECTIONS[heading]["Set-up"], snippets)]
    before = run(tmp_path, heading, "Before", replace=define)
    after = run(tmp_path, heading, "After", replace=define)
    assert_same(before, after)
    assert np.shape(after.pool)[0] == 8
    np.testing.assert_array_equal(after.pool, before.pool)


def dense_gradients(weights, x, y, loss_scale):
    """The loss of the page's network, and its gradients under a loss scale, in float32."""
    first, first_bias, second, second_bias = weights
    hidden = np.maximum(x @ first.T + first_bias, 0)
    errors = hidden @ second.T + second_bias - y
    with np.errstate(over="ignore", invalid="ignore"):
        of_output = np.float32(loss_scale) * errors * np.float32(2 / errors.size)
        of_hidden = of_output @ second * (hidden > 0)
        grads = [of_hidden.T @ x, of_hidden.sum(0), of_output.T @ hidden, of_output.sum(0)]
    return np.mean(errors**2), grads


def grad_scaler_loop(weights, batches):
    """PyTorch's loop in NumPy, under Momentum: the losses, the weights and the scale in the end."""
    rule, losses = DynamicRule(2.0**16, 2000), []
    velocities = [np.zeros_like(weight) for weight in weights]
    for x, y in batches:
        loss, grads = dense_gradients(weights, x, y, rule.scale)
        losses.append(loss)
        grads = [grad / np.float32(rule.scale) for grad in grads]
        overflow = not all(np.isfinite(grad).all() for grad in grads)
        if not overflow:
            norm = np.sqrt(sum(np.square(grad).sum() for grad in grads))
            factor = min(1, 1 / norm)
            velocities = [np.float32(0.9) * velocity + grad * factor for velocity, grad in zip(velocities, grads)]
            weights = [weight - np.float32(0.05) * velocity for weight, velocity in zip(weights, velocities)]
        rule.step(overflow)
    return losses, weights, rule.scale


def test_grad_scaler(mode, tmp_path):
    set_up = import_code(tmp_path, SECTIONS[None]["Set-up"])
    after = run(tmp_path, "PyTorch's GradScaler", "After", overflow=OVERFLOW)
    losses, weights, loss_scale = grad_scaler_loop(list(trained(set_up).values()), after.batches)
    np.testing.assert_allclose(after.losses, losses, rtol=1e-5)
    for weight, expected in zip(trained(after).values(), weights):
        np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-5)
    assert after.cell.get_loss_scale() == loss_scale == 2.0**15


def test_an_earlier_checkpoint(mode, tmp_path):
    before = run_on_cpu(tmp_path, "Earlier checkpoints", overflow=OVERFLOW)
    for x, y in before.dataset:
        before.losses.append(float(before.cell(x, y)[0]))
    after = run(tmp_path, "Earlier checkpoints", "After", overflow=OVERFLOW)
    assert_same(before, after)
    assert after.cell.get_loss_scale() == float(before.cell.scale_sense) == 2.0**14
    assert all(name.startswith(("loss_scale.", "step_counters.")) for name in after.missing)
    assert sorted(after.unexpected) == ["current_iterator_step", "last_overflow_iterator_step", "scale_sense"]


def test_an_earlier_checkpoint_of_a_gan(mode, tmp_path):
    heading = "Earlier checkpoints of a GAN"
    before = run(tmp_path, heading, "Before", set_up_of="A GAN")
    for real, noise in before.dataset:
        before.losses.append((float(before.d_step(real, noise)), float(before.g_step(noise))))
    after = run(tmp_path, heading, "After", set_up_of="A GAN")
    assert_same(before, after)
    assert not after.unexpected
    assert not any(name.startswith("optimizer_") for name in after.missing)


def anchor(heading):
    """The anchor that GitHub and MkDocs give to a heading."""
    return re.sub(r"[^\w -]", "", heading.strip("# ").lower()).replace(" ", "-")


def test_the_table_leads_to_every_section():
    anchors = {anchor(line) for line in re.findall(r"^##+ .*", PAGE, flags=re.M)}
    linked = re.findall(r"^\|.*\]\(#(.*?)\)", PAGE, flags=re.M)
    assert set(linked) <= anchors
    assert len(linked) >= 13


def test_every_pair_is_compared():
    """A pair that is added to the page needs a test of its own above."""
    assert sum("After" in snippets for snippets in SECTIONS.values()) == 20
