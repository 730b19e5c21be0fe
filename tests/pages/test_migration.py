"""The differences of docs/migration.md: both sides give the same losses, weights, names and scale."""

import re

import numpy as np
import pytest
from conftest import nightly
from support.differences import side_of
from support.python_process import ROOT, import_code

pytestmark = pytest.mark.slow
in_a_mode = pytest.mark.parametrize("mode", ["graph", *nightly("pynative")], indirect=True)
PAGE = (ROOT / "docs" / "migration.md").read_text().partition("\n## MindSpore's toolkits")[0]
SECTIONS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
DIFFERENCES = {
    heading: re.search("```diff\n(.*?)```", text, re.S)[1] for heading, text in SECTIONS.items() if "```diff" in text
}
MODEL, LOOP, GAN, TORCH = ("Model with a loss_scale_manager", "A hand-written loop", "A GAN", "Coming from PyTorch")
# What the page says in words: the scaler alone is replaced, and the check.
DIFFERENCES[LOOP] = """
-scaler = amp.DynamicLossScaler(2**16, scale_factor=2, scale_window=3)
+scaler = DynamicLossScale(2**16, scale_factor=2, scale_window=3)

 def forward(x, y):
     loss = loss_fn(net(x), y)
     return scaler.scale(loss), loss

 value_and_grad = mindspore.value_and_grad(forward, None, optimizer.parameters, has_aux=True)
 for x, y in dataset:
     (_, loss), grads = value_and_grad(x, y)
     grads = scaler.unscale(grads)
-    finite = amp.all_finite(grads)
+    finite = all_finite(grads)
     if finite:
         optimizer(grads)
     scaler.adjust(finite)
"""

SET_UP = """
import mindspore
import numpy as np
from mindspore import Model, Tensor, amp, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import LossMonitor
from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, ScaledTrainOneStepCell
from ms_lossscale import all_finite, build_train_network


class StockCellOnCpu(nn.TrainOneStepWithLossScaleCell):
    def get_overflow_status(self, status, compute_output):
        return ops.logical_not(amp.all_finite(compute_output))


class GeneratorLoss(nn.Cell):
    def __init__(self, generator, discriminator):
        super().__init__(auto_prefix=False)
        self.generator, self.discriminator = generator, discriminator

    def construct(self, noise):
        return ops.softplus(-self.discriminator(self.generator(noise))).mean()


class DiscriminatorLoss(GeneratorLoss):
    def construct(self, real, noise):
        fake = ops.stop_gradient(self.generator(noise))
        return (ops.softplus(-self.discriminator(real)) + ops.softplus(self.discriminator(fake))).mean()


def network_of(inputs, outputs):
    net = nn.SequentialCell(nn.Dense(inputs, 16), nn.ReLU(), nn.Dense(16, outputs))
    return net, nn.Momentum(net.trainable_params(), learning_rate=0.05, momentum=0.9)


mindspore.set_seed(0)
rng = np.random.default_rng(0)
batches = [(rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(8, 1)).astype(np.float32)) for _ in range(8)]
dataset = GeneratorDataset(batches, ["x", "y"], shuffle=False)
losses = []
"""
ONE = "net, optimizer = network_of(4, 1)\nloss_fn = nn.MSELoss()\n"
TWO = """
(generator, _), (discriminator, _) = network_of(1, 4), network_of(4, 1)
generator.update_parameters_name("generator.")
discriminator.update_parameters_name("discriminator.")
g_optimizer = nn.Momentum(generator.trainable_params(), learning_rate=0.05, momentum=0.9)
d_optimizer = nn.Momentum(discriminator.trainable_params(), learning_rate=0.05, momentum=0.9)
g_loss, d_loss = GeneratorLoss(generator, discriminator), DiscriminatorLoss(generator, discriminator)
"""
# The fifth batch times this has infinite gradients under the scale, and a finite loss.
OVERFLOWS = "batches[4] = (batches[4][0] * np.float32({}), batches[4][1])\n"
SET_UPS = {heading: OVERFLOWS.format(1e3 if heading == MODEL else 1e18) + ONE for heading in DIFFERENCES}
SET_UPS[GAN] = TWO
# What keeps the losses, at the end of the loop; Model's are printed.
KEEP = dict.fromkeys(DIFFERENCES, "    losses.append(float(loss))\n")
KEEP[MODEL] = "model.eval(dataset, dataset_sink_mode=False)\nModel(net).predict(Tensor(batches[0][0]))\n"
KEEP[GAN] = "    losses.append([float(each) for each in each_loss])\n"
BEFORE = {heading: side_of(difference, "-") + KEEP[heading] for heading, difference in DIFFERENCES.items()}
REFUSED_ON_CPU = {heading: BEFORE[heading] for heading in ("TrainOneStepWithLossScaleCell", MODEL)}
# MindSpore's own code around a check that CPU has.
BEFORE["TrainOneStepWithLossScaleCell"] = BEFORE["TrainOneStepWithLossScaleCell"].replace(
    "nn.TrainOneStepWithLossScaleCell", "StockCellOnCpu"
)
BEFORE[MODEL] = """
manager = amp.DynamicLossScaleManager(init_loss_scale=2**10, scale_factor=2, scale_window=3)
network = amp.build_train_network(net, optimizer, loss_fn, level="O2", loss_scale_manager=None).network
cell = StockCellOnCpu(network, optimizer, manager.get_update_cell()).set_train()
for x, y in dataset:
    losses.append(float(cell(x, y)[0]))
"""
CLIPPED = "unscale(grads)\n    grads = ops.clip_by_global_norm(grads, 1.0)\n"
BEFORE[TORCH] = BEFORE[LOOP].replace("unscale(grads)\n", CLIPPED).replace("scale_window=3", "scale_window=2000")


