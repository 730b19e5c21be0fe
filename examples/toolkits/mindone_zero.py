"""
Trains a small network on two ranks with mindone's ZeroHelper, which splits the optimizer's state between them.

    msrun --worker_num=2 --local_worker_num=2 --join=True examples/toolkits/mindone_zero.py

It makes the same steps in a cell of ms_lossscale and in mindone's own step, each with the plain optimizer and with ZeRO
stage 1, from the same weights and on the same batches. The second batch of rank 1 overflows.
"""

import argparse
from importlib.metadata import version
from pathlib import Path

import mindspore
import numpy as np
from mindone.trainers.train_step import TrainOneStepWrapper
from mindone.trainers.zero import ZeroHelper
from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.communication import GlobalComm, get_group_size, get_rank, init
from tabulate import tabulate

from ms_lossscale import ScaledTrainOneStepCell

STEPS, LEARNING_RATE, CLIP_NORM = 10, 0.125, 0.5
# The file in which mindone lists how it has split the weights.
SPLIT = Path("output/toolkits/zero").absolute()


class ZeroOptimizer(nn.Cell):
    """Makes the helper an optimizer of whole weights that takes gradients which are already reduced."""

    def __init__(self, helper):
        super().__init__(auto_prefix=False)
        self.parameters = ParameterTuple(helper.ori_parameters)
        helper.split_params()
        self.helper, self.optimizer = helper, helper.optimizer

    def construct(self, grads):
        parts = ()
        for grad, is_split in zip(grads, self.helper.need_parameter_split):
            parts += (self.helper.split_op(grad)[self.helper.op_rank_id] if is_split else grad,)
        return self.helper.run_optimizer(parts)


def zero(optimizer, stage=1):
    return ZeroHelper(optimizer, stage, GlobalComm.WORLD_COMM_GROUP, params_split_info=str(SPLIT))


def plain(network, optimizer):
    return ScaledTrainOneStepCell(network, optimizer, 1024, clip_norm=CLIP_NORM)


def with_zero(network, optimizer):
    return plain(network, ZeroOptimizer(zero(optimizer)))


def mindone_plain(network, optimizer, stage=0):
    helper = zero(optimizer, stage)
    scale = Tensor(1024.0)
    return TrainOneStepWrapper(network, optimizer, scale, clip_grad=True, clip_norm=CLIP_NORM, zero_helper=helper)


def mindone_with_zero(network, optimizer):
    return mindone_plain(network, optimizer, stage=1)


class Loss(nn.Cell):
    """The loss of a float16 network. ZeRO splits a weight if its first axis is even: here the first layer's."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.network = nn.SequentialCell(nn.Dense(4, 8), nn.ReLU(), nn.Dense(8, 3)).to_float(mstype.float16)

    def construct(self, x, y):
        return ((self.network(x).astype(mstype.float32) - y) ** 2).mean()


def batches(rank):
    rng = np.random.default_rng(rank)
    for i in range(STEPS):
        x, y = rng.normal(size=(8, 4)), 3 * rng.normal(size=(8, 3))
        yield Tensor((1e4 if (i, rank) == (1, 1) else 1) * x, mstype.float32), Tensor(y, mstype.float32)


def train(make_step):
    """Trains. Returns both ranks' weights before the first step and after each, by step, rank and weight."""
    mindspore.set_seed(0)
    network = Loss()
    weights = network.trainable_params()
    step = make_step(network, nn.SGD(weights, LEARNING_RATE, momentum=0.9))
    step.set_train()

    def of_both_ranks():
        own = np.concatenate([weight.asnumpy().ravel() for weight in weights])
        return ops.AllGather()(Tensor(own[None])).asnumpy()

    values = [of_both_ranks()]
    for x, y in batches(get_rank()):
        step(x, y)
        values.append(of_both_ranks())
    return np.array(values)


def row(name, values, of_plain):
    """Returns a training's row of the table, compared with the plain one."""
    # The first update of SGD is the clipped gradient times the learning rate.
    norms = np.linalg.norm(values[1] - values[0], axis=1) / LEARNING_RATE
    differ = np.abs(values[1, 1] - values[1, 0]).max()
    not_finite = (~np.isfinite(values[2])).sum(axis=1)
    return [name, *norms, differ, *not_finite, np.abs(values[-1] - of_plain[-1]).max()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["graph", "pynative"], default="graph")
    mode = parser.parse_args().mode
    mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
    init()
    if get_group_size() != 2:
        raise SystemExit("This is for two ranks: msrun --worker_num=2 --local_worker_num=2 ...")
    mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)

    of_plain = train(plain)
    rows = [row("ms_lossscale", of_plain, of_plain)]
    for name, make_step in [
        ("ms_lossscale, ZeroHelper", with_zero),
        ("mindone", mindone_plain),
        ("mindone, ZeroHelper", mindone_with_zero),
    ]:
        rows.append(row(name, train(make_step), of_plain))
    if get_rank() == 0:
        names = ", ".join(f"{name} {version(name)}" for name in ("mindspore", "mindone", "ms_lossscale"))
        print(f"{names}; {mode} mode, 2 ranks on CPU, clip_norm={CLIP_NORM}, {of_plain.shape[-1]} weights\n")
        header = ["step", "norm, rank 0", "norm, rank 1", "ranks differ by", "not finite, rank 0", "not finite, rank 1"]
        print(tabulate(rows, [*header, f"to the first, {STEPS} steps"], tablefmt="github", floatfmt=".2g"))


if __name__ == "__main__":
    main()
