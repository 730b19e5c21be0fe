"""The operators of aclnn, by their names without this prefix."""

import numpy as np

from dry_ascend.forms import first, in_place, one, reduced, select, set_first, two, with_alpha
from dry_ascend.memory import store, wide


def all_finite(a):
    """Sets its result if something is not finite, and else leaves it."""
    if not np.isfinite(a[0]).all():
        a[-1][...] = True


def matmul(a):
    store(a[2], wide(a[0]) @ wide(a[1]))


COMPARISONS = {
    "Ge": np.greater_equal,
    "Le": np.less_equal,
    "Ne": np.not_equal,
    "Eq": np.equal,
    "Gt": np.greater,
    "Lt": np.less,
}
ONE = {
    "Abs": np.abs,
    "BitwiseNot": np.invert,
    "Cos": np.cos,
    "Exp": np.exp,
    "Floor": np.floor,
    "IsFinite": np.isfinite,
    "IsInf": np.isinf,
    "Log": np.log,
    "LogicalNot": np.logical_not,
    "Neg": np.negative,
    "Reciprocal": np.reciprocal,
    "Relu": lambda x: np.maximum(x, 0),
    "Rsqrt": lambda x: 1 / np.sqrt(x),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Sign": np.sign,
    "Sin": np.sin,
    "Sqrt": np.sqrt,
    "Tanh": np.tanh,
}
TWO = {
    "BitwiseAndTensor": np.bitwise_and,
    "BitwiseOrTensor": np.bitwise_or,
    "Div": np.divide,
    "Divs": np.divide,
    "FloorDivide": np.floor_divide,
    "LogicalAnd": np.logical_and,
    "LogicalOr": np.logical_or,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Mul": np.multiply,
    "Muls": np.multiply,
    "PowScalarTensor": np.power,
    "PowTensorScalar": np.power,
    "PowTensorTensor": np.power,
    "RemainderTensorScalar": np.remainder,
    "RemainderTensorTensor": np.remainder,
}
REDUCTIONS = {
    "All": np.all,
    "Amax": np.max,
    "Amin": np.min,
    "Any": np.any,
    "Mean": np.mean,
    "Prod": np.prod,
    "ReduceSum": np.sum,
    "SumDim": np.sum,
}
OPERATORS = {
    **{f"{name}{kind}": two(function) for name, function in COMPARISONS.items() for kind in ("Tensor", "Scalar")},
    **{name: one(function) for name, function in ONE.items()},
    **{name: two(function) for name, function in TWO.items()},
    **{name: reduced(function) for name, function in REDUCTIONS.items()},
    "Add": with_alpha(np.add, -1),
    "Adds": with_alpha(np.add, -1),
    "Sub": with_alpha(np.subtract, -1),
    "Subs": with_alpha(np.subtract, -1),
    "InplaceAdd": with_alpha(np.add, 0),
    "InplaceAdds": with_alpha(np.add, 0),
    "InplaceSub": with_alpha(np.subtract, 0),
    "InplaceMul": in_place(np.multiply),
    "InplaceMuls": in_place(np.multiply),
    "InplaceDiv": in_place(np.divide),
    "InplaceDivs": in_place(np.divide),
    "InplaceCopy": set_first,
    "InplaceOne": lambda a: store(a[0], 1),
    "InplaceZero": lambda a: store(a[0], 0),
    "AllFinite": all_finite,
    "BatchMatMul": matmul,
    "Cast": first,
    "Cat": lambda a: store(a[-1], np.concatenate(a[0], a[1] or 0)),
    "Clamp": lambda a: store(a[-1], np.clip(wide(a[0]), a[1], a[2])),
    "Matmul": matmul,
    "Mm": matmul,
    "Permute": lambda a: store(a[-1], np.transpose(a[0], a[1])),
    "Repeat": lambda a: store(a[-1], np.tile(a[0], a[1])),
    "Stack": lambda a: store(a[-1], np.stack(a[0], a[1] or 0)),
    "SWhere": select,
    "TanhBackward": lambda a: store(a[-1], wide(a[0]) * (1 - wide(a[1]) ** 2)),
    "ThresholdBackward": lambda a: store(a[-1], np.where(a[1] > (a[2] or 0), a[0], 0)),
}
