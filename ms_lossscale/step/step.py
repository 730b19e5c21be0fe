"""A training step: the scaled forward and backward of its networks, and a transaction around it, where it needs one."""

from mindspore import Tensor, nn, ops

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._memory_in_use import hide_all_parameters
from ms_lossscale._mindspore.graphs import is_compiling
from ms_lossscale.step.accumulation import compiled_flush
from ms_lossscale.step.returned import ReturnedValues


@gradients.of_one("Tensor")
def _copy_input(tensor):
    return prim.deepcopy(tensor)


@_copy_input.register("Number")
def _copy_number(number):
    return number


@_copy_input.register("String")
def _copy_string(string):
    return string


@_copy_input.register("None")
def _copy_none(none):
    return none


_copy_inputs = ops.HyperMap(_copy_input)


def copy_inputs(inputs):
    """Returns the inputs of a network, with copies of the Tensors among them, also of those in tuples and lists."""
    return _copy_inputs(inputs) if is_compiling() else _copied_in_python(inputs)


def _copied_in_python(value):
    if isinstance(value, Tensor):
        return prim.deepcopy(value)
    if type(value) in (tuple, list):
        return type(value)(map(_copied_in_python, value))
    if type(value) is dict:
        return {key: _copied_in_python(item) for key, item in value.items()}
    return value


class Step(nn.Cell):
    """
    Runs N networks, and updates with N optimizers. It may be one of several steps that a cell makes in a call. In
    PyNative mode, a later one may raise: then those before can return once more what they returned, instead of making
    another step.

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
        self.hold(False)

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

    def hold(self, holds=True, results=None):
        """Has it return the same results until `forget_results`: the given ones, or those of its next call."""
        object.__setattr__(self, "_holds", holds)
        object.__setattr__(self, "results", results)

    def forget_results(self):
        """Has the next call make a step."""
        object.__setattr__(self, "results", None)

    def __call__(self, *inputs):
        # Graph mode does not come here.
        if self.results is not None:
            return self.results
        results = super().__call__(*inputs)
        if self._holds:
            object.__setattr__(self, "results", results)
        return results

    def construct(self, *inputs):
        scales, inputs, saved = self.transaction.begin(inputs)
        call, auxes = self.networks_run(scales, inputs, saved)
        return call["losses"], auxes, self.end_of_call(call), scales

    def make_trial(self):
        """Makes what tells whether a batch would overflow at the present scale."""
        return Trial(self.transaction, self.networks_run)


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
        results = self.networks_run(scales, ops.depend(inputs, saved), saved)
        checked = self.transaction.check(results[0], measures=False)
        overflows = self.transaction.on_any_rank(checked[1]["overflows"])
        return ops.depend(overflows, self.transaction.forward_state.restore_call(saved))


class UnscaledEnd(nn.Cell):
    """Ends a call that neither scales nor checks. Returns that its step is not skipped, and its scale."""

    def __init__(self, plan, counters):
        super().__init__(auto_prefix=False)
        self.optimizer = plan.optimizers[0]
        self.loss_scale = plan.loss_scales[0]
        self.counters = counters
        self._reduce = plan.grad_reducer

    def construct(self, grads):
        grads = grads if self._reduce is None else self._reduce(grads)
        applied_steps = ops.depend(self.counters.count_applied(), self.optimizer(grads))
        return gradients.never(applied_steps), prim.deepcopy(self.loss_scale.scale_value)


class UnscaledStep(Step):
    """
    Trains one network as MindSpore's own training cell does, and counts the step. Once its loss scale is no longer 1,
    since a user has set or loaded another one, it is the step that scales.
    """

    # Not by `super()`, which graph mode takes for that of the object's own class.
    scaled_step = Step.construct

    def __init__(self, plan, transaction, networks_run, in_one_graph):
        super().__init__(transaction, networks_run, in_one_graph)
        self.network = plan.networks[0]
        self.loss_scale = plan.loss_scales[0]
        self._is_scaled = False
        self._returned_values = ReturnedValues(plan.owner, plan.number, may_be_tuple=plan.may_return_tuple)
        self._value_and_grad = ops.value_and_grad(self._loss, None, plan.weights[0])
        self.end_of_unscaled_call = in_one_graph(UnscaledEnd(plan, transaction.counters).construct)

    def _follow_scales(self):
        was_scaled = self._is_scaled
        self._is_scaled = self.loss_scale.get_loss_scale() != 1
        return super()._follow_scales() or self._is_scaled != was_scaled

    def _loss(self, *inputs):
        output = self.network(*inputs)
        loss = output if isinstance(output, Tensor) else self._returned_values(output)[0]
        # A copy, since the update changes what a network returns that is a weight.
        return prim.deepcopy(self._returned_values.look_at(loss))

    def construct(self, *inputs):
        if self._is_scaled:
            return self.scaled_step(*inputs)
        loss, grads = self._value_and_grad(*inputs)
        skipped, scale = self.end_of_unscaled_call(ops.depend(grads, loss))
        return (loss,), ((),), skipped, (scale,)
