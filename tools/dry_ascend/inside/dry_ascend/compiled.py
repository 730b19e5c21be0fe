"""The operators that are compiled when they run. Their arguments are inputs, then outputs."""

import numpy as np

from dry_ascend import memory, register_log
from dry_ascend.forms import first, in_place, one, reduced, select, set_first, two
from dry_ascend.memory import store, wide


# ---- optimizers ----
def momentum(a):
    variable, accumulated, rate, gradient, factor = a[:5]
    accumulated[...] = accumulated * factor + gradient
    update = gradient + factor * accumulated if a.attribute("use_nesterov", 0) else accumulated
    store(variable, variable - rate * update)


def sgd(a):
    parameter, gradient, rate, accumulated, factor, begins = a[:6]
    gradient = wide(gradient) + a.attribute("weight_decay", 0.0) * wide(parameter)
    if float(np.asarray(factor).reshape(-1)[0]) > 0:
        damped = gradient * (1 - a.attribute("dampening", 0.0))
        accumulated[...] = np.where(wide(begins) > 0, gradient, accumulated * factor + damped)
        begins[...] = 0
        gradient = gradient + factor * accumulated if a.attribute("nesterov", 0) else accumulated
    store(parameter, parameter - rate * gradient)


def adam(a):
    parameter, m, v, power1, power2, rate, beta1, beta2, epsilon, gradient = a[:10]
    gradient = wide(gradient)
    m[...] = beta1 * m + (1 - beta1) * gradient
    v[...] = beta2 * v + (1 - beta2) * gradient * gradient
    moved = beta1 * m + (1 - beta1) * gradient if a.attribute("use_nesterov", 0) else m
    store(parameter, parameter - rate * np.sqrt(1 - power2) / (1 - power1) * moved / (np.sqrt(v) + epsilon))


def adam_with_decay(a):
    gradient, v, m, parameter, rate, beta1, rest1, beta2, rest2, decay, epsilon = a[:11]
    m[...] = beta1 * m + rest1 * gradient
    v[...] = beta2 * v + rest2 * gradient * gradient
    store(parameter, parameter - rate * (m / (np.sqrt(v) + epsilon) + decay * parameter))


# ---- BatchNorm and biases, channels in axis 1 ----
def around(x):
    return tuple(axis for axis in range(x.ndim) if axis != 1)


def by_channel(x, values):
    return values.reshape([1, -1] + [1] * (x.ndim - 2))


def normalised(a, x, mean, variance):
    return (x - by_channel(x, mean)) / np.sqrt(by_channel(x, variance) + a.attribute("epsilon", 1e-5))


def bn_reduce(a):
    x = wide(a[0])
    store(a[1], x.sum(around(x)))
    store(a[2], (x * x).sum(around(x)))


def bn_update(a):
    x, total, squares, scale, offset, mean, variance = map(wide, a[:7])
    factor, n = a.attribute("factor", 0.1), x.size // x.shape[1]
    its_mean = total.reshape(-1) / n
    its_variance = squares.reshape(-1) / n - its_mean * its_mean
    store(a[7], by_channel(x, scale) * normalised(a, x, its_mean, its_variance) + by_channel(x, offset))
    store(a[8], mean.reshape(-1) * (1 - factor) + its_mean * factor)
    store(a[9], variance.reshape(-1) * (1 - factor) + its_variance * n / max(n - 1, 1) * factor)
    store(a[10], its_mean)
    store(a[11], its_variance)


def bn_infer(a):
    x, scale, offset, mean, variance = map(wide, a[:5])
    store(a[5], by_channel(x, scale) * normalised(a, x, mean, variance) + by_channel(x, offset))


def bn_update_grad(a):
    gradient, x, mean, variance = map(wide, a[:4])
    store(a[4], (gradient * normalised(a, x, mean, variance)).sum(around(x)))
    store(a[5], gradient.sum(around(x)))


def bn_reduce_grad(a):
    gradient, x, of_scale, of_offset, scale, mean, variance = map(wide, a[:7])
    n, deviation = x.size // x.shape[1], np.sqrt(by_channel(x, variance) + a.attribute("epsilon", 1e-5))
    along_scale = normalised(a, x, mean, variance) * by_channel(x, of_scale) / n
    store(a[7], by_channel(x, scale) / deviation * (gradient - by_channel(x, of_offset) / n - along_scale))


