"""A step that tries a call again at a lower scale while it overflows."""

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import any_of
from ms_lossscale.step.step import Step, copy_inputs


def _as_new_tuple(items):
    """Returns the items of a tuple in another one."""
    result = ()
    for item in items:
        result = (*result, item)
    return result


def _lengths_of(tuples):
    """Returns the lengths of tuples."""
    result = ()
    for items in tuples:
        result = (*result, len(items))
    return result


class RetriedStep(Step):
    """
    A step whose networks run again at a lower scale while they overflow, a lower scale can help, and retries are left.
    Each attempt that overflows counts as an overflow for the update rule.

    Args:
        transaction (Transaction): What begins and ends it.
        networks_run (NetworksRun): What runs its networks.
        in_one_graph (Callable): Makes one graph of a method in PyNative mode, too.
        max_retries (int): How many times it tries again.
        unscaled_losses (Sequence[int]): The losses that no scale takes part in, so that a lower one can't make them
            finite.
    """

    def __init__(self, transaction, networks_run, in_one_graph, max_retries, unscaled_losses):
        super().__init__(transaction, networks_run, in_one_graph)
        self.attempts = Attempts(transaction, unscaled_losses)
        self.compile_apart(check_attempt=self.attempts.check, end_of_attempts=self.attempts.conclude)
        self._max_retries = Tensor(max_retries, mstype.int32)
        self._zero = Tensor(0, mstype.int32)
        self._one = Tensor(1, mstype.int32)

    def construct(self, *inputs):
        scales, inputs, saved = self.transaction.begin(inputs)
        # The networks may write to their inputs.
        kept = copy_inputs(inputs)
        # The call of the networks is written twice: MindSpore can't compile a method with it that is called twice.
        call, auxes = self.networks_run(scales, ops.depend(inputs, kept), saved)
        grads, found, again = self.check_attempt(call)
        parts = parts_of(call, auxes, grads, found)
        lengths = _lengths_of(parts)
        packed = gradients.flat(parts)
        left = self._max_retries
        while prim.logical_and(again, prim.greater(left, self._zero)):
            scales, overflows = scales_and_overflows(gradients.parted(packed, lengths))
            self.transaction.scales.tell_retry(scales, prim.equal(left, self._max_retries))
            left = prim.sub(left, self._one)
            scales = self.attempts.back_off(scales, overflows, saved)
            inputs = copy_inputs(ops.depend(kept, scales))
            retried, auxes_of_retry = self.networks_run(scales, inputs, saved)
            grads_of_retry, found_in_retry, again = self.check_attempt(retried)
            packed = gradients.flat(parts_of(retried, auxes_of_retry, grads_of_retry, found_in_retry))
        call, auxes, grads, verdict = from_parts(gradients.parted(packed, lengths), call, auxes, found)
        return call["losses"], auxes, self.end_of_attempts(grads, verdict, call), call["scales"]


class Attempts(nn.Cell):
    """Judges the attempts of a call, and ends it with the last one."""

    def __init__(self, transaction, unscaled_losses):
        super().__init__(auto_prefix=False)
        self.transaction = transaction
        self._unscaled_losses = tuple(unscaled_losses)

    def check(self, call):
        """
        Checks an attempt. Returns its gradients, what was found, as `flags_of` lists it, and whether another attempt
        may succeed.
        """
        grads, verdict = self.transaction.check(call)
        verdict["overflows"] = self.transaction.on_any_rank(verdict["overflows"])
        can_mend = self.transaction.scales.can_back_off(call["scales"], verdict["overflows"])
        is_hopeless = any_of((prim.logical_not(can_mend),) + self._beyond_mending(call, verdict))
        (is_hopeless,) = self.transaction.on_any_rank((is_hopeless,))
        # Not the dict: the Python interpreter would make it in every call, and on a GPU MindSpore fails at that.
        return grads, flags_of(verdict), prim.logical_not(is_hopeless)

    def _beyond_mending(self, call, verdict):
        """Returns flags of what no lower scale mends."""
        flags = ()
        if "impossible_weights" in verdict:
            flags += verdict["impossible_weights"]
        if "state_not_finite" in verdict:
            flags = (*flags, verdict["state_not_finite"])
        for i in self._unscaled_losses:
            flags = (*flags, prim.logical_not(gradients.is_finite(call["losses"][i])))
        flags += self.transaction.lost_already(call["scales"])
        return flags

    def back_off(self, scales, overflows, saved):
        """Undoes an attempt, and lowers the scales that overflowed. Returns those of the next attempt."""
        transaction = self.transaction
        done = ops.depend(transaction.counters.count_retry(), transaction.forward_state.restore_call(saved))
        backed_off = transaction.scales.back_off(scales, overflows)
        return ops.depend(transaction.scales.now(), (done, backed_off))

    def conclude(self, grads, verdict, call):
        """Ends a call with its last attempt."""
        # In nested branches, compiled code takes items of a passed tuple for numbers, and then those of other tuples
        # that go through the same function, too. The gradients are float32 already.
        found = {"overflows": _as_new_tuple(verdict["overflows"])}
        if "impossible_weights" in verdict:
            found["impossible_weights"] = _as_new_tuple(verdict["impossible_weights"])
        if "state_not_finite" in verdict:
            found["state_not_finite"] = verdict["state_not_finite"]
        return self.transaction.conclude(gradients.to_float32(grads), found, call)


# In a loop, graph mode forgets the length of a tuple whose Tensors are all of one type and shape. So an attempt goes
# through it as one flat tuple, with bools at its end, and is taken apart by the lengths of its parts. Were the bools at
# its beginning, MindSpore would never free the training cell. The parts, of which those in brackets may not be there:
# losses, scales, gradients of each network, aux of each network, [weights of the losses],
# [which weights are impossible], [whether what the forward wrote is not finite], overflows.


def flags_of(verdict):
    """
    Returns what a check has found that is needed of an attempt, tuples of flags: those of the losses' weights, and that
    of what the forward wrote, if they are known, and at the end those of the scales.
    """
    found = ()
    if "impossible_weights" in verdict:
        found = (*found, verdict["impossible_weights"])
    if "state_not_finite" in verdict:
        found = (*found, (verdict["state_not_finite"],))
    return (*found, verdict["overflows"])


def parts_of(call, auxes, grads, found):
    """
    Returns what is needed of an attempt, tuples of Tensors: losses, scales, the gradients and the aux of each network,
    the losses' weights, if they have some, and what was found.
    """
    parts = (call["losses"], call["scales"]) + grads + auxes
    if "loss_weights" in call:
        parts = (*parts, call["loss_weights"])
    return parts + found


def scales_and_overflows(parts):
    """Returns these two of the parts of an attempt."""
    return parts[1], parts[-1]


def from_parts(parts, call, auxes, found):
    """
    Returns the call, aux, gradients and verdict that have these parts; what another attempt ran and found tells which
    there are.
    """
    end_of_grads = 2 + len(call["gradients"])
    end_of_auxes = end_of_grads + len(auxes)
    has_weights = "loss_weights" in call
    of_parts = {"losses": parts[0], "scales": parts[1]}
    verdict = {"overflows": parts[-1]}
    if "saved" in call:
        of_parts["saved"] = call["saved"]
    if has_weights:
        of_parts["loss_weights"] = parts[end_of_auxes]
        verdict["impossible_weights"] = parts[end_of_auxes + 1]
    if len(found) > (2 if has_weights else 1):
        verdict["state_not_finite"] = parts[-2][0]
    return of_parts, parts[end_of_grads:end_of_auxes], parts[2:end_of_grads], verdict