def run(folder, heading, code):
    return import_code(folder, SET_UP + SET_UPS[heading] + code)


def losses_of(module, capsys):  # Those that it kept, or those that MindSpore's LossMonitor printed.
    return np.float32(module.losses or re.findall(r"loss is (\S+)", capsys.readouterr().out))


def assert_weights_agree(written, had, tolerance=0):
    for name in ("net", "generator", "discriminator"):
        if hasattr(had, name):
            pairs = list(zip(*(getattr(module, name).trainable_params() for module in (written, had))))
            assert len(pairs) == 4
            for weight, expected in pairs:
                assert weight.name == expected.name
                its, its_expected = weight.asnumpy(), expected.asnumpy()
                np.testing.assert_allclose(its, its_expected, rtol=tolerance, atol=tolerance, err_msg=name)


@in_a_mode
@pytest.mark.parametrize("heading", DIFFERENCES)
def test_what_one_writes_does_what_one_had(mode, heading, tmp_path, capsys):
    if heading in REFUSED_ON_CPU:
        with pytest.raises((RuntimeError, ValueError), match=r"NPUGetFloatStatusV2|are supported on device `CPU`"):
            run(tmp_path, heading, REFUSED_ON_CPU[heading])
    had = run(tmp_path, heading, BEFORE[heading])
    losses_had = losses_of(had, capsys)
    written = run(tmp_path, heading, side_of(DIFFERENCES[heading], "+") + KEEP[heading])
    # Two ways to the same norm; each of the few operations rounds to 2**-24 = 6e-8.
    tolerance = 1e-6 if heading == TORCH else 0
    losses = losses_of(written, capsys)
    np.testing.assert_allclose(losses, losses_had, rtol=tolerance)
    assert len(losses) == 8
    assert_weights_agree(written, had, tolerance)
    if heading == GAN:
        return
    # The fifth step was skipped, and both moved the scale for it, and for the others.
    scale = had.scaler.scale_value if hasattr(had, "scaler") else had.cell.scale_sense
    assert (written.scaler if hasattr(written, "scaler") else written.cell).get_loss_scale() == float(scale)
    if hasattr(written, "cell"):
        assert written.cell.counters()["skipped_steps"] == 1


OF_ONE, OF_GAN = re.findall("```py\n(.*?)```", SECTIONS["Earlier checkpoints"], re.S)
(ALTERNATING,) = re.findall(r"cell = Alt.*?\)\.set_train\(\)\n", side_of(DIFFERENCES[GAN], "+"), re.S)
STOCK = """manager = nn.DynamicLossScaleUpdateCell(2**16, 2, 2000)
cell = StockCellOnCpu(nn.WithLossCell(net, loss_fn), optimizer, manager).set_train()
"""
OURS = "cell = ScaledTrainOneStepCell(nn.WithLossCell(net, loss_fn), optimizer, DynamicLossScale()).set_train()\n"
SAVE = 'mindspore.save_checkpoint(cell, "earlier.ckpt")\n'
TRAIN = "for x, y in dataset:\n    losses.append(float(cell(x, y)[0]))\n"
STEPS = """d_step = nn.TrainOneStepCell(d_loss, d_optimizer).set_train()
g_step = nn.TrainOneStepCell(g_loss, g_optimizer).set_train()
"""
TRAIN_TWO = "for x, y in dataset:\n    losses.append([float(d_step(x, y)), float(g_step(y))])\n"
SAVE_TWO = 'mindspore.save_checkpoint(d_step, "d.ckpt")\nmindspore.save_checkpoint(g_step, "g.ckpt")\n'


HAD = {"one": ONE + STOCK + TRAIN + SAVE + TRAIN, "GAN": TWO + STEPS + TRAIN_TWO + SAVE_TWO + TRAIN_TWO}
WRITTEN = {
    "one": ONE + OURS + OF_ONE + TRAIN,
    "GAN": TWO + ALTERNATING + OF_GAN + TRAIN.replace("float(cell(x, y)[0])", "cell(x, y)[3].tolist()"),
}


@in_a_mode
@pytest.mark.parametrize("which", HAD)
def test_an_earlier_checkpoint_goes_on(mode, which, tmp_path):
    had, written = (import_code(tmp_path, SET_UP + code[which]) for code in (HAD, WRITTEN))
    np.testing.assert_array_equal(written.losses, had.losses[8:])
    assert_weights_agree(written, had)
    assert written.missing and not any("weight" in name for name in [*written.missing, *written.unexpected])


def test_each_line_of_the_table_leads_to_a_section():
    headings = re.findall("^##+ (.*)", (ROOT / "docs" / "migration.md").read_text(), re.M)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"^\|.*\]\(#(.*?)\)", PAGE, flags=re.M)) <= anchors
