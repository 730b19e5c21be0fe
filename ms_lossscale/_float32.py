"""Cells whose arithmetic must stay in float32."""

from typing import Any

from mindspore import nn


class Float32Cell(nn.Cell):
    """
    Base class of cells that refuse to be cast.

    In float16 a law's scale becomes infinite, and every later step is skipped. `to_float`, and `mindspore.amp` for a
    whole training cell, reach every cell inside through `add_flags`.
    """

    def add_flags(self, **flags: Any) -> nn.Cell:
        if flags.get("fp16") or flags.get("bf16"):
            raise ValueError(
                f"For '{type(self).__name__}', the arithmetic of the loss scale must stay in float32, but got a cast "
                f"to {'float16' if flags.get('fp16') else 'bfloat16'}. Cast the network before it is passed to the "
                f"training cell: network.to_float(...), amp.auto_mixed_precision(network, ...), or "
                f"ms_lossscale.build_train_network(network, ..., level=...)."
            )
        return super().add_flags(**flags)