# ---- the status register ----
def get_status(a):
    register_log.append(("get", int(memory.register[0])))
    a[-1][...] = memory.register


def clear_status(a):
    register_log.append(("clear", int(memory.register[0])))
    memory.register[:] = 0


# ---- parts and places ----
def unpack(a):
    axis = int(a.attribute("axis", 0))
    for i, out in enumerate(a[1:]):
        store(out, np.take(a[0], i, axis))


def part(a):
    begins = np.asarray(a[1]).reshape(-1)
    store(a[-1], a[0][tuple(slice(int(begin), int(begin) + size) for begin, size in zip(begins, a[-1].shape))])


def strided_part(a):
    begins, ends, strides = (np.asarray(each).reshape(-1).tolist() for each in a[1:4])
    open_begins, open_ends, single = (
        int(a.attribute(name, 0)) for name in ("begin_mask", "end_mask", "shrink_axis_mask")
    )
    parts = []
    for i, (begin, end, stride) in enumerate(zip(begins, ends, strides)):
        bit = 1 << i
        whole = slice(None if open_begins & bit else begin, None if open_ends & bit else end, stride)
        parts.append(begin if single & bit else whole)
    store(a[-1], a[0][tuple(parts)])


def gather(a):
    axis = int(np.asarray(a[2]).reshape(-1)[0]) if len(a) > 3 else 0
    store(a[-1], np.take(a[0], np.asarray(a[1]).astype(int), axis=axis))


ONE = {"LogicalNot": np.logical_not, "Neg": np.negative, "Sqrt": np.sqrt, "Square": np.square}
TWO = {
    "Add": np.add,
    "Equal": np.equal,
    "Greater": np.greater,
    "Less": np.less,
    "LogicalAnd": np.logical_and,
    "LogicalOr": np.logical_or,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Mul": np.multiply,
    "Pow": np.power,
    "RealDiv": np.divide,
    "Sub": np.subtract,
}
REDUCTIONS = {"ReduceMax": np.max, "ReduceMean": np.mean, "ReduceMin": np.min, "ReduceSum": np.sum}
OPERATORS = {
    **{name: one(function) for name, function in ONE.items()},
    **{name: two(function) for name, function in TWO.items()},
    **{name: reduced(function) for name, function in REDUCTIONS.items()},
    "AdamApplyOneWithDecayAssign": adam_with_decay,
    "Addcmul": lambda a: store(a[-1], wide(a[0]) + a[3] * wide(a[1]) * wide(a[2])),
    "AddN": lambda a: store(a[-1], sum(map(wide, a[:-1]))),
    "ApplyAdamD": adam,
    "ApplyMomentum": momentum,
    "Assign": set_first,
    "AssignAdd": in_place(np.add),
    "AssignSub": in_place(np.subtract),
    "BiasAdd": lambda a: store(a[-1], wide(a[0]) + by_channel(a[0], wide(a[1]))),
    "BiasAddGrad": lambda a: store(a[-1], wide(a[0]).sum(around(a[0]))),
    "BNInfer": bn_infer,
    "BNTrainingReduce": bn_reduce,
    "BNTrainingReduceGrad": bn_reduce_grad,
    "BNTrainingUpdate": bn_update,
    "BNTrainingUpdateGrad": bn_update_grad,
    "Cast": first,
    "ConcatD": lambda a: store(a[-1], np.concatenate(a[:-1], int(a.attribute("concat_dim", 0)))),
    "Fill": lambda a: store(a[-1], a[1]),
    "GatherV2": gather,
    "Identity": first,
    # A data set's queue needs no beginning.
    "InitData": lambda a: None,
    "NPUClearFloatStatusV2": clear_status,
    "NPUGetFloatStatusV2": get_status,
    "OnesLike": lambda a: store(a[-1], 1),
    "Pack": lambda a: store(a[-1], np.stack(a[:-1], int(a.attribute("axis", 0)))),
    "Select": select,
    "SelectV2": select,
    "SGD": sgd,
    "Slice": part,
    "SqrtGrad": lambda a: store(a[-1], wide(a[1]) / 2 / wide(a[0])),
    "StridedSlice": strided_part,
    "TensorMove": first,
    "Unpack": unpack,
    "ZerosLike": lambda a: store(a[-1], 0),
}
