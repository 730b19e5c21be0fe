"""
The chip's kernels, by NumPy: install() lets each launch come here.

In saturation mode an infinity that a kernel would write becomes the largest number of its type, a NaN becomes 0, and the
status register is set. A kernel that is not known here, or that fails, makes the launch fail, and is named.
"""

import atexit
import ctypes
import os
import sys
import traceback

import numpy as np

from dry_ascend import library, register_log

SATURATES = (
    os.environ.get("MS_ASCEND_CHECK_OVERFLOW_MODE") == "SATURATION_MODE" or os.environ["DRY_ASCEND_SOC"] == "Ascend910A"
)
DTYPES = {
    0: np.float32, 1: np.float16, 2: np.int8, 3: np.int32, 4: np.uint8, 6: np.int16, 7: np.uint16, 8: np.uint32, 9: np.int64,
    10: np.uint64, 11: np.float64, 12: np.bool_,
}  # fmt: skip
TENSOR, SCALAR, INTS, LIST, BOOLS = 1, 2, 3, 4, 7
register = np.zeros(8, np.int32)


class Object(ctypes.Structure):
    """As in device.cpp."""

    _fields_ = [
        ("kind", ctypes.c_int32), ("dtype", ctypes.c_int32), ("nd", ctypes.c_int32), ("pad", ctypes.c_int32), ("dims", ctypes.c_int64 * 8),
        ("strides", ctypes.c_int64 * 8), ("offset", ctypes.c_int64), ("data", ctypes.c_void_p), ("n", ctypes.c_int64), ("values", ctypes.c_int64 * 1024),
    ]  # fmt: skip


class Arguments(list):
    """What a kernel gets: arrays that lie in the device's memory, scalars and tuples; of one that is compiled, its inputs, then its outputs."""

    def __init__(self, values, attributes):
        super().__init__(values)
        self._attributes = attributes

    def attribute(self, name, default):
        values = (ctypes.c_double * 16)()
        count = library.stub_attribute(self._attributes, name.encode(), values, 16)
        return default if count < 1 else values[0] if count == 1 else tuple(values[:count])


def view(data, dtype, dims, strides=None, offset=0):
    """Returns memory as an array."""
    dtype = np.dtype(DTYPES[dtype])
    if data is None:
        return None
    if 0 in dims:
        return np.zeros(dims, dtype)
    count = 1 + sum((d - 1) * s for d, s in zip(dims, strides)) if strides else int(np.prod(dims, dtype=np.int64))
    raw = np.frombuffer((ctypes.c_char * ((count + offset) * dtype.itemsize)).from_address(data), dtype)[
        offset : offset + count
    ]
    return (
        np.lib.stride_tricks.as_strided(raw, dims, [s * dtype.itemsize for s in strides])
        if strides
        else raw.reshape(dims)
    )


def value_of(address):
    """Returns the argument that an address, or a number, stands for."""
    if address == 0:
        return None
    if not library.stub_is_object(address):
        return address - (1 << 64) if address >= 1 << 63 else address
    its = Object.from_address(address)
    if its.kind == TENSOR:
        return view(its.data, its.dtype, list(its.dims[: its.nd]), list(its.strides[: its.nd]), its.offset)
    if its.kind == SCALAR:
        return np.frombuffer(ctypes.string_at(ctypes.addressof(its.values), 8), DTYPES[its.dtype])[0]
    if its.kind == LIST:
        return [value_of(each) for each in its.values[: its.n]]
    return tuple(its.values[: its.n])


def operand(description, buffer):
    its, data = Object.from_address(description), Object.from_address(buffer)
    data = data.data or its.data
    return None if data is None or its.dtype not in DTYPES else view(data, its.dtype, list(its.dims[: its.nd]))


def store(out, value):
    """Writes a result as the chip does."""
    value = np.asarray(value)
    if out.dtype.kind == "f":
        value = value.astype(out.dtype)
        if SATURATES and not np.isfinite(value).all():
            register[:] = 1
            largest = np.finfo(out.dtype).max
            value = np.where(np.isnan(value), 0, np.clip(value, -largest, largest)).astype(out.dtype)
    out[...] = value.reshape(out.shape) if value.size == out.size else np.broadcast_to(value, out.shape)


def wide(x):
    return x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype == np.float16 else x


def one(function):
    return lambda a: store(a[-1], function(wide(a[0])))


def two(function):
    return lambda a: store(a[-1], function(wide(a[0]), wide(a[1])))


def in_place(function):
    return lambda a: store(a[0], function(wide(a[0]), wide(a[1])))


def with_alpha(function, to):
    """An operator whose second operand is multiplied by a third."""
    return lambda a: store(a[to], function(wide(a[0]), wide(a[1]) * (1 if a[2] is None else a[2])))


def reduced(function):
    """x, axes (none: all), ..., result."""

    def compute(a):
        x, axes, out = wide(a[0]), a[1], a[-1]
        axes = tuple(int(i) for i in np.ravel(axes)) if axes is not None else ()
        result = function(x, axis=axes if axes and x.ndim else None)
        if np.size(result) != out.size:
            raise ValueError(f"a result of {np.size(result)} elements for {out.shape}")
        store(out, result)

    return compute


