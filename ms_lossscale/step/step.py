"""A training step: the scaled forward and backward of its networks, and a transaction around it."""

from mindspore import nn

from ms_lossscale.step.accumulation import compiled_flush


class Step(nn.Cell):
    """
    Runs N networks, and updates with N optimizers.

    Returns the tuples of losses and of aux, whether the step was skipped, and the scales that were used.

    Args:
        transaction (Transaction): What begins and ends it.
        networks_run (NetworksRun): What runs its networks.
        in_one_graph (Callable): Makes one graph of a method in PyNative mode, too.
    """

    def __init__(self, transaction, networks_run, in_one_graph):
        super().__init__(auto_prefix=False)
        self.transaction = transaction
        self.networks_run = networks_run
        self.flush_cycle = compiled_flush(transaction, in_one_graph)
        self._in_one_graph = in_one_graph
        self._compiled_apart = {}
        self._known_settings = transaction.scales.times_set()
        self.compile_apart(end_of_call=transaction.end_of_call)

    def compile_apart(self, **methods):
        """Makes one graph of each method in PyNative mode, too, as an attribute of this name."""
        self._compiled_apart.update(methods)
        for name, method in methods.items():
            setattr(self, name, self._in_one_graph(method))

    def changes(self):
        """Looks, before a call, whether a loss scale was set. Returns whether the step has become another one."""
        times_set = self.transaction.scales.times_set()
        if self._known_settings == times_set:
            return False
        self._known_settings = times_set
        return self._follow_scales()

    def _follow_scales(self):
        """Becomes what the present loss scales ask for. Returns whether it was something else."""
        transaction = self.transaction
        unscales_in_update = transaction.may_unscale_in_update()
        if transaction.unscales_in_update == unscales_in_update:
            return False
        transaction.unscales_in_update = unscales_in_update
        # Compiled code does not notice that an attribute has changed.
        self.compile_apart(**self._compiled_apart)
        return True

    def construct(self, *inputs):
        scales, inputs, saved = self.transaction.begin(inputs)
        call, auxes = self.networks_run(scales, inputs, saved)
        return call["losses"], auxes, self.end_of_call(call), scales
