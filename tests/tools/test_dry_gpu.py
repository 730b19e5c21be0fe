"""
What a step launches on a GPU, by MindSpore's GPU backend without a GPU (tools/dry_gpu): hardly more kernels than an
unscaled step, fused as those are, and no copies between host and device that grow with the network.
"""

from collections import Counter

import pytest
from conftest import slow
from support.dry_devices import counted

pytestmark = pytest.mark.only_on("CPU", reason="a GPU that is not there needs no other device")

RESNET, UNSCALED = "resnet50_small", "stock"
# The most kernels that a step of the small ResNet launches in each setting; unscaled they are 137.
MOST = {
    "plain": 184,
    "clip_norm": 203,
    "ema_decay": 296,
    "max_retries=3": 196,
    "accumulation of 4": 359,
    "NormSpike": 270,
    "ManualStep": 225,
}
MOST_SLOW = {"has_aux": 184, "clip_value": 266, "clip_norm and ema_decay": 320}
# What MindSpore fuses in an unscaled step, and what is left of it if a branch parts forward and backward.
FUSED = (
    *("BatchNormWithActivation", "BatchNormWithAddAndActivation", "BatchNorm", "ReLU"),
    *("BatchNormGradWithActivation", "BatchNormGradWithAddAndActivation", "BatchNormGrad", "ReluGrad", "Transpose"),
)


def kernels(case, sides, side, step="applied"):
    """Returns how often a step of a side launches each kernel. All sides are counted at once."""
    found = counted("dry_gpu/count.py", case, "--sides", UNSCALED, *sides)[case][side]
    assert "error" not in found, found
    return Counter(found[step]["kernels"])


@pytest.mark.parametrize("case, most", [("mlp", 1.6), ("tiny", 2.3)])
def test_an_applied_step_has_hardly_more_kernels_than_an_unscaled_one(case, most):
    ours, unscaled = (kernels(case, ["ms_lossscale"], side) for side in ("ms_lossscale", UNSCALED))
    assert unscaled["TensorMove"] == ours["TensorMove"] == 0
    assert ours.total() <= most * unscaled.total()


@pytest.mark.parametrize("setting", [*MOST, *slow(*MOST_SLOW)])
def test_each_setting_is_fused_as_an_unscaled_step_is(setting):
    """So no branch lies between forward and backward: MindSpore fuses nothing across it."""
    settings = MOST if setting in MOST else MOST_SLOW
    ours, unscaled = (kernels(RESNET, settings, side) for side in (setting, UNSCALED))
    assert unscaled["BatchNormGradWithActivation"] == 5
    assert {name: ours[name] for name in FUSED} == {name: unscaled[name] for name in FUSED}
    assert ours.total() <= settings[setting]


def test_no_parameter_is_copied_because_it_is_read_twice():
    assert kernels(RESNET, MOST, "plain")["TensorMove"] == 0


def test_a_skipped_step_has_hardly_twice_as_many():
    skipped, unscaled = kernels(RESNET, MOST, "plain", step="overflow"), kernels(RESNET, MOST, UNSCALED)
    assert skipped.total() <= 2.1 * unscaled.total()


OF_A_STEP = ("clip_norm and ema_decay", "accumulation of 4", "two conditions")
OF_A_CELL = (*OF_A_STEP, "max_retries=3")
KINDS = ("scaled", "simultaneous", "alternating")
QUICK = (*KINDS, "compiled manual", f"scaled with {', '.join(OF_A_CELL)}")
SLOW = (
    *(f"{kind} with {setting}" for kind in KINDS for setting in OF_A_CELL),
    *(f"compiled manual with {setting}" for setting in OF_A_STEP),
)


def with_layers(cell, count):
    """Returns the name of a cell with so many layers."""
    kind, _, settings = cell.partition(" with ")
    return f"{kind} with {count} layers{', ' if settings else ''}{settings}"


def copies(cells, cell, layers, step):
    """Returns how often a step of a cell copies to the device, and to the host. All cells are counted at once."""
    sides = [with_layers(each, count) for each in cells for count in (4, 8)]
    found = counted("dry_gpu/count.py", "cells", "--sides", *sides)["cells"][with_layers(cell, layers)]
    assert "error" not in found, found
    return [found[step]["copies"][name] for name in ("memcpyHtoD", "memcpyDtoH")]


@pytest.mark.parametrize("cell", [*QUICK, *slow(*SLOW)])
def test_weights_moments_and_rates_stay_on_the_device(cell):
    """What only a branch knows, MindSpore copies to the host and back in each step; so it is in its own cell."""
    cells = QUICK if cell in QUICK else SLOW
    for step in ("applied", "overflow"):
        few, many = (copies(cells, cell, layers, step) for layers in (4, 8))
        # Of each of four layers more, a weight and a bias at least; single numbers are copied by other ways, too.
        assert all(of_many < of_few + 8 for of_few, of_many in zip(few, many))


@pytest.mark.slow
def test_those_of_mindspores_cell_do_not():
    few, many = (copies(("stock",), "stock", layers, "applied") for layers in (4, 8))
    # Of each layer a weight, a bias and their moments.
    assert many[0] - few[0] >= 16 and many[1] - few[1] >= 16
