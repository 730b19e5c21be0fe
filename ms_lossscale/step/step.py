"""A training step: the scaled forward and backward of its networks, and a transaction around it."""

from mindspore import nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale._mindspore.graphs import GraphOfMethod


class HeldStep(nn.Cell):
    """
    Base class of steps, one of several that a cell makes in a call. In PyNative mode, a later one may raise: then those
    before can return once more what they returned, instead of making another step.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.hold(False)

    def hold(self, holds=True, results=None):
        """Has it return the same results until `forget_results`: the given ones, or those of its next call."""
        object.__setattr__(self, "_holds", holds)
        object.__setattr__(self, "_results", results)

    def forget_results(self):
        """Has the next call make a step."""
        object.__setattr__(self, "_results", None)

    @property
    def results(self):
        """The results that the next call returns, None if it makes a step."""
        return self._results

    def __call__(self, *inputs):
        # Graph mode does not come here.
        if self._results is not None:
            return self._results
        results = super().__call__(*inputs)
        if self._holds:
            object.__setattr__(self, "_results", results)
        return results


class Step(HeldStep):
    """
    Runs N networks, and updates with N optimizers.

    Returns the tuples of losses and of aux, whether the step was skipped, and the scales that were used.

    Args:
        transaction (Transaction): What begins and ends it.
        networks_run (NetworksRun): What runs its networks.
        in_one_graph (Callable): Makes one graph of a method in PyNative mode, too.
    """

    def __init__(self, transaction, networks_run, in_one_graph):
        super().__init__()
        self.transaction = transaction
        self.networks_run = networks_run
        self._in_one_graph = in_one_graph
        self.flush_cycle = None
        if transaction.cycle is not None:
            self.flush_cycle = in_one_graph(GraphOfMethod(transaction.flush).construct)
        self.end_of_call = in_one_graph(transaction.end_of_call)

    def construct(self, *inputs):
        scales, inputs, saved = self.transaction.begin(inputs)
        call, auxes = self.networks_run(scales, inputs, saved)
        return call["losses"], auxes, self.end_of_call(call), scales

    def make_trial(self):
        """Makes what tells whether a batch would overflow at the present scale."""
        return Trial(self.transaction, self.networks_run, self._in_one_graph)


class Trial(nn.Cell):
    """
    Runs a batch forward and backward at the present loss scale, undoes it, and updates nothing. Returns for each scale
    whether an overflow was found.
    """

    def __init__(self, transaction, networks_run, in_one_graph):
        super().__init__(auto_prefix=False)
        self.transaction = transaction
        self.networks_run = networks_run
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))
        self.find_overflows = in_one_graph(transaction.find_overflows)

    def __call__(self, *inputs):
        self.transaction.forward_state.remember()
        return super().__call__(*inputs)

    def construct(self, *inputs):
        inputs = gradients.copy_inputs(self.use_parameters(inputs))
        saved = self.transaction.forward_state.copied()
        scales = ()
        for loss_scale in self.transaction.scales.loss_scales:
            scales = (*scales, prim.deepcopy(loss_scale.scale_value))
        call, _ = self.networks_run(scales, ops.depend(inputs, saved), saved)
        overflows = self.find_overflows(call)
        return ops.depend(overflows, self.transaction.forward_state.restore_call(saved))
