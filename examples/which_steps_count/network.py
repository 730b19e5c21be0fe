"""A small network that predicts the next character of a line from those before it, and its loss."""

from mindspore import dtype as mstype
from mindspore import nn, ops
from text import CHARACTERS, CONTEXT

WIDTH, HIDDEN = 16, 96


class NextCharacter(nn.Cell):
    def __init__(self):
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, WIDTH)
        self.hidden = nn.Dense(CONTEXT * WIDTH, HIDDEN, activation="relu")
        self.norm = nn.LayerNorm((HIDDEN,))
        self.scores = nn.Dense(HIDDEN, CHARACTERS)

    def construct(self, contexts):
        x = self.characters(contexts).reshape(-1, CONTEXT * WIDTH)
        return self.scores(self.norm(self.hidden(x)))


class SumOfLosses(nn.Cell):
    """Returns the sum of the losses over all characters of a batch, and their number."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, contexts, characters, mask):
        scores = self.network(contexts).astype(mstype.float32)
        return (ops.cross_entropy(scores, characters, reduction="none") * mask).sum(), mask.sum()


class TrainedLoss(nn.Cell):
    """
    The same times a weight, like a term of a larger loss, so that float16 gradients underflow unless they are scaled,
    and times the factor of a batch. If it is not weighted, it is the mean over the characters of the batch.
    """

    def __init__(self, network, weight, is_weighted):
        super().__init__(auto_prefix=False)
        self.sum_of_losses = SumOfLosses(network)
        self.weight, self.is_weighted = weight, is_weighted

    def construct(self, contexts, characters, mask, factor):
        loss, number = self.sum_of_losses(contexts, characters, mask)
        loss = loss * (self.weight * factor)
        return (loss, number) if self.is_weighted else loss / number
