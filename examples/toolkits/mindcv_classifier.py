"""
Trains a MobileNet of mindcv on handwritten digits in float16, with its optimizers, schedules and StateMonitor.

    python examples/toolkits/mindcv_classifier.py

It first compares a few steps of mindcv's own trainer and of ms_lossscale. Then it trains with a dynamic loss scale,
which mindcv's trainer refuses on CPU.
"""

import logging
import os
import sys
from pathlib import Path

# With AVX-512, MindSpore chooses convolutions on CPU that are 10 to 80 times slower.
os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
import numpy as np
from common.data import load_digits
from common.output import written_scale
from comparison import Losses, compare_first_steps, print_changes
from mindcv.loss import create_loss
from mindcv.models import create_model
from mindcv.optim import create_optimizer
from mindcv.scheduler import create_scheduler
from mindcv.utils import StateMonitor, create_trainer
from mindcv.utils.amp import auto_mixed_precision
from mindcv.utils.trainer_factory import add_loss_network
from mindspore import Model, nn
from mindspore.dataset import NumpySlicesDataset

from ms_lossscale import DynamicLossScale, LossScaleMonitor, ScaledTrainOneStepCell

BATCH_SIZE, DIGITS, TEST_DIGITS, EPOCHS, FIRST_STEPS = 32, 640, 320, 5, 5
METRICS = {"accuracy": nn.Accuracy()}


def before(network, loss, optimizer):
    return create_trainer(
        network,
        loss,
        optimizer,
        METRICS,
        amp_level="O2",
        amp_cast_list=None,
        loss_scale_type="fixed",
        loss_scale=1024.0,
        drop_overflow_update=False,
        ema=True,
        ema_decay=0.9,
        clip_grad=True,
        clip_value=1.0,
    )


def after(network, loss, optimizer):
    auto_mixed_precision(network, amp_level="O2")
    cell = ScaledTrainOneStepCell(
        add_loss_network(network, loss, "O2"),
        optimizer,
        DynamicLossScale(),
        ema_decay=0.9,
        clip_norm=1.0,
        max_retries=4,
    )
    evaluation = nn.WithEvalCell(network, loss, add_cast_fp32=True)
    return Model(cell.set_train(), eval_network=evaluation, metrics=METRICS, eval_indexes=[0, 1, 2])


def refused(network, loss, optimizer):
    """Returns the error of mindcv's trainer for a dynamic loss scale on CPU."""
    dynamic = {"loss_scale_type": "dynamic", "loss_scale": 65536.0, "drop_overflow_update": True}
    try:
        create_trainer(network, loss, optimizer, METRICS, "O2", None, **dynamic, clip_grad=True)
    except ValueError as error:
        return str(error)
    raise SystemExit("mindcv's trainer takes a dynamic loss scale on CPU now.")


def model_of(make):
    """Makes a Model with a network, a loss and an optimizer of mindcv, always the same."""
    mindspore.set_seed(0)
    network = create_model("mobilenet_v1_025", num_classes=10, in_channels=1)
    schedule = create_scheduler(
        DIGITS // BATCH_SIZE,
        scheduler="cosine_decay",
        lr=3e-3,
        min_lr=1e-5,
        warmup_epochs=1,
        decay_epochs=EPOCHS,
        # One epoch more for the first steps.
        num_epochs=EPOCHS + 1,
    )
    optimizer = create_optimizer(network.trainable_params(), opt="adamw", lr=schedule, weight_decay=0.01)
    return make(network, create_loss("CE", label_smoothing=0.1), optimizer)


def some(images, labels, number):
    chosen = np.random.default_rng(0).permutation(len(images))[:number]
    return images[chosen], labels[chosen]


def dataset(images, labels):
    images = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2))).astype(np.float32) / 255
    return NumpySlicesDataset((images, labels), shuffle=False).batch(BATCH_SIZE, drop_remainder=True)


def first_steps(model, images, labels):
    losses = Losses()
    seen = FIRST_STEPS * BATCH_SIZE
    model.train(1, dataset(images[:seen], labels[:seen]), callbacks=[losses], dataset_sink_mode=False)
    return losses.losses


def main():
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    output = Path("output/toolkits/mindcv")
    output.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    train = some(digits.train_images, digits.train_labels, DIGITS)
    test_data = dataset(*some(digits.test_images, digits.test_labels, TEST_DIGITS))

    stock, model = model_of(before), model_of(after)
    cell = model.train_network
    cell.set_loss_scale(1024.0)
    columns = {"mindcv": first_steps(stock, *train), "ms_lossscale": first_steps(model, *train)}
    compare_first_steps(columns, tolerance=1e-3)

    print(f"mindcv's trainer, asked for a dynamic loss scale: {model_of(refused)}\n")

    # So high that the run shows overflows.
    cell.set_loss_scale(2.0**18)
    state = StateMonitor(
        model,
        model_name="mobilenet",
        dataset_sink_mode=False,
        dataset_val=test_data,
        ckpt_save_dir=str(output),
        summary_dir=str(output),
        log_interval=10,
    )
    model.train(EPOCHS, dataset(*train), callbacks=[state, LossScaleMonitor(every_n_steps=30)], dataset_sink_mode=False)
    with cell.ema_weights():
        averaged = model.eval(test_data, dataset_sink_mode=False)["accuracy"]
    print(f"accuracy on {TEST_DIGITS} test digits, averaged weights: {averaged:.1%}")
    print(f"{cell.counters()}, loss scale {written_scale(cell.get_loss_scale())}")
    print_changes(before, after)


if __name__ == "__main__":
    main()
