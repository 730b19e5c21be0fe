"""What the names of functions and methods of MindSpore and Python tell about what they do with their arguments."""

import re

# Methods that write to their tensor, and MindSpore's functions and primitives that write to their first argument.
WRITES = re.compile(
    r"(?!_).*[^_]_|set_data|(?i:assign)\w*|itemset|scatter_(?!nd$)\w+|index_add|load_\w+|__setitem__"
    r"|__i(add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__"
)
# Those that may return their argument. Gradients and maps return functions, which are called later.
SHARES = re.compile(
    r"(?i)depend|load|stop_?gradient|identity|value|data|cast|astype|to|float|view|view_?as|reshape|transpose|permute"
    r"|m?t|flatten|ravel|squeeze|unsqueeze|expand_?dims|expand_?as|narrow|select|split|chunk|unbind|swapaxes|diagonal"
    r"|detach|assign\w*|\w*grad\w*|hypermap|map|vmap|jit|vjp|jvp"
)
# Methods of MindSpore's cells that return what the cells hold.
QUERIES = re.compile(r"\w*(params|parameters|parameters_dict|buffers|cells|parameters_and_names|cells_and_names)")
# `getattr`, `setattr`, and the methods that they call.
BY_NAME = re.compile(r"getattr|setattr|__(getattr|getattribute|setattr)__")
