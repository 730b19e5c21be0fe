"""Ways to break what makes the gradients: forward and backward, the choice of stages, clipping."""

from support.mutants.mutant import Mutant

_SCALED = "test_scaled_train_one_step_cell.py"
_CLIPPING = "test_clipping.py"
_AVERAGES = "test_moving_average.py"
_SIMULTANEOUS = "test_simultaneous_train_one_step_cell.py"
_OWN_SCALES = "test_own_loss_scales.py"
_RANKS = "test_ranks.py"

MUTANTS = [
    Mutant(
        "the loss is not multiplied by the scale",
        "step/scaling.py",
        "return loss.astype(mstype.float32) * scale",
        "return loss.astype(mstype.float32)",
        ("test_tiny_gradients.py", _SCALED),
    ),
    Mutant(
        "every network is multiplied by the first one's scale",
        "step/forward_backward.py",
        "of_network(self._number, scale)",
        "of_network(0, scale)",
        (_OWN_SCALES,),
    ),
    Mutant(
        "the loss that is returned is no copy",
        "step/forward_backward.py",
        "return (gradients.copy(loss),)",
        "return (loss,)",
        (_SCALED, "test_aux.py"),
    ),
    Mutant(
        "a backward need not wait for the inputs",
        "step/forward_backward.py",
        "scale = ops.depend(scale, inputs)",
        "scale = ops.depend(scale, scale)",
        ("test_register_order.py",),
        survives="in the networks of the tests MindSpore 2.10 orders it so by itself",
    ),
    Mutant(
        "what another loss returns besides is lost",
        "step/forward_backward.py",
        "auxes + (its_aux,)",
        "auxes + (auxes[0] if auxes else its_aux,)",
        (_SIMULTANEOUS,),
    ),
    Mutant(
        "a window of networks with scales of their own is not averaged",
        "step/build.py",
        "UnscaleEach(1.0 / steps,",
        "UnscaleEach(1.0,",
        (_OWN_SCALES,),
    ),
    Mutant(
        "calls of a window are added up undivided where they are clipped",
        "step/build.py",
        "            and steps == 1\n",
        "",
        ("test_accumulation.py", _CLIPPING, "test_configurations.py"),
    ),
    Mutant(
        "retries of a scale that never backs off are not refused",
        "step/build.py",
        "if max_retries and not (loss_scale",
        "if max_retries < 0 and not (loss_scale",
        ("test_retries.py",),
    ),
    Mutant(
        "what is not to be checked is checked",
        "step/build.py",
        "return loss_scales[0].drop_overflow_update",
        "return True",
        ("test_configurations.py", "test_overflowed_parameters.py"),
    ),
    Mutant(
        "what is to follow an update is left out",
        "step/build.py",
        "settings.after_update or Nothing(),",
        "Nothing(),",
        (_SCALED, _AVERAGES),
    ),
    Mutant(
        "the decays of networks are exchanged",
        "step/build.py",
        "zip(settings.ema_decay, self.weights)",
        "zip(settings.ema_decay[::-1], self.weights)",
        (_AVERAGES,),
    ),
    Mutant(
        "each network takes all inputs",
        "step/build.py",
        "owner, forward_backwards, network_inputs, stages.packing",
        "owner, forward_backwards, None, stages.packing",
        (_SIMULTANEOUS,),
    ),
    Mutant(
        "a user's own cells are compiled in PyNative mode",
        "step/build.py",
        'if get_context("mode") == PYNATIVE_MODE and not in_python:',
        'if get_context("mode") == PYNATIVE_MODE:',
        ("test_own_cells_in_pynative.py",),
    ),
    Mutant(
        "a user's own detector gets stacked gradients",
        "step/build.py",
        "packs = not ranks.exchanges and _is_library_cell(self.detector)",
        "packs = not ranks.exchanges",
        ("test_overflow_detector.py",),
    ),
    Mutant(
        "small gradients are enlarged to the bound",
        "step/clipping.py",
        "coefficient = ops.minimum(self._one",
        "coefficient = ops.maximum(self._one",
        (_CLIPPING,),
    ),
    Mutant(
        "clipped gradients have the wrong norm",
        "step/clipping.py",
        "ratio = self._bound / self.norm.root",
        "ratio = self.norm.root / self._bound",
        (_CLIPPING,),
    ),
    Mutant(
        "clipped gradients keep the scale",
        "step/clipping.py",
        "ops.minimum(self._one / self.norm.scale,",
        "ops.minimum(self._one,",
        (_CLIPPING,),
    ),
    Mutant(
        "the norm is told with the scale in it",
        "step/clipping.py",
        "float(root.asnumpy()) / float(power.asnumpy()) / float(scale.asnumpy())",
        "float(root.asnumpy()) / float(power.asnumpy())",
        (_CLIPPING,),
    ),
    Mutant(
        "a very small coefficient is flushed to zero",
        "step/clipping.py",
        "if coefficient < self._smallest_normal:",
        "if coefficient < coefficient:",
        (_CLIPPING,),
    ),
    Mutant(
        "an infinite norm is no overflow",
        "step/clipping.py",
        "return ops.isfinite(root)",
        "return ops.isfinite(power)",
        (_CLIPPING,),
    ),
    Mutant(
        "large gradients are enlarged before they are squared",
        "step/clipping.py",
        "self._enlarge, self._reduce)\n            sum",
        "self._reduce, self._enlarge)\n            sum",
        (_CLIPPING,),
    ),
    Mutant(
        "the norm leaves out the other ranks' weights",
        "step/clipping.py",
        "self.ranks.sum(gradients.sum_of_squares_where(self._zero, self._own, grads))",
        "gradients.sum_of_squares_where(self._zero, self._own, grads)",
        (_RANKS,),
    ),
    Mutant(
        "gradients are clipped from above only",
        "_gradients.py",
        "return ops.minimum(ops.maximum(tensor, low), high)",
        "return ops.minimum(tensor, high)",
        (_CLIPPING,),
    ),
    Mutant(
        "every network is clipped as the first",
        "step/gradient_transforms.py",
        "            for transform in transforms:\n                its_grads =",
        "            for transform in self.of_each[0]:\n                its_grads =",
        (_CLIPPING,),
    ),
]
