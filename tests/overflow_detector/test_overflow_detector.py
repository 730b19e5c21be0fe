"""Overflow detectors: what a training cell asks, when it asks, and which one is right for the device."""

import inspect

import numpy as np
import pytest
from conftest import quick_in_graph_mode, quick_in_pynative_mode, slow
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.ops.operations.math_ops import NPUClearFloatStatusV2, NPUGetFloatStatusV2
from support.networks import FEATURES, Linear, batch, overflowing_batch, weight
from support.training import by_sgd

import ms_lossscale as ls

# What it reads of MindSpore no device here shows.
from ms_lossscale._mindspore.overflow_status import DeviceOverflowCheck


def cell_of(network, detector=None, loss_scale=1024, steps=1):
    return by_sgd(network, loss_scale, overflow_detector=detector, gradient_accumulation_steps=steps)


class Answers(ls.OverflowDetector):
    """Gives one answer, whatever the gradients are."""

    def __init__(self, answer):
        super().__init__()
        self.answer = Tensor(np.array(answer))

    def construct(self, grads):
        return ops.depend(self.answer, grads)


class Averaging(ls.FiniteGradients):
    """Adds up the size of gradients, and of inputs, before it says whether they are finite, or what it is told."""

    def __init__(self, answer=None):
        super().__init__()
        self.sum_of_inputs = Parameter(Tensor(0.0), name="detector.inputs", requires_grad=False)
        self.sum_of_gradients = Parameter(Tensor(0.0), name="detector.gradients", requires_grad=False)
        self.answer = answer

    def start(self, inputs):
        largest = ops.ReduceMax()(ops.abs(inputs[0]))
        return ops.depend(inputs, ops.assign(self.sum_of_inputs, self.sum_of_inputs + largest))

    def construct(self, grads):
        ops.assign(self.sum_of_gradients, self.sum_of_gradients + ops.ReduceMax()(ops.abs(grads[0])))
        found = super().construct(grads)
        return found if self.answer is None else ops.depend(self.answer, found)

    def sums(self):
        return [self.sum_of_inputs.asnumpy().item(), self.sum_of_gradients.asnumpy().item()]


class OtherThanTwo(ls.OverflowDetector):
    """An overflow is another number of gradients than two."""

    def __init__(self):
        super().__init__()
        self.yes, self.no = Tensor(True), Tensor(False)

    def construct(self, grads):
        return ops.depend(self.no if len(grads) == 2 else self.yes, grads)


class TwoEqualWeights(nn.Cell):
    def __init__(self):
        super().__init__()
        self.first, self.second = (weight(FEATURES, 1, name=f"w{i}") for i in range(2))

    def construct(self, x, y):
        return ops.square(ops.matmul(x, self.first) + ops.matmul(x, self.second) - y).mean()


class TestADetectorOfTheUser:
    """The configurations draw one without state."""

    @quick_in_pynative_mode
    def test_is_not_asked_where_overflows_are_not_dropped(self, mode):
        cell = cell_of(Linear(), Answers(True), ls.FixedLossScale(1024, drop_overflow_update=False))
        assert not bool(cell(*batch())[1])

    @quick_in_pynative_mode
    def test_is_given_each_weights_own_gradient(self, mode):
        """Also where the package's own would get those of one shape as one tensor."""
        assert not bool(cell_of(TwoEqualWeights(), OtherThanTwo())(*batch())[1])

    @quick_in_graph_mode
    @pytest.mark.parametrize("steps", [2, *slow(1)])
    def test_what_it_writes_is_undone_by_a_skipped_step(self, mode, steps):
        detector = Averaging()
        cell = cell_of(Linear(), detector, ls.DynamicLossScale(2.0**10), steps)
        for _ in range(steps):
            cell(*batch())
        before = detector.sums()
        assert min(before) > 0 and max(before) < np.inf
        cell.find_loss_scale(*batch())
        for seed in range(steps):
            cell(*overflowing_batch(seed))
        assert detector.sums() == before
        assert {"detector.inputs", "detector.gradients"} <= set(cell.forward_state_names())
        cell(*batch())
        cell.flush()
        assert max(detector.sums()) < np.inf and min(detector.sums()) > 0 and detector.sums() != before
        assert cell.counters() == {"applied_steps": 2, "skipped_steps": 1, "consecutive_skipped_steps": 0}

    @quick_in_pynative_mode
    @pytest.mark.parametrize("steps", [1, 2])
    def test_what_it_writes_is_no_sign_of_an_overflow(self, mode, steps):
        detector = Averaging(Tensor(False))
        cell = cell_of(Linear(), detector, steps=steps)
        assert not any(bool(cell(*overflowing_batch())[1]) for _ in range(2 * steps))
        assert not np.isfinite(detector.sums()).any()

    @quick_in_pynative_mode
    @pytest.mark.parametrize("answer, steps", [([1], 2), ([[1.5]], 1), (True, 2), (1, 1), (np.nan, 2)], ids=str)
    def test_one_element_of_any_shape_and_dtype_is_an_answer(self, mode, answer, steps):
        for value, overflow in ((answer, True), (np.zeros_like(answer), False)):
            cell = cell_of(Linear(), Answers(value), steps=steps)
            for _ in range(steps):
                reported = cell(*batch())[1]
                assert (reported.dtype, reported.shape, bool(reported)) == (mstype.bool_, (), overflow)
            assert cell.counters()["skipped_steps"] == overflow


class WhichBranch(DeviceOverflowCheck):
    """Says which of its own checks MindSpore's `get_overflow_status` chooses."""

    def _get_gpu_overflow_status(self, compute_output):
        return "gpu"

    def _get_ascend_overflow_status_on_infnan_mode(self, compute_output):
        return "infnan"

    def _get_ascend_overflow_status_on_saturation_mode(self, status, compute_output):
        return "saturation"


class TestWhatIsReadOfMindSpore:
    """On GPU and Ascend the check is MindSpore's own. These tests notice when it renames what we read of it."""

    @pytest.mark.parametrize("value", ["SATURATION_MODE", "INFNAN_MODE"])
    def test_the_environment_variable(self, monkeypatch, value):
        monkeypatch.setenv("MS_ASCEND_CHECK_OVERFLOW_MODE", value)
        assert DeviceOverflowCheck()._ascend_check_overflow_mode == value

    # Whether it is a GPU, whether an NPU later than 910A, and its mode.
    @pytest.mark.parametrize(
        "gpu, later, overflow_mode, saturates",
        [
            (True, False, None, False),
            (True, True, "SATURATION_MODE", False),
            (False, False, None, True),
            (False, False, "INFNAN_MODE", True),
            (False, True, None, False),
            (False, True, "INFNAN_MODE", False),
            (False, True, "SATURATION_MODE", True),
        ],
    )
    def test_saturates_agrees_with_the_check_that_mindspore_chooses(self, gpu, later, overflow_mode, saturates):
        check = WhichBranch()
        check.gpu_target, check.ascend_910b_target = gpu, later
        check._ascend_check_overflow_mode = overflow_mode
        assert check.saturates == saturates
        chosen = check.get_overflow_status(None, ())
        assert (chosen == "saturation") == saturates
        assert (chosen == "gpu") == gpu

    @pytest.mark.parametrize("operator", [NPUGetFloatStatusV2, NPUClearFloatStatusV2])
    def test_the_npu_operators_take_one_input_and_give_one_output(self, operator):
        assert list(inspect.signature(operator.__init__).parameters) == ["self"]
        assert operator().init_attrs == {}
        if hasattr(operator(), "input_names"):
            assert len(operator().input_names) == len(operator().output_names) == 1