def all_finite(a):
    if not np.isfinite(a[0]).all():
        a[-1][...] = True


def first(a):
    store(a[-1], a[0])


def set_first(a):
    store(a[0], a[1])


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


# ---- BatchNorm, channels in axis 1 ----
def around(x):
    return tuple(i for i in range(x.ndim) if i != 1)


def by_channel(x, values):
    return values.reshape([1, -1] + [1] * (x.ndim - 2))


def normalized(a, x, mean, variance):
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
    store(a[7], by_channel(x, scale) * normalized(a, x, its_mean, its_variance) + by_channel(x, offset))
    store(a[8], mean.reshape(-1) * (1 - factor) + its_mean * factor)
    store(a[9], variance.reshape(-1) * (1 - factor) + its_variance * n / max(n - 1, 1) * factor)
    store(a[10], its_mean)
    store(a[11], its_variance)


def bn_update_grad(a):
    gradient, x, mean, variance = map(wide, a[:4])
    store(a[4], (gradient * normalized(a, x, mean, variance)).sum(around(x)))
    store(a[5], gradient.sum(around(x)))


def bn_reduce_grad(a):
    gradient, x, of_scale, of_offset, scale, mean, variance = map(wide, a[:7])
    n, deviation = x.size // x.shape[1], np.sqrt(by_channel(x, variance) + a.attribute("epsilon", 1e-5))
    centered = gradient - by_channel(x, of_offset) / n - normalized(a, x, mean, variance) * by_channel(x, of_scale) / n
    store(a[7], by_channel(x, scale) / deviation * centered)


# ---- the status register ----
def get_status(a):
    register_log.append(("get", int(register[0])))
    a[-1][...] = register


def clear_status(a):
    register_log.append(("clear", int(register[0])))
    register[:] = 0


def unpack(a):
    axis = int(a.attribute("axis", 0))
    for i, out in enumerate(a[1:]):
        store(out, np.take(a[0], i, axis))


def select(a):
    store(a[-1], np.where(a[0], a[1], a[2]))


def threshold_backward(a):
    store(a[-1], np.where(a[1] > (a[2] or 0), a[0], 0))


def matmul(a):
    store(a[2], wide(a[0]) @ wide(a[1]))


def joined(a):
    store(a[-1], np.concatenate(a[0], a[1] or 0))


def stacked(a):
    store(a[-1], np.stack(a[0], a[1] or 0))


