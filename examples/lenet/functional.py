"""
The loop of train.py with functions, to copy into a notebook: a step of your own, compiled, that resumes bit for bit.
After `python examples/lenet/functional.py --epochs 2`, the same with `--epochs 4` goes on.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX2")
sys.path.append(str(Path(__file__).resolve().parents[1]))

import mindspore
from common.data import add_data_argument, load_digits, test_dataset, train_dataset
from common.lenet5 import LeNet5, accuracy
from mindspore import amp, nn

from ms_lossscale import DynamicLossScale, ManualStep

parser = argparse.ArgumentParser(description="Train LeNet-5 in a loop of functions.")
add_data_argument(parser)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--checkpoint", type=Path, default=Path("output/lenet-functional.ckpt"))
args = parser.parse_args()
args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
mindspore.set_seed(1)
digits = load_digits(args.data)
network = amp.auto_mixed_precision(LeNet5(), "O2")
loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=2e-3)
step = ManualStep(network, optimizer, DynamicLossScale(scale_window=100))


def forward(images, labels):
    return loss_fn(network(images), labels)


value_and_grad = step.value_and_grad(forward)


@mindspore.jit
def train_step(images, labels):
    loss, grads = value_and_grad(*step.begin(images, labels))
    return loss, step.end(grads)


done = 0
if args.checkpoint.exists():
    state = mindspore.load_checkpoint(str(args.checkpoint))
    done = int(state.pop("epoch"))
    step.load_state_dict(state)
for epoch in range(done + 1, args.epochs + 1):
    network.set_train()
    for batch in train_dataset(digits, 32, 1, epoch).create_tuple_iterator(num_epochs=1):
        loss, overflow = train_step(*batch)
    share, skipped = accuracy(network, test_dataset(digits)), step.counters()["skipped_steps"]
    print(f"epoch {epoch}: loss {loss}, {share:.2%} right, scale {step.get_loss_scale():g}, skipped {skipped}")
    mindspore.save_checkpoint(step, str(args.checkpoint), append_dict={"epoch": epoch})
