"""
Trains a small YOLOv8 of mindyolo in float16 to find handwritten digits, with mindyolo's optimizer, EMA, callbacks and
Trainer.

    python examples/toolkits/mindyolo_detector.py

It first compares a few steps of mindyolo's own train step, of the same with a loss scale of ms_lossscale as its scaler,
and of a training cell. Then it trains with the cell in mindyolo's Trainer.
"""

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
from comparison import compare_first_steps, print_changes
from mindspore import Tensor, amp, nn
from mindspore.dataset import NumpySlicesDataset
from mindyolo.models import create_loss, create_model
from mindyolo.optim import EMA, create_group_param, create_optimizer
from mindyolo.optim.scheduler import create_warmup_momentum_scheduler
from mindyolo.utils import logger
from mindyolo.utils.callback import create_callback
from mindyolo.utils.config import Config
from mindyolo.utils.train_step_factory import create_train_step_fn, get_gradreducer, get_loss_scaler
from mindyolo.utils.trainer_factory import create_trainer

from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell

BATCH_SIZE, STEPS_PER_EPOCH, EPOCHS, FIRST_STEPS = 8, 10, 6, 5
SIZE, DIGITS_IN_IMAGE, MOST_BOXES = 64, 2, 4
CLASSES, REG_MAX, STRIDES = 10, 8, [8, 16, 32]

# A YOLOv8 with few and narrow layers, without the upward path.
NETWORK = Config(
    {
        "model_name": "yolov8",
        "depth_multiple": 0.33,
        "width_multiple": 0.125,
        "max_channels": 256,
        "reg_max": REG_MAX,
        "stride": STRIDES,
        "backbone": [
            [-1, 1, "ConvNormAct", [64, 3, 2]],
            [-1, 1, "ConvNormAct", [128, 3, 2]],
            [-1, 1, "C2f", [128, True]],
            [-1, 1, "ConvNormAct", [256, 3, 2]],
            [-1, 1, "C2f", [256, True]],
            [-1, 1, "ConvNormAct", [256, 3, 2]],
            [-1, 1, "ConvNormAct", [256, 3, 2]],
            [-1, 1, "SPPF", [256, 5]],
        ],
        "head": [[[4, 5, 7], 1, "YOLOv8Head", ["nc", "reg_max", "stride"]]],
    }
)


def before(network, loss_fn, optimizer, ema):
    scaler = get_loss_scaler("static", scale_value=1024)
    reducer = get_gradreducer(False, optimizer.parameters)
    step = create_train_step_fn("detect", network, loss_fn, optimizer, 1.0, scaler, reducer, ema, ms_jit=True)
    return step, scaler


def with_our_scaler(network, loss_fn, optimizer, ema):
    scaler = DynamicLossScale(1024)
    reducer = get_gradreducer(False, optimizer.parameters)
    step = create_train_step_fn("detect", network, loss_fn, optimizer, 1.0, scaler, reducer, ema, ms_jit=True)
    return step, scaler


def after(network, loss_fn, optimizer, ema):
    cell = ScaledTrainOneStepCell(
        DetectionLoss(network, loss_fn),
        optimizer,
        DynamicLossScale(1024),
        has_aux=True,
        after_update=ema.update,
        max_retries=4,
    )

    def step(images, labels, optimizer_update=True):
        loss, overflow, _, (items,) = cell(images, labels)
        return loss, items, None, not overflow

    return step, CellAsScaler(cell)


class DetectionLoss(nn.Cell):
    """The loss, and its parts for the log."""

    def __init__(self, network, loss_fn):
        super().__init__(auto_prefix=False)
        self.network, self.loss_fn = network, loss_fn

    def construct(self, images, labels):
        return self.loss_fn(self.network(images), labels, images)


class CellAsScaler:
    """Gives mindyolo's Trainer the loss scale to log. The cell has updated it already."""

    def __init__(self, cell):
        self.cell = cell

    @property
    def scale_value(self):
        return self.cell.scale_sense

    def adjust(self, grads_finite):
        return False


