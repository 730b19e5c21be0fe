"""What depends on what in the graph that a Cell was compiled to."""

from mindspore.nn.cell import _cell_graph_executor
from mindspore.train.anf_ir_pb2 import ModelProto


class CompiledGraph:
    """The nodes of the graph of a Cell that was called once in graph mode, without what is in branches."""

    def __init__(self, cell):
        (phase,) = cell.compile_cache
        graph = ModelProto.FromString(_cell_graph_executor._graph_executor.get_optimize_graph_proto(phase)).graph
        self._kinds = {}
        self._needs = {}
        last = None
        for number, node in enumerate(graph.node, 1):
            # Nodes have their numbers for names, but the call of a branch, which comes after its Switch, has neither a
            # name nor inputs.
            name = str(number)
            assert node.name in (name, "")
            self._kinds[name] = node.op_type
            self._needs[name] = [each.name for each in node.input] if node.name else [last]
            last = name

    def of_kind(self, is_one):
        """Returns the names of the nodes whose operator `is_one` accepts, given its name."""
        return {name for name, kind in self._kinds.items() if is_one(kind)}

    def before(self, name):
        """Returns the names of all nodes that run before this one."""
        found = set()
        waiting = [name]
        while waiting:
            for needed in self._needs.get(waiting.pop(), ()):
                if needed not in found:
                    found.add(needed)
                    waiting.append(needed)
        return found
