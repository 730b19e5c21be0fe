"""
Two cells that one Cell holds train as one of them alone, and resume.

In a process of its own: in one that has compiled much before, MindSpore's inference of branches, which takes several
threads, may crash at these graphs.
"""

import mindspore
import pytest
from conftest import nightly, slow
from support.held_cells import CELLS, Holder, call_of, holds, names, train
from support.training import same_bits


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        *(("graph", "scaled"), ("pynative", "manual")),
        *slow(("graph", "manual"), ("pynative", "scaled")),
        *nightly(("graph", "alternating"), ("pynative", "alternating")),
        *nightly(*((mode, kind) for mode in ("graph", "pynative") for kind in ("simultaneous", "manual_of_two"))),
    ],
    indirect=["mode"],
)
def test_two_held_cells_train_as_one_alone_and_resume(mode, kind):
    """Bit for bit, in one graph, and whichever function has loaded what a holder saved."""
    alone, cells = CELLS[kind](), [CELLS[kind](prefix) for prefix in ("critics_", "actors_")]
    holder = Holder(*cells)
    calls = Holder(*(call_of(cell.set_train()) for cell in cells), auto_prefix=False)
    call_alone = call_of(alone.set_train())

    def go_on(first, last):
        train(calls, first, last)
        for cell in cells:
            assert all(map(same_bits, holds(cell), expected[last]))

    expected = {}
    for first, last in ((0, 5), (5, 8)):
        train(call_alone, first, last)
        expected[last] = holds(alone)
        expected.setdefault("counts", (alone.counters(), alone.skip_reasons()))
    go_on(0, 5)
    for cell in cells:
        assert (cell.counters(), cell.skip_reasons()) == expected["counts"]
        assert len(cell.overflowed_parameters()) == len(alone.overflowed_parameters())
        assert set(cell.overflowed_parameters()) < set(names(cell))
    mindspore.save_checkpoint(holder, "holder.ckpt")
    go_on(5, 8)
    # Afterwards the cells write into its memory.
    assert mindspore.load_param_into_net(holder, mindspore.load_checkpoint("holder.ckpt")) == ([], [])
    go_on(5, 8)
    saved = mindspore.load_checkpoint("holder.ckpt")
    for cell in cells:
        missing, unexpected = cell.load_state_dict(saved, strict=False)
        assert missing == [] and len(unexpected) == len(saved) / 2
    go_on(5, 8)
