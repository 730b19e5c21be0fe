"""A call that makes no step."""

from mindspore import nn, ops

from ms_lossscale import _primitives as prim
from ms_lossscale._memory_in_use import hide_all_parameters
from ms_lossscale.step.copied_inputs import copy_inputs


class Trial(nn.Cell):
    """
    Runs a batch forward and backward at the present loss scale, undoes it, and updates nothing. Returns for each scale
    whether an overflow was found.
    """

    def __init__(self, transaction, networks_run):
        super().__init__(auto_prefix=False)
        self.transaction = transaction
        self.networks_run = networks_run
        hide_all_parameters(self)

    def __call__(self, *inputs):
        self.transaction.forward_state.remember()
        return super().__call__(*inputs)

    def construct(self, *inputs):
        inputs = copy_inputs(ops.depend(inputs, self._all_parameters))
        saved = self.transaction.forward_state.copied()
        scales = ()
        for loss_scale in self.transaction.scales.loss_scales:
            scales = (*scales, prim.deepcopy(loss_scale.scale_value))
        # Not unpacked: graph mode would warn of what nobody uses.
        results = self.networks_run(scales, self.transaction.forward_state.wait(inputs, saved), saved)
        judged = self.transaction.prepare_and_judge(results[0], measures=False)
        overflows = self.transaction.on_any_rank(judged[1]["overflows"])
        return ops.depend(overflows, self.transaction.forward_state.restore_call(saved))
