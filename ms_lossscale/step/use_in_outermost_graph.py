"""What lets graph mode notice that a Parameter was given other memory."""

from mindspore import ParameterTuple, nn, ops


class UseInOutermostGraph(nn.Cell):
    """
    Makes the graph that it stands in use Parameters, at no cost. Where only a branch uses them, MindSpore goes on with
    the memory that they had when it compiled, although `mindspore.load_param_into_net`, say, gave them other memory.

    Args:
        parameters (list[Parameter]): All that the graph and its branches use.

    Inputs:
        - **inputs** (tuple) - What everything else is computed from.

    Outputs:
        tuple, the same.
    """

    def __init__(self, parameters):
        super().__init__(auto_prefix=False)
        # Of a tuple: MindSpore would fold the dependence on a Parameter by itself away.
        self.parameters = ParameterTuple(parameters)

    def construct(self, inputs):
        return ops.depend(inputs, self.parameters)