class Training:
    """Everything that mindyolo trains with, always the same, and a train step."""

    def __init__(self, make_step):
        mindspore.set_seed(0)
        self.network, averaged = (self._network() for _ in range(2))
        self.ema = EMA(self.network, averaged)
        self.ema.clone_from_model()
        self.loss_fn = create_loss("YOLOv8Loss", box=7.5, cls=0.5, dfl=1.5, stride=STRIDES, nc=CLASSES, reg_max=REG_MAX)
        warmup = {"warmup_epochs": 1, "min_warmup_step": STEPS_PER_EPOCH}
        params = create_group_param(
            self.network.trainable_params(),
            gp_weight_decay=5e-4,
            group_param="yolov8",
            start_factor=1.0,
            end_factor=0.1,
            lr_init=0.01,
            warmup_bias_lr=0.05,
            accumulate=1,
            # One epoch more for the first steps.
            epochs=EPOCHS + 1,
            steps_per_epoch=STEPS_PER_EPOCH,
            total_batch_size=BATCH_SIZE,
            **warmup,
        )
        self.optimizer = create_optimizer(params, "momentum", momentum=0.9, nesterov=True)
        self.warmup_momentum = create_warmup_momentum_scheduler(
            STEPS_PER_EPOCH, momentum=0.9, warmup_momentum=0.8, **warmup
        )
        self.step, self.scaler = make_step(self.network, self.loss_fn, self.optimizer, self.ema)

    @staticmethod
    def _network():
        network = create_model("yolov8", model_cfg=NETWORK, num_classes=CLASSES)
        return amp.auto_mixed_precision(network, "O2").set_train()

    def first_steps(self, images, labels):
        losses = []
        for i in range(FIRST_STEPS):
            batch = slice(i * BATCH_SIZE, (i + 1) * BATCH_SIZE)
            loss, *_ = self.step(Tensor(images[batch]), Tensor(labels[batch]), True)
            losses.append(float(loss.asnumpy()))
        return losses

    def train(self, dataset, folder):
        trainer = create_trainer(
            model_name="yolov8",
            train_step_fn=self.step,
            scaler=self.scaler,
            network=self.network,
            loss_fn=self.loss_fn,
            ema=self.ema,
            optimizer=self.optimizer,
            dataloader=dataset,
            steps_per_epoch=STEPS_PER_EPOCH,
            callback=create_callback([{"name": "SummaryCallback"}]),
            reducer=None,
            data_sink=False,
            profiler=None,
        )
        trainer.train(
            EPOCHS,
            main_device=True,
            warmup_step=len(self.warmup_momentum),
            warmup_momentum=self.warmup_momentum,
            log_interval=STEPS_PER_EPOCH,
            loss_item_name=self.loss_fn.loss_item_name,
            save_dir=str(folder),
        )


def images_with_digits(number):
    """Returns images of digits on black, and the labels of each: index, class, x, y, width, height."""
    digits, random = load_digits(), np.random.default_rng(0)
    images = np.zeros((number, 3, SIZE, SIZE), np.float32)
    labels = np.full((number, MOST_BOXES, 6), -1.0, np.float32)
    side = digits.train_images.shape[-1]
    for i in range(number):
        for j in range(DIGITS_IN_IMAGE):
            chosen = random.integers(len(digits.train_images))
            # Side by side, so that they never overlap.
            left, top = j * SIZE // 2 + random.integers(SIZE // 2 - side), random.integers(SIZE - side)
            images[i, :, top : top + side, left : left + side] = digits.train_images[chosen] / 255
            center = (left + side / 2) / SIZE, (top + side / 2) / SIZE
            labels[i, j] = i % BATCH_SIZE, digits.train_labels[chosen], *center, side / SIZE, side / SIZE
    return images, labels


def main():
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    output = Path("output/toolkits/mindyolo")
    output.mkdir(parents=True, exist_ok=True)
    logger.setup_logging(logger_name="MindYOLO", log_level="INFO", rank_id=0, device_per_servers=1)
    images, labels = images_with_digits(BATCH_SIZE * STEPS_PER_EPOCH)
    stock, scaler, training = Training(before), Training(with_our_scaler), Training(after)
    compare_first_steps(
        {
            "mindyolo": stock.first_steps(images, labels),
            "its step, our scaler": scaler.first_steps(images, labels),
            "our cell": training.first_steps(images, labels),
        },
        tolerance=1e-3,
    )

    cell = training.scaler.cell
    # So high that the run shows overflows.
    cell.set_loss_scale(2.0**20)
    dataset = NumpySlicesDataset({"images": images, "labels": labels}, shuffle=False).batch(BATCH_SIZE).repeat(EPOCHS)
    training.train(dataset, output)
    print(f"{cell.counters()}, loss scale {written_scale(cell.get_loss_scale())}")
    print_changes(before, after)


if __name__ == "__main__":
    main()
