"""
The operators of a step, as primitives with the names of their functions.

Graph mode parses every function with all that it calls, which takes milliseconds for each, but no primitive.
"""

from mindspore import ops

addn = ops.AddN()
assign, assign_add = ops.Assign(), ops.AssignAdd()
cast = ops.Cast()
concat, stack = ops.Concat(), ops.Stack()
deepcopy = ops.Identity()
equal, less, not_equal = ops.Equal(), ops.Less(), ops.NotEqual()
isfinite = ops.IsFinite()
logical_and, logical_not, logical_or = ops.LogicalAnd(), ops.LogicalNot(), ops.LogicalOr()
maximum, minimum = ops.Maximum(), ops.Minimum()
mul = ops.Mul()
# Their axes are best given as tuples: for a number, graph mode parses a function.
reduce_all, reduce_any, reduce_sum = ops.ReduceAll(), ops.ReduceAny(), ops.ReduceSum()
select = ops.Select()
square = ops.Square()
