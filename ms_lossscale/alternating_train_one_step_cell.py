"""The training cell for several networks that step one after the other."""

import copy

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import gradients
from ms_lossscale._check import check_cells, check_one_each, check_positive_int, describe
from ms_lossscale.network_inputs import check_network_inputs, inputs_of
from ms_lossscale.optimizers import Optimizers, check_optimizers, prefix_states
from ms_lossscale.parameter_names import check_unique_names
from ms_lossscale.transaction import Transaction


class AlternatingTrainOneStepCell(nn.TrainOneStepCell):
    def __init__(
        self,
        networks,
        optimizers,
        loss_scale=None,
        *,
        every=None,
        network_inputs=None,
        has_aux=False,
        forward_state=(),
        after_update=None,
        overflow_detector=None,
    ):
        owner = type(self).__name__
        networks = check_cells(owner, "networks", networks)
        optimizers = check_cells(owner, "optimizers", optimizers)
        check_one_each(owner, networks, optimizers)
        check_optimizers(owner, optimizers, networks)
        prefix_states(optimizers)
        super().__init__(nn.CellList(list(networks), auto_prefix=False), Optimizers(optimizers))
        # Each phase reduces its own gradients.
        self.grad_reducer = nn.Identity()
        loss_scales = self._one_each("loss_scale", loss_scale, copied=True)
        after_updates = self._one_each("after_update", after_update)
        self.phases = nn.CellList(
            [
                Transaction(
                    owner,
                    (network,),
                    (optimizer,),
                    its_loss_scale,
                    prefix=f"network_{i}.",
                    has_aux=has_aux,
                    forward_state=forward_state,
                    after_update=its_after_update,
                    overflow_detector=overflow_detector,
                )
                for i, (network, optimizer, its_loss_scale, its_after_update) in enumerate(
                    zip(networks, optimizers, loss_scales, after_updates)
                )
            ],
            auto_prefix=False,
        )
        self.network_inputs = check_network_inputs(owner, network_inputs, networks)
        self._has_aux = has_aux
        self.calls = Parameter(Tensor(0, mstype.int32), name="alternation.calls", requires_grad=False)
        self.every = Parameter(
            Tensor(np.ones(len(networks)), mstype.int32), name="alternation.every", requires_grad=False
        )
        self.last_losses = Parameter(
            Tensor(np.zeros(len(networks)), mstype.float32), name="alternation.last_losses", requires_grad=False
        )
        if every is not None:
            self.set_every(every)
        check_unique_names(owner, self.get_parameters())

    def _one_each(self, name, value, copied=False):
        """`value` for each network: the entries of a list, or one value, again or (what has a state) copied."""
        count = len(self.network)
        if not isinstance(value, (list, tuple)):
            return [copy.deepcopy(value) if copied else value for _ in range(count)]
        if len(value) != count:
            raise ValueError(
                f"For '{type(self).__name__}', the argument '{name}', if it is a list, must have one entry for each of "
                f"the {count} networks, but got {len(value)}."
            )
        cells = [id(entry) for entry in value if isinstance(entry, nn.Cell)]
        if copied and len(set(cells)) < len(cells):
            raise ValueError(
                f"For '{type(self).__name__}', the argument '{name}' must not hold the same Cell twice, since each "
                f"network has its own. Pass one that is not in a list: it is copied for each network."
            )
        return value

    def construct(self, *inputs):
        ops.assign(self.calls, self.calls + 1)
        losses, overflows, loss_scales, auxes = (), (), (), ()
        for i, phase in enumerate(self.phases):
            its_inputs = inputs_of(i, self.network_inputs, inputs)
            if self._has_aux:
                loss, overflow, loss_scale, aux = self._run(phase, its_inputs)
                auxes += (aux,)
            else:
                loss, overflow, loss_scale = self._run_in_turn(i, phase, its_inputs)
            losses, overflows, loss_scales = losses + (loss,), overflows + (overflow,), loss_scales + (loss_scale,)
            # The next network's forward comes after all that this one's update did.
            inputs = ops.depend(inputs, overflow)
        losses = ops.stack(losses)
        ops.assign(self.last_losses, losses)
        output = (ops.ReduceSum()(losses), ops.stack(overflows), ops.stack(loss_scales), losses)
        if self._has_aux:
            return (*output, auxes)
        return output

    @staticmethod
    def _run(phase, inputs):
        losses, auxes, overflow, loss_scale = phase.step(*inputs)
        return gradients.sums(losses)[0], overflow, loss_scale, auxes[0]

    def _run_in_turn(self, i, phase, inputs):
        if self.calls % self.every[i] == 0:
            loss, overflow, loss_scale, _ = self._run(phase, inputs)
        else:
            loss = self.last_losses[i]
            overflow = Tensor(False)
            loss_scale = gradients.copy(phase.loss_scale.scale_value)
        return loss, overflow, loss_scale

    def set_every(self, every):
        """
        Sets in which calls each network takes part, from the next call on.

        Args:
            every (Union[list[int], tuple[int]]): For each network, k >= 1: it takes part in the calls k, 2k, 3k, ...,
                counted from the first call of the cell.

        Raises:
            TypeError: If `every` is not a list or tuple of integers.
            ValueError: If it has not one entry for each network, one is below 1, or the cell has aux, which a network
                that does not take part could not give.
        """
        owner = type(self).__name__
        if not isinstance(every, (list, tuple)):
            raise TypeError(f"For '{owner}', the argument 'every' must be a list or tuple, but got {describe(every)}.")
        every = [check_positive_int(owner, f"every[{i}]", k) for i, k in enumerate(self._one_each("every", every))]
        if self._has_aux and set(every) != {1}:
            raise ValueError(
                f"For '{owner}', the argument 'every' must be None or all 1 with has_aux=True, since a network that "
                f"does not take part has no aux to return, but got {every}."
            )
        self.every.set_data(Tensor(every, mstype.int32))

    def get_loss_scale(self):
        """
        Reads the loss scales.

        Returns:
            list[float], for each network the scale that its next step will use.
        """
        return [phase.get_loss_scale() for phase in self.phases]

    def set_loss_scale(self, value):
        """
        Sets the loss scales by hand, between two calls; their laws go on from there.

        Args:
            value (Union[float, list[float]]): The new scale for all networks or for each, finite numbers > 0.

        Raises:
            TypeError: If a value is not a number.
            ValueError: If a value is not finite or not > 0, or a list has not one entry for each network.
        """
        for phase, its_value in zip(self.phases, self._one_each("value", value)):
            phase.set_loss_scale(its_value)

    def counters(self):
        """
        Reads how many steps of each network were applied and skipped.

        Returns:
            list[dict], each with the ints `applied_steps`, `skipped_steps` and `consecutive_skipped_steps`.
        """
        return [phase.counters() for phase in self.phases]
