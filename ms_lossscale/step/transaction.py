"""What of a training step does not depend on its networks: how it begins, and that it happens as a whole or not."""

import itertools

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import _gradients as gradients
from ms_lossscale import _primitives as prim
from ms_lossscale._gradients import any_of, of_any_network, of_network
from ms_lossscale._memory_in_use import UseInOutermostGraph
from ms_lossscale._mindspore.cells import is_library_cell
from ms_lossscale._mindspore.graphs import only_if
from ms_lossscale.step.averages import MovingAverage
from ms_lossscale.step.clipping import Clip, Norm
from ms_lossscale.step.forward_state import make_forward_state
from ms_lossscale.step.optimizers import Optimizers, network_prefix
from ms_lossscale.step.overflow_check import OverflowCheck
from ms_lossscale.step.own_cells import Asked, OfEachNetwork, Transforms, state_of
from ms_lossscale.step.ranks import are_split
from ms_lossscale.step.state import Cycle, Scaling, StepCounters


class Transaction(nn.Cell):
    """
    A step of N optimizers, without the forward and backward.

    1. Read the scale once. 2. Copy what the forward will write. 3. (Forward and backward.) 4. Unscale. 5. Accumulate;
    all calls but the last of a cycle end here. 6. Reduce across ranks, transform, and measure norms. 7. One overflow
    check, and conditions. 8. One update of the scale. 9. One branch: clip and update, or undo.

    What a setting does not ask for is None, False or empty, and the code for it is not in the graph. A value or a flag
    of each loss scale is of shape (), or of shape (N,) if `loss_scales` is a list. Gradients, losses and weights are
    flat tuples. `weights` is empty if no loss has one, and `losses` if a ManualStep is given none.
    """

    def __init__(self, owner, networks, optimizers, loss_scales, settings, ranks, prefix="", is_manual=False):
        super().__init__(auto_prefix=False)
        weights = [optimizer.parameters for optimizer in optimizers]
        count, steps = len(weights), settings.gradient_accumulation_steps
        self._has_own_scales = isinstance(loss_scales, list)
        self.loss_scales = nn.CellList(loss_scales if self._has_own_scales else [loss_scales], auto_prefix=False)
        self.scale_shape = (len(self.loss_scales),) if self._has_own_scales else ()
        self.checks = self.loss_scales[0].drop_overflow_update
        self.may_skip = self.checks or len(settings.skip_conditions) > 0
        self.ranks, self._steps, self._share = ranks, Tensor(float(steps)), Tensor(1.0 / steps, mstype.float32)
        self._zero, self._one = Tensor(0.0, mstype.float32), Tensor(1.0, mstype.float32)
        # How many gradients each network has.
        self._lengths = tuple(map(len, weights))
        prefixes = [network_prefix(i) for i in range(count)] if count > 1 else [prefix]

        losses = 1 if is_manual else count
        self.overflow_check = OverflowCheck(
            networks, weights, list(self.loss_scales), settings, losses, self.scale_shape
        )
        # The optimizer's cast to float16 comes after the overflow check.
        casts = tuple(its.dtype == mstype.float16 for its in itertools.chain(*weights))
        self._become_float16 = casts if self.checks and any(casts) else ()
        self.detector, self.unscaled_losses = self.overflow_check.detector, ()
        # Of a ManualStep, each cycle shows whether its losses have weights.
        self._has_weights = is_manual or any(settings.weighted)
        self._all_weighted = is_manual or all(settings.weighted)
        self._weighted = Tensor(np.array(settings.weighted, np.float32))
        self.cycle = None
        if steps > 1:
            needs_loss = any(condition.needs_loss for condition in settings.skip_conditions)
            weighted, losses = None if is_manual else self._has_weights, losses if needs_loss else 0
            is_patient = self.overflow_check.is_patient
            self.cycle = Cycle(steps, weights, prefixes, prefix, self.scale_shape, weighted, losses, is_patient)
        of_scales = prefixes if self._has_own_scales else [prefix]
        may_move = is_manual or steps > 1
        scalings = [Scaling(its, self.cycle, of, may_move) for its, of in zip(self.loss_scales, of_scales)]
        self.scalings = nn.CellList(scalings, auto_prefix=False)
        self._set_forward_state(owner, networks, settings, prefix)
        self._set_stages(owner, optimizers, weights, settings, prefixes)
        flat = list(itertools.chain(*weights))
        self.counters = StepCounters(flat, prefix, settings.max_retries > 0, len(settings.skip_conditions) > 0)
        self.use_parameters = UseInOutermostGraph(list(self.get_parameters()))

    def _set_forward_state(self, owner, networks, settings, prefix):
        # Like the forward, transforms, detectors and conditions run before the verdict, so what they write is restored.
        own = [cell for cell in (self.detector, *settings.skip_conditions) if not is_library_cell(cell)]
        own = [*dict.fromkeys(itertools.chain(*settings.gradient_transforms)), *own]
        its_state = state_of(own, networks)
        self.forward_state = make_forward_state(
            owner, (*networks, *own), settings.forward_state, its_state, self.may_skip, self.checks, self.cycle, prefix
        )

    def _set_stages(self, owner, optimizers, weights, settings, prefixes):
        split = [are_split(self.ranks, its) for its in weights]
        of_each = zip(settings.clip_norm, settings.clip_value, split, prefixes)
        clips = [Clip(norm, value, self.ranks, *others) for norm, value, *others in of_each]
        clips_any = any(its is not None for its in (*settings.clip_norm, *settings.clip_value))
        self.clips = nn.CellList(clips, auto_prefix=False)
        self.clip = OfEachNetwork.of(clips, self._lengths) if clips_any else None
        transforms = [Transforms(owner, its) for its in settings.gradient_transforms]
        self.transform = OfEachNetwork.of(transforms, self._lengths) if any(settings.gradient_transforms) else None
        conditions = [Asked(its, "whether to skip the step") for its in settings.skip_conditions]
        self.conditions = nn.CellList(conditions, auto_prefix=False)
        self._norm = Norm(self.ranks, sum(split, ())) if conditions else None
        self.optimizers = Optimizers(optimizers)
        self._optimizer = self.optimizers.only
        self.after_update = settings.after_update
        averages = [MovingAverage(decay, its) for decay, its in zip(settings.ema_decay, weights) if decay is not None]
        self.averages = nn.CellList(averages, auto_prefix=False)

    def begin(self, inputs):
        """Begins a step. Returns its scale, the inputs, which wait for what is copied, and the copies."""
        inputs, saved = self.forward_state(inputs)  # 2. Copy what the forward will write.
        return self.read_scale(), inputs, saved

    def read_scale(self):
        """Returns the scale of a call that begins."""
        if not self._has_own_scales:
            return self.scalings[0].read()
        scales = ()
        for scaling in self.scalings:
            scales += (scaling.read(),)
        return prim.stack(scales)

    def end_of_call(self, grads, losses, weights, scale, saved):
        """Ends a call, given its scaled gradients. Returns whether it, or its cycle so far, is skipped."""
        grads, overflow, are_finite, evidence = self.check(grads, weights, scale, saved, True)
        return self.end(grads, overflow, are_finite, evidence, losses, weights, scale, saved)

    def check(self, grads, weights, scale, saved, measures):
        """
        Unscales and checks a call. Returns its gradients, prepared for the optimizers if it is a step; whether it
        overflowed; whether each gradient is finite, if that is known; and what else shows an overflow, flags: whether
        a weight can't be one, and whether what the forward wrote is not finite. Each is a tuple of one, or empty.
        """
        of_weights = (self.overflow_check.are_wrong(weights),) if self.checks and len(weights) > 0 else ()
        evidence = of_weights, self.forward_state.overflowed(saved)
        # 4. Unscale in float32, and divide by the calls of a cycle.
        if self._has_own_scales:
            grads = gradients.multiply_each(grads, self._for_each_gradient(prim.div(self._share, scale)))
        else:
            grads = gradients.multiply(grads, prim.div(self._share, scale))
        norms_finite = ()
        if self.cycle is None:
            grads = self._prepared(grads, weights)
            norms_finite = self._measured(grads) if measures else ()
        # 7. One overflow check.
        overflow, are_finite = self.overflow_check.find(grads, norms_finite, evidence)
        return grads, overflow, are_finite, evidence

    def end(self, grads, overflow, are_finite, evidence, losses, weights, scale, saved):
        """Ends a call that has been checked."""
        if self.cycle is None:
            return self._decide(grads, overflow, are_finite, evidence, losses, scale, saved)
        lost, spoilt = self.overflow_check.tell(losses, evidence, self.counters.skipped_steps)
        flags = (overflow, lost, spoilt)
        if self.overflow_check.is_patient:
            flags += (self.overflow_check.of_forward(losses, evidence, overflow),)
        if self.cycle.is_weighted is not None:
            is_unweighted = gradients.never(self.counters.skipped_steps)
            flags += (prim.logical_not(is_unweighted) if len(weights) > 0 else is_unweighted,)
        is_last = self.cycle.count.is_last()
        added = self.cycle.add(grads, weights if len(weights) > 0 else (self._one,) * len(self._lengths), losses, flags)
        if is_last:
            skipped = self._finish(ops.depend(scale, added), self.cycle.weights, saved)
        else:  # 5. Accumulate.
            skipped = of_any_network(gradients.copy((ops.depend(self.cycle.overflow, added),))[0])
            if len(saved) > 0:
                skipped = only_if(skipped, self.forward_state.restore_step, saved)
        return skipped

    def flush(self):
        """Ends a cycle before its last call. Returns whether it is skipped."""
        (scale,) = self.use_parameters((self._cycle_scale(),))
        if self.overflow_check.starts:  # Other work may have raised the register since the last call of the cycle.
            (scale,) = self.detector.start((scale,))
        return self._finish(scale, self.cycle.sums_of_weights(), ())

    def _finish(self, scale, weights, saved):
        """Ends a cycle. Each network's gradients are divided by its sum of weights, if there are any."""
        grads = ops.depend(self.cycle.gradients, scale)
        grads = self._prepared(grads, () if weights is None else gradients.copy(weights))
        norms_finite = self._measured(grads)
        overflow, are_finite = self.overflow_check.find(grads, norms_finite, ((), ()))
        overflow = prim.logical_or(overflow, self.cycle.overflow)
        skipped = self._decide(grads, overflow, are_finite, ((), ()), self.cycle.mean_loss(), scale, saved)
        return ops.depend(skipped, self.cycle.reset(skipped))

    def _decide(self, grads, overflow, are_finite, evidence, losses, scale, saved):
        """Ends a step: updates, or undoes."""
        overflow = self._agreed(overflow) if self.checks else overflow
        overflowed, still = of_any_network(overflow), ()
        if self.overflow_check.is_patient:
            if self.cycle is None:
                still += (self._agreed(self.overflow_check.of_forward(losses, evidence, overflow)),)
            else:
                still += (self._agreed(gradients.copy((self.cycle.forward_not_finite,))[0]),)
            still = (prim.logical_and(overflow, still[0]),)
        # 7. Conditions, where nothing overflowed.
        asked = () if self._norm is None else self._ask(overflowed, losses, grads)
        if len(asked) > 0:
            still += asked[:1]
        self._adjust(scale, overflow, still)  # 8. One update of the scale.
        if not self.may_skip:
            return ops.depend(overflowed, self._update(grads, asked))
        skips = any_of((overflowed,) + asked[:1])
        # 9. One branch.
        done = self._undo(grads, are_finite, evidence, losses, saved, asked) if skips else self._update(grads, asked)
        return ops.depend(skips, done)

    def _update(self, grads, asked):
        for average in self.averages:
            only_if(self.counters.none_applied(), average.begin)
        if self.clip is not None:
            grads = self.clip(grads)
        done = self._optimizer(grads)
        if self.after_update is not None:
            self.after_update()
        for average in self.averages:
            done = ops.depend(done, average())
        done = ops.depend(self.counters.count_applied(), done)
        for condition in self.conditions:
            done = ops.depend(done, condition.observe(asked[1], asked[2]))
        return done

    def _undo(self, grads, are_finite, evidence, losses, saved, asked):
        are_finite = are_finite[0] if len(are_finite) > 0 else gradients.each_finite(grads)
        if self.cycle is None:
            told = self.overflow_check.tell(losses, evidence, self.counters.skipped_steps)
        else:  # Copies: PyNative mode can't stack Parameters with Tensors.
            told = gradients.copy((self.cycle.lost, self.cycle.spoilt))
        # In one message.
        lost, spoilt = told if self.ranks is None else ops.unstack(self.ranks.agree(prim.stack(told)))
        done = self.counters.count_skipped(are_finite, lost, spoilt, asked[:1])
        # There may be nothing to restore, and graph mode warns of a call that does nothing if nobody uses its result.
        return ops.depend(done, self.forward_state.restore_step(saved))

    def _agreed(self, flag):
        return flag if self.ranks is None else self.ranks.agree(flag)

    def _for_each_gradient(self, values):
        """Returns the value of its network for each gradient, a flat tuple."""
        of_networks, of_each = ops.unstack(values), ()
        for i in range(len(self._lengths)):
            of_each += (of_networks[i],) * self._lengths[i]
        return of_each

    def _prepared(self, grads, weights):
        """Divides the gradients of a step by its sums of weights, reduces them across ranks and transforms them."""
        if len(weights) > 0:
            shares = self._shares(prim.stack(weights))
            if len(weights) == 1:
                grads = gradients.multiply(grads, shares.reshape(()))
            else:
                grads = gradients.multiply_each(grads, self._for_each_gradient(shares))
        if self.ranks is not None and self.ranks.grad_reducer is not None:
            grads = self.ranks.grad_reducer(grads)  # 6. Reduce the gradients across ranks.
        if self.transform is not None:
            grads = self.transform(grads)
        return gradients.infinite_as_float16(self._become_float16, grads) if self._become_float16 else grads

    def _shares(self, weights):
        """Returns what the gradients of each network, divided by the calls of a cycle, are multiplied by."""
        if self.ranks is not None and self._has_weights:
            reduced = self.ranks.sum_like_gradients(weights)
            if self.cycle is not None and self.cycle.is_weighted is not None:
                reduced = prim.select(self.cycle.is_weighted, reduced, weights)
            elif not self._all_weighted:
                reduced = prim.add(self._weighted * reduced, (self._one - self._weighted) * weights)
            weights = reduced
        # 0 if there is nothing in the mean; not where they are <= 0: a NaN must stay one.
        return prim.select(prim.equal(weights, self._zero), ops.zeros_like(weights), prim.div(self._steps, weights))

    def _measured(self, grads):
        """Measures the norms. Returns whether the gradients of each network whose norm is measured are finite."""
        return () if self.clip is None else self.clip.measure(grads)

    def _ask(self, overflowed, losses, grads):
        """Asks the conditions, unless the step overflowed. Returns the answer, the loss and the norm."""
        loss = gradients.sum_of_all(losses) if len(losses) > 0 else self._zero
        root, power = self._norm(grads)
        norm = prim.div(root, power)
        answer = gradients.never(norm)
        if not overflowed:
            answer = self._answers(loss, norm)
        return self._agreed(answer), loss, norm

    def _answers(self, loss, norm):
        answers = ()
        for condition in self.conditions:
            answers += (condition(loss, norm),)
        return any_of(answers)

    def _adjust(self, scale, overflow, still):
        """Updates the scales. In a step that overflowed, those of networks whose gradients did not stay."""
        if not self._has_own_scales and len(still) == 0:
            return self.scalings[0].advance(scale, overflow)
        moves = prim.logical_or(overflow, prim.logical_not(of_any_network(overflow)))
        for flag in still:
            moves = prim.logical_and(moves, prim.logical_not(flag))
        for i in range(len(self.scalings)):  # Graph mode would parse ten functions for `enumerate`.
            of_network_i = of_network(i, scale), of_network(i, overflow)
            moves = ops.depend(moves, only_if(of_network(i, moves), self.scalings[i].advance, *of_network_i))
        return moves

    def back_off(self, scale, overflow, saved):
        """Undoes an attempt, and lowers the scales of those that overflowed. Returns the next attempt's scale."""
        done = ops.depend(self.counters.count_retry(), self.forward_state.restore_call(saved))
        if not self._has_own_scales:
            backed_off = self.scalings[0].back_off(scale, overflow)
            return ops.depend(self.scalings[0].now(), (done, backed_off))
        scales = ()
        for i in range(len(self.scalings)):
            its = of_network(i, overflow)
            backed_off = only_if(its, self.scalings[i].back_off, of_network(i, scale), its)
            scales += (ops.depend(self.scalings[i].now(), (done, backed_off)),)
        return prim.stack(scales)

    def can_mend(self, scale, overflow):
        """Returns whether it overflowed, and every scale that did can be lowered."""
        if not self._has_own_scales:
            return prim.logical_and(overflow, self.loss_scales[0].can_back_off(scale))
        can = ()
        for i in range(len(self.scalings)):
            can += (self.loss_scales[i].can_back_off(of_network(i, scale)),)
        of_each = prim.logical_or(prim.logical_not(overflow), prim.stack(can))
        return prim.logical_and(of_any_network(overflow), prim.reduce_all(of_each, ()))

    def check_attempt(self, losses, grads, scale, saved, *weights):
        """
        Checks an attempt of a call. Returns its gradients, whether it overflowed, whether another may succeed, and what
        else shows an overflow.
        """
        # Indexed: graph mode warns of a name that nothing uses.
        checked = self.check(grads, weights, scale, saved, self.cycle is None)
        overflow, flags = self._agreed(checked[1]), checked[3][0] + checked[3][1]
        hopeless = prim.logical_not(self.can_mend(scale, overflow))
        for flag in flags:
            hopeless = prim.logical_or(hopeless, of_any_network(flag))
        for i in self.unscaled_losses:
            hopeless = prim.logical_or(hopeless, prim.logical_not(gradients.finite((losses[i],))))
        if self.cycle is not None:
            # The cycle is lost already.
            hopeless = prim.logical_or(hopeless, of_any_network(self.cycle.overflow))
        return (checked[0], overflow, prim.logical_not(self._agreed(hopeless))) + flags

    def end_of_attempts(self, grads, overflow, flags, losses, weights, scale, saved):
        """Ends a call with its last attempt, given what `check_attempt` returned of it."""
        # They are float32 already. In nested branches, compiled code takes passed tensors for numbers.
        grads, of_weights = gradients.to_float32(grads), 1 if len(weights) > 0 else 0
        evidence = flags[:of_weights], flags[of_weights:]
        return self.end(grads, overflow, (), evidence, losses, weights, scale, saved)

    def check_trial(self, grads, weights, scale, saved):
        """Returns whether a batch that changes nothing overflowed."""
        return self._agreed(self.check(grads, weights, scale, saved, False)[1])

    def of_all(self, values):
        """Returns the values of the loss scales as one Tensor."""
        return prim.stack(values) if self._has_own_scales else values[0]

    def _cycle_scale(self):
        scales = ()
        for scaling in self.scalings:
            scales += (scaling.now(),)
        return self.of_all(scales)

    def norms(self):
        """Reads the global norm of each network at the last check, None where it is not measured."""
        return [clip.value() for clip in self.clips]

    def shared_state(self):
        """Returns the small Parameters that must have the same values on all ranks."""
        of_scales = [parameter for scaling in self.scalings for parameter in scaling.shared_state]
        return [*self.optimizers.shared_state(), *of_scales, *self.counters.shared_state()]

    def has_begun(self):
        """Returns whether an accumulation cycle has begun."""
        return self.cycle is not None and self.cycle.count.has_begun()
