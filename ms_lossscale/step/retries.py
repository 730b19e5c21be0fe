"""A step that tries a call again at a lower scale while it overflows."""

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import any_of
from ms_lossscale.step.copied_inputs import copy_inputs
from ms_lossscale.step.step import Step


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
        first = attempt_of(call, auxes, grads, found)
        packed = as_one_tuple(first)
        left = self._max_retries
        while prim.logical_and(again, prim.greater(left, self._zero)):
            failed = from_one_tuple(packed, first)
            self.transaction.scales.tell_retry(failed["scales"][0], prim.equal(left, self._max_retries))
            left = prim.sub(left, self._one)
            scales = self.attempts.back_off(failed["scales"][0], failed["found"][-1], saved)
            inputs = copy_inputs(ops.depend(kept, scales))
            retried, auxes_of_retry = self.networks_run(scales, inputs, saved)
            grads_of_retry, found_in_retry, again = self.check_attempt(retried)
            packed = as_one_tuple(attempt_of(retried, auxes_of_retry, grads_of_retry, found_in_retry))
        last = from_one_tuple(packed, first)
        return last["losses"][0], last["auxes"], self.end_of_attempts(last, saved), last["scales"][0]


class Attempts(nn.Cell):
    """Judges the attempts of a call, and ends it with the last one."""

    def __init__(self, transaction, unscaled_losses):
        super().__init__(auto_prefix=False)
        self.transaction = transaction
        self._unscaled_losses = tuple(unscaled_losses)

    def check(self, call):
        """
        Checks an attempt. Returns its gradients, tuples of what was found, and whether another attempt may succeed.
        """
        grads, verdict = self.transaction.prepare_and_judge(call)
        verdict["overflows"] = self.transaction.on_any_rank(verdict["overflows"])
        can_mend = self.transaction.scales.can_back_off(call["scales"], verdict["overflows"])
        is_hopeless = any_of((prim.logical_not(can_mend),) + self._beyond_mending(call, verdict))
        (is_hopeless,) = self.transaction.on_any_rank((is_hopeless,))
        # Not the dict: the Python interpreter would make it in every call, and on a GPU MindSpore fails at that.
        return grads, _found_in(verdict), prim.logical_not(is_hopeless)

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

    def conclude(self, attempt, saved):
        """Ends a call with its last attempt."""
        call = {"scales": attempt["scales"][0], "losses": attempt["losses"][0]}
        # In nested branches, compiled code takes items of a passed tuple for numbers, and then those of other tuples
        # that go through the same function, too. The gradients are float32 already.
        found = attempt["found"]
        verdict = {"overflows": _as_new_tuple(found[-1])}
        if "loss_weights" in attempt:
            call["loss_weights"] = attempt["loss_weights"][0]
            verdict["impossible_weights"] = _as_new_tuple(found[0])
        if len(saved) > 0:
            call["saved"] = saved
            if self.transaction.forward_state.is_judged():
                verdict["state_not_finite"] = found[-2][0]
        return self.transaction.conclude(gradients.to_float32(attempt["gradients"]), verdict, call)


def _found_in(verdict):
    """Returns tuples of flags: of the losses' weights and of what the forward wrote, if known, and of the scales."""
    found = ()
    if "impossible_weights" in verdict:
        found = (*found, verdict["impossible_weights"])
    if "state_not_finite" in verdict:
        found = (*found, (verdict["state_not_finite"],))
    return (*found, verdict["overflows"])


def attempt_of(call, auxes, grads, found):
    """Returns what is needed of an attempt: by name, tuples of tuples of Tensors."""
    attempt = {"losses": (call["losses"],), "scales": (call["scales"],), "gradients": grads, "auxes": auxes}
    if "loss_weights" in call:
        attempt["loss_weights"] = (call["loss_weights"],)
    attempt["found"] = found
    return attempt


# In a loop, graph mode forgets the length of a tuple whose Tensors are all of one type and shape. So an attempt goes
# through it as one flat tuple, with bools, what was found, at its end: were they at its beginning, MindSpore would
# never free the training cell.
_ORDER = ("losses", "scales", "gradients", "auxes", "loss_weights", "found")


def as_one_tuple(attempt):
    """Returns the Tensors of an attempt."""
    return gradients.flat(_parts_of(attempt))


def from_one_tuple(tensors, like):
    """Returns the attempt that has these Tensors, as many of each name as another one."""
    parts = gradients.parted(tensors, _lengths_of(_parts_of(like)))
    attempt = {}
    for name in _ORDER:
        if name in like:
            attempt[name] = parts[: len(like[name])]
            parts = parts[len(like[name]) :]
    return attempt


def _parts_of(attempt):
    parts = ()
    for name in _ORDER:
        if name in attempt:
            parts = parts + attempt[name]
    return parts
