"""A replacement for mindspore.amp.build_train_network."""

import inspect
from typing import Any, Optional

from mindspore import Parameter, Tensor, amp, nn

from ms_lossscale.cells.argument_order import check_order
from ms_lossscale.cells.keyword_names import check_keywords
from ms_lossscale.cells.scaled_train_one_step_cell import ScaledTrainOneStepCell

_CELL_KEYWORDS = tuple(
    name
    for name, parameter in inspect.signature(ScaledTrainOneStepCell.__init__).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)
_KEYWORDS = ("cast_model_type", "keep_batchnorm_fp32", "loss_scale_manager", *_CELL_KEYWORDS)


def build_train_network(
    network: nn.Cell,
    optimizer: nn.Cell,
    loss_fn: Optional[nn.Cell] = None,
    level: str = "O0",
    boost_level: str = "O0",
    **kwargs: Any,
) -> ScaledTrainOneStepCell:
    """
    Builds a mixed-precision training cell like :func:`mindspore.amp.build_train_network`, but for every device and
    every optimizer.

    MindSpore's own function converts the network. The cell around it is a :class:`ScaledTrainOneStepCell`, which
    returns `(loss, overflow, loss_scale)`.

    Args:
        network (Cell): The network. Without `loss_fn` it returns the loss.
        optimizer (Cell): An optimizer that does not divide by a loss scale of its own.
        loss_fn (Cell, optional): The loss function. Default: ``None`` .
        level (str): ``"O0"`` , ``"O1"`` , ``"O2"`` , ``"O3"`` or ``"auto"`` . As in MindSpore, ``"O2"`` uses a dynamic
            loss scale and the others none, unless you pass a `loss_scale_manager`. Default: ``"O0"`` .
        boost_level (str): Only ``"O0"`` : the other levels of `mindspore.boost` replace the training cell.
            Default: ``"O0"`` .
        **kwargs (Any): `cast_model_type`, `keep_batchnorm_fp32` and `loss_scale_manager` as in MindSpore (the last one
            in any form that :class:`ScaledTrainOneStepCell` takes for `loss_scale`), and the keywords of
            :class:`ScaledTrainOneStepCell`.

    Returns:
        ScaledTrainOneStepCell, in training mode.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a keyword is unknown, `level` or `boost_level` is not one of the above, or the optimizer has a
            loss scale of its own.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from ms_lossscale import build_train_network
        >>> network = nn.Dense(4, 1)
        >>> optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=1e-3)
        >>> cell = build_train_network(network, optimizer, nn.MSELoss(), level="O2")
        >>> loss, overflow, loss_scale = cell(Tensor(np.ones((2, 4), np.float32)), Tensor(np.ones((2, 1), np.float32)))
        >>> print(overflow, loss_scale)
        True 16777216.0
    """
    if boost_level != "O0":
        raise ValueError(
            f"For 'build_train_network', the argument 'boost_level' must be 'O0', since mindspore.boost would replace "
            f"the training cell, but got {boost_level!r}. Apply mindspore.boost to the network instead."
        )
    check_order("build_train_network", network=network, optimizer=optimizer, loss_fn=loss_fn)
    check_keywords("build_train_network", kwargs, _KEYWORDS, ValueError, loss_scale="loss_scale_manager")
    cell_keywords = {name: kwargs.pop(name) for name in _CELL_KEYWORDS if name in kwargs}
    default = amp.DynamicLossScaleManager() if level == "O2" else None
    loss_scale = kwargs.pop("loss_scale_manager", default)
    # MindSpore's function accepts only its own optimizers. Only the converted network is needed.
    stand_in = nn.SGD([Parameter(Tensor(0.0), name="stand_in")])
    converted = amp.build_train_network(network, stand_in, loss_fn, level, loss_scale_manager=None, **kwargs).network
    return ScaledTrainOneStepCell(converted, optimizer, loss_scale, **cell_keywords).set_train()
