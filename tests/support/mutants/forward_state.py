"""Mutants of how the forward state is found, and of how it keeps its memory."""

from support.mutants.mutant import Mutant

_WRITES = "test_what_the_forward_writes.py"
_MAY_WRITE = "test_may_write.py"
_FORWARDS = "test_forwards.py"
_REACH = "test_reach.py"
_STOCK = "test_loading_with_stock_functions.py"

MUTANTS = [
    Mutant(
        "what a detector writes is not undone",
        "step/build.py",
        "            cells.append(self.overflow_detector)\n",
        "            pass\n",
        ("test_overflow_detector.py",),
    ),
    Mutant(
        "what a detector writes shows an overflow in the forward",
        "step/forward_state.py",
        " if id(its) not in self._not_judged)",
        ")",
        ("test_overflow_detector.py",),
    ),
    Mutant(
        "the scale of an update rule that a transform holds is undone",
        "step/gradient_transforms.py",
        ", *(id(its.parameter) for its in loss_scale.bounds())}",
        "}",
        ("test_gradient_transforms.py",),
    ),
    Mutant(
        "forward state in a list is not found",
        "forward_state/referents.py",
        "SEQUENCES = (list, tuple, set, frozenset, collections.deque)",
        "SEQUENCES = (tuple, set, frozenset, collections.deque)",
        (_WRITES,),
    ),
    Mutant(
        "forward state in a global is not found",
        "forward_state/reachable.py",
        "        self._add(named(namespace, names))\n",
        "",
        (_FORWARDS,),
    ),
    Mutant(
        "forward state in a closure is not found",
        "forward_state/referents.py",
        "        *(held for cell in function.__closure__ or () for held in gc.get_referents(cell)),\n",
        "",
        (_WRITES,),
    ),
    Mutant(
        "forward state in a slot is not found",
        "forward_state/referents.py",
        "*_of_kind(thing), *others]",
        "*_of_kind(thing)]",
        (_WRITES, _REACH),
    ),
    Mutant(
        "forward state in an array, or behind a weak reference, is not found",
        "forward_state/referents.py",
        "*_of_kind(thing), *others]",
        "*others]",
        (_REACH,),
    ),
    Mutant(
        "forward state in a module of the user's is not found",
        "forward_state/reachable.py",
        "            self._add(named(vars(thing), self._names))\n",
        "            pass\n",
        (_FORWARDS,),
    ),
    Mutant(
        "packages that do not know MindSpore are entered",
        "forward_state/ownership.py",
        "(not _is_installed(package) or _knows_mindspore(package))",
        "True",
        (_REACH,),
    ),
    Mutant(
        "objects of disguised classes are asked for them",
        "forward_state/reachable.py",
        " if not is_disguised(type(thing))]",
        "]",
        (_REACH,),
    ),
    Mutant(
        "what the reading did not reach counts as unwritten",
        "forward_state/find.py",
        "    if not reading.is_complete:\n",
        "    if False:\n",
        (_REACH,),
    ),
    Mutant(
        "names that are not unique stay in the step",
        "forward_state/find.py",
        "counts[its.name] > 1]",
        "counts[its.name] > 9]",
        (_WRITES,),
    ),
    Mutant(
        "forward state that is imported while a forward runs is not found",
        "forward_state/reachable.py",
        '        self._add(_imported(code, namespace.get("__package__"), names))\n',
        "",
        (_FORWARDS,),
    ),
    Mutant(
        "large state is never copied",
        "forward_state/find.py",
        "written = {key for key in reading.written if key in state} | _written_by_layers(cells)",
        "written = _written_by_layers(cells)",
        (_MAY_WRITE,),
    ),
    Mutant(
        "state that was declared is not copied",
        "forward_state/find.py",
        " | set(map(id, declared))",
        "",
        (_WRITES,),
    ),
    Mutant(
        "a copy in case may be of any size",
        "forward_state/find.py",
        "        if elements <= _FEW:\n            written.add(key)\n",
        "        written.add(key)\n",
        (_WRITES,),
    ),
    Mutant(
        "weights of which it can't be told are not copied",
        "forward_state/find.py",
        "for key in (*small, *reading.doubted) if key in state",
        "for key in small if key in state",
        (_WRITES,),
    ),
    Mutant(
        "statistics of MindSpore's layers are not known by name",
        "forward_state/find.py",
        "if key in state} | _written_by_layers(cells) |",
        "if key in state} |",
        (_MAY_WRITE,),
    ),
    Mutant(
        "inputs that a network writes are taken for those that it reads",
        "forward_state/find.py",
        "id(stand_in) in {**reading.written, **reading.doubted} or",
        "id(stand_in) in {} or",
        ("test_retries.py",),
    ),
    Mutant(
        "arithmetic in place is no writing",
        "forward_state/reading.py",
        "                self._write(elements(old))\n",
        "                pass\n",
        (_MAY_WRITE,),
    ),
    Mutant(
        "an attribute that is assigned is not written",
        "forward_state/reading.py",
        "self._write(elements(present, nn.Cell) if is_part else tensors(present))",
        "self._write(elements(present, nn.Cell) if is_part else {})",
        (_MAY_WRITE,),
    ),
    Mutant(
        "functions are read once",
        "forward_state/reading.py",
        "            if not self._is_news:\n                return\n",
        "            return\n",
        (_MAY_WRITE,),
    ),
    Mutant(
        "what a tensor is given as a hook is not read",
        "forward_state/reading.py",
        "else self._call_all(functions_in(given), [], {})",
        "else {}",
        (_FORWARDS,),
    ),
    Mutant(
        "a buffer has memory of its own",
        "forward_state/find.py",
        "self.parameter.assign_value(self.registered())",
        "self.parameter.assign_value(Tensor(self.registered().asnumpy()))",
        (_WRITES,),
    ),
    Mutant(
        "a buffer that got pretrained values is parted from what stands for it",
        "_memory_in_use.py",
        "        for buffer in self._buffers:\n            buffer.share()\n",
        "",
        (_WRITES,),
    ),
    Mutant(
        "memory is put back before the assignment",
        "_memory_in_use.py",
        "        values = [(tensors[i], copy(tensors[i])) for i in moved]\n"
        "        for i in moved:\n"
        "            tensors[i].assign_value(self._aliases[i])\n"
        "        return values\n",
        "        for i in moved:\n"
        "            tensors[i].assign_value(self._aliases[i])\n"
        "        return [(tensors[i], copy(tensors[i])) for i in moved]\n",
        (_STOCK,),
    ),
    Mutant(
        "what a forward wrote into other memory is lost",
        "_memory_in_use.py",
        "            ops.assign(tensor, value)\n",
        "            ops.assign(value, tensor)\n",
        (_FORWARDS,),
    ),
    Mutant(
        "a skipped step leaves what it wrote into other memory",
        "_memory_in_use.py",
        "if moved and not was_skipped():",
        "if moved:",
        (_FORWARDS,),
    ),
    Mutant(
        "a running cell goes on with the memory that loading replaced",
        "cells/loading.py",
        "            self._known_memory.remember()\n        self._put_memory_back()\n",
        "            self._known_memory.remember()\n",
        (_STOCK,),
    ),
    Mutant(
        "a flush goes on with the memory that loading replaced",
        "cells/training_cell.py",
        "        self._check_loaded()\n        overflows = [step.flush() for step in self.steps]",
        "        overflows = [step.flush() for step in self.steps]",
        (_STOCK,),
    ),
    Mutant(
        "a cycle of an earlier version has no copies",
        "cells/loading.py",
        "                if step.has_begun():\n",
        "                if not step.has_begun():\n",
        (_WRITES, "test_checkpoints_of_releases.py"),
    ),
]
