"""The scaled forward and backward of one network."""

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ms_lossscale import gradients


class ForwardBackward(nn.Cell):
    """
    Runs one network forward and backward, once each.

    Args:
        network (Cell): Returns the loss, of any shape; with `has_aux` the tuple `(loss, *aux)`.
        weights (ParameterTuple): What to differentiate by.
        has_aux (bool): Whether the network returns more than the loss.
        owner (str): The training cell's name, for error messages.

    Inputs:
        - **scale** (Tensor) - The loss scale, float32 of shape :math:`()`.
        - **\\*inputs** - The network's inputs.

    Outputs:
        Tuple of the loss as the network gave it, the tuple of aux, and the tuple of the gradients of
        `sum(loss) * scale`.
    """

    def __init__(self, network, weights, has_aux, owner):
        super().__init__(auto_prefix=False)
        self.network = network
        self._has_aux = has_aux
        self._not_one_loss = (
            f"For '{owner}', the network must return one Tensor, the loss, but it returned something else. A network "
            f"that returns (loss, *aux) needs has_aux=True."
        )
        self._no_aux = (
            f"For '{owner}' with has_aux=True, the network must return a tuple (loss, *aux) with the loss, a Tensor, "
            f"first, but it returned something else."
        )
        # has_aux here: one forward gives the scaled loss to differentiate and, beside it, what the user gets back.
        self._value_and_grad = ops.value_and_grad(self._scaled_loss, None, weights, has_aux=True)

    def _scaled_loss(self, scale, *inputs):
        output = self.network(*inputs)
        if self._has_aux:
            if not isinstance(output, tuple):
                raise TypeError(self._no_aux)
            loss, aux = output[0], output[1:]
            if not isinstance(loss, Tensor):
                raise TypeError(self._no_aux)
        else:
            loss, aux = output, ()
            if not isinstance(loss, Tensor):
                raise TypeError(self._not_one_loss)
        return loss.astype(mstype.float32) * scale, loss, aux

    def construct(self, scale, *inputs):
        (_, loss, aux), grads = self._value_and_grad(scale, *inputs)
        # A network may return a Parameter, or a view of one. Copied before the gradients can reach an optimizer.
        loss, aux = gradients.copy(loss), self._copy(aux)
        return loss, aux, ops.depend(grads, (loss, aux))

    @staticmethod
    def _copy(aux):
        copies = ()
        for value in aux:
            copies += (gradients.copy(value) if isinstance(value, Tensor) else value,)
        return copies