COMPARISONS = {
    "Ge": np.greater_equal,
    "Le": np.less_equal,
    "Ne": np.not_equal,
    "Eq": np.equal,
    "Gt": np.greater,
    "Lt": np.less,
}
KERNELS = {
    **{f"aclnn{name}{kind}": two(function) for name, function in COMPARISONS.items() for kind in ("Tensor", "Scalar")},
    **{f"aclnn{name}": two(function) for name, function in (
        ("Mul", np.multiply), ("Muls", np.multiply), ("Div", np.divide), ("Divs", np.divide), ("Maximum", np.maximum), ("Minimum", np.minimum),
        ("LogicalAnd", np.logical_and), ("LogicalOr", np.logical_or), ("BitwiseAndTensor", np.bitwise_and), ("BitwiseOrTensor", np.bitwise_or),
        ("PowTensorTensor", np.power), ("PowTensorScalar", np.power), ("PowScalarTensor", np.power), ("FloorDivide", np.floor_divide),
        ("RemainderTensorTensor", np.remainder), ("RemainderTensorScalar", np.remainder),
    )},
    **{f"aclnn{name}": one(function) for name, function in (
        ("Relu", lambda x: np.maximum(x, 0)), ("IsFinite", np.isfinite), ("IsInf", np.isinf), ("Reciprocal", np.reciprocal), ("LogicalNot", np.logical_not),
        ("BitwiseNot", np.invert), ("Neg", np.negative), ("Sqrt", np.sqrt), ("Rsqrt", lambda x: 1 / np.sqrt(x)), ("Abs", np.abs), ("Exp", np.exp),
        ("Log", np.log), ("Tanh", np.tanh), ("Sigmoid", lambda x: 1 / (1 + np.exp(-x))), ("Sin", np.sin), ("Cos", np.cos), ("Sign", np.sign), ("Floor", np.floor),
    )},
    **{f"aclnn{name}": reduced(function) for name, function in (
        ("Any", np.any), ("All", np.all), ("ReduceSum", np.sum), ("Mean", np.mean), ("Amin", np.min), ("Amax", np.max), ("SumDim", np.sum), ("Prod", np.prod),
    )},
    **{f"aclnn{name}": with_alpha(function, -1) for name, function in (("Add", np.add), ("Adds", np.add), ("Sub", np.subtract), ("Subs", np.subtract))},
    **{f"aclnnInplace{name}": with_alpha(function, 0) for name, function in (("Add", np.add), ("Adds", np.add), ("Sub", np.subtract))},
    **{f"aclnnInplace{name}": in_place(function) for name, function in (("Mul", np.multiply), ("Muls", np.multiply), ("Div", np.divide), ("Divs", np.divide))},
    "aclnnCast": first, "aclnnMm": matmul, "aclnnMatmul": matmul, "aclnnBatchMatMul": matmul, "aclnnAllFinite": all_finite, "aclnnInplaceCopy": set_first,
    "aclnnInplaceOne": lambda a: store(a[0], 1), "aclnnInplaceZero": lambda a: store(a[0], 0), "aclnnSWhere": select, "aclnnCat": joined, "aclnnStack": stacked,
    "aclnnRepeat": lambda a: store(a[-1], np.tile(a[0], a[1])), "aclnnThresholdBackward": threshold_backward,
    "aclnnTanhBackward": lambda a: store(a[-1], wide(a[0]) * (1 - wide(a[1]) ** 2)),
    # Compiled when they run.
    **{name: two(function) for name, function in (
        ("Mul", np.multiply), ("Add", np.add), ("Sub", np.subtract), ("RealDiv", np.divide), ("Maximum", np.maximum), ("Minimum", np.minimum), ("Pow", np.power),
        ("Equal", np.equal), ("Less", np.less), ("Greater", np.greater), ("LogicalAnd", np.logical_and), ("LogicalOr", np.logical_or),
    )},
    **{name: one(function) for name, function in (("Square", np.square), ("Sqrt", np.sqrt), ("Neg", np.negative), ("LogicalNot", np.logical_not))},
    **{name: reduced(function) for name, function in (("ReduceSum", np.sum), ("ReduceMean", np.mean), ("ReduceMax", np.max), ("ReduceMin", np.min))},
    **dict.fromkeys(("TensorMove", "Identity", "Cast"), first),
    "Assign": set_first, "AssignAdd": in_place(np.add), "AssignSub": in_place(np.subtract), "Select": select, "SelectV2": select,
    "AddN": lambda a: store(a[-1], sum(map(wide, a[:-1]))), "Fill": lambda a: store(a[-1], a[1]), "OnesLike": lambda a: store(a[-1], 1),
    "ZerosLike": lambda a: store(a[-1], 0), "Pack": lambda a: store(a[-1], np.stack(a[:-1], int(a.attribute("axis", 0)))), "Unpack": unpack,
    "Slice": lambda a: store(a[-1], a[0][tuple(slice(int(b), int(b) + n) for b, n in zip(np.asarray(a[1]).reshape(-1), a[-1].shape))]),
    "ConcatD": lambda a: store(a[-1], np.concatenate(a[:-1], int(a.attribute("concat_dim", 0)))),
    "BiasAdd": lambda a: store(a[-1], wide(a[0]) + by_channel(a[0], wide(a[1]))), "BiasAddGrad": lambda a: store(a[-1], wide(a[0]).sum(around(a[0]))),
    "ApplyMomentum": momentum, "SGD": sgd, "ApplyAdamD": adam, "AdamApplyOneWithDecayAssign": adam_with_decay, "BNTrainingReduce": bn_reduce, "BNTrainingUpdate": bn_update,
    "BNTrainingUpdateGrad": bn_update_grad, "BNTrainingReduceGrad": bn_reduce_grad, "NPUGetFloatStatusV2": get_status, "NPUClearFloatStatusV2": clear_status,
    "GatherV2": lambda a: store(a[-1], np.take(a[0], np.asarray(a[1]).astype(int), axis=int(np.asarray(a[2]).reshape(-1)[0]) if len(a) > 3 else 0)),
    "Addcmul": lambda a: store(a[-1], wide(a[0]) + a[3] * wide(a[1]) * wide(a[2])),
    # A data set's queue needs no beginning.
    "InitData": lambda a: None,
}  # fmt: skip


def missing(what):
    print(f"dry_ascend: no kernel {what}", file=sys.stderr, flush=True)
    if "DRY_ASCEND_UNKNOWN" in os.environ:
        with open(os.environ["DRY_ASCEND_UNKNOWN"], "a") as file:
            file.write(what + "\n")


@ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p
)
def launch(name, count, inputs, addresses, attributes):
    """`inputs` is 0 for an operator of aclnn, whose arguments stand for themselves."""
    name = name.decode()
    if name not in KERNELS:
        missing(name)
        return 1
    try:
        if inputs:
            values = [operand(addresses[i], addresses[i + 1]) for i in range(0, count, 2)]
        else:
            values = [value_of(addresses[i]) for i in range(count)]
        with np.errstate(all="ignore"):
            KERNELS[name](Arguments(values, attributes))
    except Exception as error:
        traceback.print_exc()
        missing(f"{name} ({type(error).__name__})")
        return 1
    return 0


def install():
    library.stub_is_object.argtypes = [ctypes.c_uint64]
    library.stub_attribute.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_double), ctypes.c_int]
    library.stub_set_callback(launch)
    atexit.register(library.stub_set_callback, None)
