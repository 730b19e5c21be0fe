"""What float16 and float32 become on this device, on which the overflow check and comparisons with NumPy rest."""

import numpy as np
import pytest
from conftest import device, quick_in_pynative_mode
from mindspore import Tensor, ops

rng = np.random.default_rng(0)

# On an NPU in saturation mode, 65504.
in_inf_nan_mode = pytest.mark.only_on("CPU", "GPU", reason="what an overflow becomes there depends on a setting")


def half(*shape, value):
    return Tensor(np.full(shape, value, np.float16))


@in_inf_nan_mode
def test_what_overflows_in_float16_arrives_as_inf(mode):
    rows = np.ones((3, 64), np.float16)
    rows[1, 3], rows[2, 3] = np.inf, np.nan
    results = {
        "cast": Tensor(np.float32([70000.0, -70000.0])).astype(half(1, value=0).dtype),
        "product": half(2, value=300) * half(2, value=300),
        "matrix product": ops.matmul(half(2, 64, value=40), half(64, 2, value=40)),
        "convolution": ops.conv2d(half(1, 64, 3, 3, value=40), half(1, 64, 3, 3, value=40)),
        "sum": half(1000, value=100).sum(),
        "of inf": ops.matmul(Tensor(rows[1:2]), half(64, 2, value=1)),
    }
    for name, result in results.items():
        assert np.isinf(result.asnumpy()).all(), name
    of_rows = ops.matmul(Tensor(rows), half(64, 1, value=1)).asnumpy()[:, 0]
    np.testing.assert_array_equal(of_rows, np.float16([64, np.inf, np.nan]))


# What a rounding to so many bits changes at most, of the value.
FLOAT32, TF32 = 2.0**-24, 2.0**-11


def largest_error(result, exact, of_sizes):
    """Returns the largest error, as a share of the sum of the products' sizes."""
    return float((np.abs(result.asnumpy().astype(np.float64) - exact) / of_sizes).max())


@quick_in_pynative_mode
def test_matrix_products_of_float32_are_float32(mode):
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 512), (512, 64)))
    exact, of_sizes = (left.astype(np.float64) @ right for left, right in ((x, y), (np.abs(x), np.abs(y))))
    # Each of 512 additions rounds the sum so far, which the sum of the sizes is no smaller than.
    assert largest_error(ops.matmul(Tensor(x), Tensor(y)), exact, of_sizes) < 513 * FLOAT32


@pytest.mark.only_on("CPU", "GPU", reason="how a convolution rounds is not known there")
@quick_in_pynative_mode
def test_convolutions_of_float32_round_as_float32_or_on_a_gpu_as_tf32(mode):
    """A comparison with NumPy, or between modes, needs so much tolerance where there is a convolution."""
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 64, 8, 8), (8, 64, 3, 3)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
    exact, of_sizes = (
        np.einsum("nchwij,ocij->nohw", left.astype(np.float64), right)
        for left, right in ((windows, weight), (np.abs(windows), np.abs(weight)))
    )
    # Both factors of each product are rounded, and the sum of 576 products in float32.
    rounding = {"CPU": FLOAT32, "GPU": TF32}[device()]
    assert largest_error(ops.conv2d(Tensor(x), Tensor(weight)), exact, of_sizes) < 2 * rounding + 577 * FLOAT32
