"""The chip's kernels, by NumPy. A network that needs one more: a line in one of the two modules."""

from dry_ascend import aclnn, compiled

KERNELS = {**{f"aclnn{name}": kernel for name, kernel in aclnn.OPERATORS.items()}, **compiled.OPERATORS}
