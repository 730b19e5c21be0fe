"""What the forward of some networks may write."""

from dataclasses import dataclass

from mindspore import Parameter

from ms_lossscale.forward_writes.findings import Findings
from ms_lossscale.forward_writes.mindspore_cells import parameters_written_by_name
from ms_lossscale.forward_writes.reader import Reader


@dataclass(frozen=True)
class ForwardWrites:
    """
    What a forward may write.

    Attributes:
        written (list[Parameter]): What the source writes, in the networks' own order.
        buffers (list[Tensor]): The registered buffers that it writes, or of which that can't be decided.
        undecided (list[tuple[Parameter, str]]): Frozen Parameters of which it can't be decided, and why.
    """

    written: list
    buffers: list
    undecided: list


def find_forward_writes(networks):
    """
    Reads the `construct` of each user's cell and follows it with the real objects that the attributes hold.

    What is assigned to attributes after this is not seen, nor is what a custom operator does.

    Args:
        networks (tuple[Cell]): The networks, all of whose cells are read.

    Returns:
        ForwardWrites, each object in it once.
    """
    findings = Findings()
    reader = Reader(findings)
    cells = {id(cell): cell for network in networks for _, cell in network.cells_and_names()}
    # A cell comes after those that it is made of: its calls of them are known, and not followed to any depth.
    for cell in reversed(list(cells.values())):
        findings.write_all(parameters_written_by_name(cell))
        reader.read(cell)
    return _in_the_networks_order(findings, networks)


def _in_the_networks_order(findings, networks):
    parameters = [parameter for network in networks for parameter in network.get_parameters()]
    positions = {id(parameter): i for i, parameter in reversed(list(enumerate(parameters)))}

    def ordered(things):
        return sorted(things, key=lambda thing: positions.get(id(thing), len(parameters)))

    written, undecided = findings.written, findings.undecided
    reasons = {i: why for i, (_, why) in undecided.items()}
    doubted = [thing for i, (thing, _) in undecided.items() if i not in written]
    return ForwardWrites(
        written=ordered(thing for thing in written.values() if isinstance(thing, Parameter)),
        buffers=[thing for thing in (*written.values(), *doubted) if not isinstance(thing, Parameter)],
        undecided=[
            (thing, reasons[id(thing)])
            for thing in ordered(doubted)
            if isinstance(thing, Parameter) and not thing.requires_grad
        ],
    )
