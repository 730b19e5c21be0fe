"""Base classes of cells whose arithmetic stays in float32."""

from typing import Any

from mindspore import nn


class Float32Cell(nn.Cell):
    """
    Base class of cells that refuse to be cast, since their arithmetic must stay in float32.

    In float16, the scale that an update rule computes would become infinite, and every later step would be skipped.
    `to_float`, and `mindspore.amp` for a whole training cell, reach every cell inside through `add_flags`.
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


class UncastCell(nn.Cell):
    """A cell that casts pass by, so that its scale stays float32: 65536 is infinite in float16."""

    def add_flags(self, **flags: Any) -> nn.Cell:
        return super().add_flags(**{name: flag for name, flag in flags.items() if name not in ("fp16", "bf16")})
