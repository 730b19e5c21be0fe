"""What a Cell of the user's own answers to a question of the step."""

from mindspore import Tensor
from mindspore import dtype as mstype


def as_flag(answer, not_one_answer):
    """
    Returns the answer as a bool Tensor of shape (). It may have another dtype, and one element in another shape; for
    anything else, raises an error with the message `not_one_answer`.
    """
    if not isinstance(answer, Tensor):
        raise TypeError(not_one_answer)
    if answer.shape != ():
        if answer.size != 1:
            raise ValueError(not_one_answer)
        answer = answer.reshape(())
    if answer.dtype != mstype.bool_:
        answer = answer.astype(mstype.bool_)
    return answer
