"""
Shows the cost of data parallelism: what a step sends, and its time on 1, 2 and 4 ranks here, and on more in theory.

    python benchmarks/data_parallel.py

Messages are counted in the compiled graphs of a job with two ranks. Times are measured on this machine in both modes,
and calculated from a link's latency and bandwidth; --calculate does only this. Then time, messages and memory are shown
for ranks that share the optimizer's state; --sharing does only this.
"""

import argparse
import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import base  # noqa: F401
from common.output import markdown_table

BATCH = 64
WIDTH = 512
LAYERS = 4
CALLS, ROUNDS = 5, 7
MODES = ("graph", "pynative")
# The network whose optimizer's state the ranks share has 25 million weights.
SHARED_WIDTH, SHARED_LAYERS, SHARED_BATCH = 2048, 6, 8
# The sides whose steps are measured.
SIDES = ("nn.TrainOneStepCell", "Scaled", "Scaled, nothing checked", "written by hand")
# A skipped step says what its overflow came from, with two flags in one message.
BYTES_IN_SKIPPED_STEPS = 8
MEASURED_RANKS = (1, 2, 4)
CALCULATED_RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)


def make_parser():
    parser = argparse.ArgumentParser(description="Count, measure and calculate what data parallelism costs.")
    parser.add_argument("--calculate", action="store_true", help="only calculate")
    parser.add_argument("--sharing", action="store_true", help="only measure the cost of sharing an optimizer's state")
    parser.add_argument("--parameters", type=float, default=25.6e6, help="weights (default: %(default)g, a ResNet-50)")
    parser.add_argument("--latency", type=float, default=5e-6, help="seconds for a hop (default: %(default)g)")
    parser.add_argument("--bandwidth", type=float, default=12.5e9, help="bytes per second (default: %(default)g)")
    parser.add_argument("--step", type=float, default=0.1, help="seconds that a device computes (default: %(default)g)")
    return parser


def make_cells():
    """Returns functions that make the cells to compare, each with its number of networks, by their descriptions."""
    from mindspore import nn

    from ms_lossscale import (
        AlternatingTrainOneStepCell,
        DynamicLossScale,
        FixedLossScale,
        ScaledTrainOneStepCell,
        SimultaneousTrainOneStepCell,
    )

    def network(i):
        layers = [nn.Dense(WIDTH, WIDTH, activation="tanh") for _ in range(LAYERS)]
        loss = nn.WithLossCell(nn.SequentialCell(*layers), nn.MSELoss())
        loss.update_parameters_name(f"network_{i}.")
        return loss

    def one(cell_class, *arguments, **keywords):
        trained = network(0)
        return lambda: cell_class(trained, optimizer(trained), *arguments, **keywords)

    def scaled(loss_scale, **keywords):
        return one(ScaledTrainOneStepCell, loss_scale, **keywords)

    def several(cell_class, count, **keywords):
        networks = [network(i) for i in range(count)]
        inputs = [(2 * i, 2 * i + 1) for i in range(count)]
        optimizers = [optimizer(each) for each in networks]
        return lambda: cell_class(networks, optimizers, DynamicLossScale(), network_inputs=inputs, **keywords)

    def optimizer(trained):
        return nn.Momentum(trained.trainable_params(), 0.01, 0.9)

    return {
        "nn.TrainOneStepCell": (1, one(nn.TrainOneStepCell)),
        "written by hand": (1, one(hand_written)),
        "Scaled": (1, scaled(DynamicLossScale())),
        "Scaled, clip_norm and ema_decay": (1, scaled(DynamicLossScale(), clip_norm=1.0, ema_decay=0.9)),
        "Scaled, cycles of 4 calls": (1, scaled(DynamicLossScale(), gradient_accumulation_steps=4)),
        "Scaled, cycles of 16 calls": (1, scaled(DynamicLossScale(), gradient_accumulation_steps=16)),
        "Scaled, nothing checked": (1, scaled(FixedLossScale(1024.0, drop_overflow_update=False))),
        "Simultaneous, 2 networks": (2, several(SimultaneousTrainOneStepCell, 2)),
        "Simultaneous, 4 networks": (4, several(SimultaneousTrainOneStepCell, 4)),
        "Alternating, 2 networks": (2, several(AlternatingTrainOneStepCell, 2)),
    }


def hand_written(network, optimizer):
    """Makes a step as written without this package: unscale, reduce, sum, agree, update or not; the scale is fixed."""
    import mindspore
    from mindspore import Tensor, nn, ops

    scale = Tensor(1024.0, mindspore.float32)
    several = mindspore.get_auto_parallel_context("parallel_mode") == "data_parallel"
    reduce = nn.DistributedGradReducer(optimizer.parameters) if several else nn.Identity()
    agree = ops.AllReduce() if several else nn.Identity()

    def forward(*inputs):
        return network(*inputs) * scale

    value_and_grad = ops.value_and_grad(forward, None, optimizer.parameters)
    network.set_train()

    def step(*inputs):
        loss, grads = value_and_grad(*inputs)
        inverse = 1.0 / scale
        grads = reduce(ops.HyperMap()(ops.partial(ops.mul, inverse), grads))
        total = ops.addn(ops.HyperMap()(ops.ReduceSum(), grads))
        overflows = agree(ops.logical_not(ops.isfinite(total)).astype(mindspore.float32))
        if overflows == 0:
            loss = ops.depend(loss, optimizer(grads))
        return loss * inverse

    return mindspore.jit(step) if mindspore.get_context("mode") == mindspore.GRAPH_MODE else step


def inputs_for(networks):
    import numpy as np
    from mindspore import Tensor

    rng = np.random.default_rng(0)
    return [Tensor(rng.normal(size=(BATCH, WIDTH)).astype(np.float32)) for _ in range(2 * networks)]


def rank_main(task, mode, folder):
    """Runs on each rank: counts or measures, and writes the result."""
    if task != "measure":
        # Read once, when MindSpore runs its first operator.
        os.environ.update(MS_DEV_SAVE_GRAPHS="2", MS_DEV_SAVE_GRAPHS_PATH=str(folder))
    import mindspore
    from mindspore.communication import get_rank, init

    mindspore.set_context(mode=mindspore.GRAPH_MODE if mode == "graph" else mindspore.PYNATIVE_MODE)
    rank = 0
    if "MS_ROLE" in os.environ:
        init()
        rank = get_rank()
        mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    mindspore.set_seed(0)
    results = {"count": count, "measure": measure, "share": share}[task](folder / f"graphs_{rank}")
    (folder / f"rank_{rank}.json").write_text(json.dumps(results))


def count(graphs):
    """Returns the number of all-reduces in the compiled step of each cell, and their bytes."""
    counts = {}
    cells = {name: cell for name, cell in make_cells().items() if name != "written by hand"}
    for i, (name, (networks, make_cell)) in enumerate(cells.items()):
        (sizes,) = sent_by(make_cell().set_train(), inputs_for(networks), graphs / str(i), "AllReduce")
        counts[name] = len(sizes), sum(sizes)
    return counts


def sent_by(cell, inputs, graphs, *operators):
    """
    Returns, for each operator, the bytes of each message of float32 that a cell's step sends with it; compiles the
    cell. The messages of skipped steps alone, of two flags, are left out.
    """
    # Read when a graph is compiled. The final graphs are named graph_build.
    os.environ["MS_DEV_SAVE_GRAPHS_PATH"] = str(graphs)
    cell.compile(*inputs)
    compiled = "".join(path.read_text() for path in graphs.rglob("graph_build_*.ir"))
    sizes = []
    for operator in operators:
        shapes = re.findall(rf"= {operator}\(.*\n +: \(<Tensor\[Float32\], \((.*?)\)[>,]", compiled)
        messages = (4 * math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in shapes)
        sizes.append([size for size in messages if size != BYTES_IN_SKIPPED_STEPS])
    return sizes


def share(graphs):
    """Measures steps with a plain optimizer and one whose state ranks share, and the all-gather alone."""
    import mindspore
    import numpy as np
    from mindspore import Tensor, nn, ops

    from ms_lossscale import DynamicLossScale, ScaledTrainOneStepCell, ShardedOptimizer

    def cell_with(make_optimizer):
        layers = [nn.Dense(SHARED_WIDTH, SHARED_WIDTH, has_bias=False, activation="tanh") for _ in range(SHARED_LAYERS)]
        network = nn.WithLossCell(nn.SequentialCell(*layers), nn.MSELoss())
        return ScaledTrainOneStepCell(network, make_optimizer(network.trainable_params()), DynamicLossScale())

    class Gather(nn.Cell):
        def __init__(self):
            super().__init__()
            self.gather = ops.AllGather() if several else nn.Identity()

        def construct(self, *parts):
            gathered = ()
            for part in parts:
                gathered += (self.gather(part)[:1],)
            return gathered

    def adam(weights):
        return nn.Adam(weights, 1e-4)

    several = mindspore.get_auto_parallel_context("parallel_mode") == "data_parallel"
    cells = {"plain": cell_with(adam), "shared": cell_with(lambda weights: ShardedOptimizer(weights, adam))}
    inner = {"plain": cells["plain"].optimizer, "shared": cells["shared"].optimizer.optimizer}
    state = {
        name: sum(each.nbytes for moments in (its.moment1, its.moment2) for each in moments)
        for name, its in inner.items()
    }
    # There is one message for each weight.
    part = Tensor(np.zeros(state["shared"] // 8 // SHARED_LAYERS, np.float32))
    batch = [Tensor(np.ones((SHARED_BATCH, SHARED_WIDTH), np.float32)) for _ in range(2)]
    sides = {
        **{name: (cell.set_train(), batch) for name, cell in cells.items()},
        "gather": (Gather(), [part] * SHARED_LAYERS),
    }
    operators = ("AllReduce", "AllGather")
    compiled = cells if several else ()
    sent = {name: list(map(sum, sent_by(*sides[name], graphs / name, *operators))) for name in compiled}
    seconds = {name: [] for name in sides}
    for i in range(ROUNDS + 1):
        for name, (cell, inputs) in sides.items():
            start = time.perf_counter()
            cell(*inputs)
            mindspore.runtime.synchronize()
            # The first round compiles.
            if i:
                seconds[name].append(time.perf_counter() - start)
    return {"seconds": {name: statistics.median(its) for name, its in seconds.items()}, "state": state, "sent": sent}


def measure(_):
    """Returns the seconds of each side's step: the median of rounds in which the sides take turns."""
    import mindspore

    cells = make_cells()
    cells = {name: cells[name][1]() for name in SIDES}
    for cell in cells.values():
        if isinstance(cell, mindspore.nn.Cell):
            cell.set_train()
    inputs = inputs_for(1)
    seconds = {name: [] for name in cells}
    for i in range(ROUNDS + 1):
        for name, cell in cells.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                cell(*inputs)
            mindspore.runtime.synchronize()
            # The first round compiles.
            if i:
                seconds[name].append((time.perf_counter() - start) / CALLS)
    return {name: statistics.median(values) for name, values in seconds.items()}


def run_ranks(task, ranks, mode="graph"):
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "mindspore.parallel.cluster.run", f"--worker_num={ranks}", f"--local_worker_num={ranks}"]
            # Ranks wait forever for a scheduler whose port another job has.
            with socket.create_server(("127.0.0.1", 0)) as probe:
                command += ["--log_dir=msrun", "--join=True", f"--master_port={probe.getsockname()[1]}"]
        command += [str(Path(__file__).resolve()), "--rank-work", task, mode, folder]
        # msrun calls `python`.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        result = subprocess.run(command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        if result.returncode:
            logs = [log.read_text(errors="replace")[-3000:] for log in sorted(Path(folder).glob("msrun/worker_*.log"))]
            raise RuntimeError("\n".join([f"{' '.join(command)} failed:", result.stderr[-3000:], *logs]))
        return json.loads((Path(folder) / "rank_0.json").read_text())


def ring(ranks, size, latency, bandwidth):
    """
    Returns the seconds of a ring all-reduce: 2 (p - 1) messages in a row of 1/p of the bytes (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69, 2009).
    """
    return 2 * (ranks - 1) * (latency + size / ranks / bandwidth)


def tree(ranks, latency):
    """Returns the seconds of an all-reduce of almost no bytes: to the root of a binary tree and back."""
    return 2 * math.ceil(math.log2(ranks)) * latency


def print_counts():
    print(f"Sent in a step, by networks of {LAYERS} layers of {WIDTH} x {WIDTH} (when accumulating: in a cycle):\n")
    counts = run_ranks("count", 2)
    stock, stock_bytes = counts["nn.TrainOneStepCell"]
    networks = {name: networks for name, (networks, _) in make_cells().items()}
    rows = []
    for name, (number, size) in counts.items():
        of_gradients, their_size = networks[name] * stock, networks[name] * stock_bytes
        rows.append((name, number, of_gradients, number - of_gradients, f"{size:,}", size - their_size))
    print(
        markdown_table(("cell", "all-reduces", "of gradients", "of overflow flags", "bytes", "of overflow flags"), rows)
    )


def print_measurements():
    stock, *others = SIDES
    print(
        f"A step on {os.cpu_count()} cores, batch {BATCH} on each rank; the medians of {ROUNDS} rounds. Stock is "
        f"{stock}; unchecked is Scaled with nothing checked:\n"
    )
    rows = []
    for mode in MODES:
        seconds = {ranks: run_ranks("measure", ranks, mode) for ranks in MEASURED_RANKS}
        for ranks, measured in seconds.items():
            growth = (f"{measured[side] / seconds[1][side]:.2f}" for side in (stock, "Scaled"))
            ratios = (f"{measured[side] / measured[stock]:.2f}" for side in others)
            rows.append((mode, ranks, f"{1000 * measured[stock]:.0f} ms", *growth, *ratios))
    header = ["mode", "ranks", "stock", "stock / 1 rank", "Scaled / 1 rank"]
    print(markdown_table([*header, "Scaled / stock", "unchecked / stock", "by hand / stock"], rows))


def print_sharing():
    weights = SHARED_LAYERS * SHARED_WIDTH**2
    print(
        f"A step with nn.Adam, whose state the ranks share or not: {weights / 1e6:.1f} million weights, batch "
        f"{SHARED_BATCH} on each rank, graph mode; the medians of {ROUNDS} rounds:\n"
    )
    rows = []
    for ranks in MEASURED_RANKS:
        result = run_ranks("share", ranks)
        plain, shared, gather = (result["seconds"][name] for name in ("plain", "shared", "gather"))
        rest = (shared - gather) / plain if ranks > 1 else shared / plain
        state = (f"{result['state'][name] / 1e6:.0f}" for name in ("plain", "shared"))
        sent = ("-", "-")
        if ranks > 1:
            sent = (f"{result['sent']['shared'][i] * factor / 1e6:.0f}" for i, factor in ((0, 1), (1, ranks)))
        numbers = f"{1000 * plain:.0f} ms", f"{shared / plain:.2f}", f"{gather / plain:.2f}", f"{rest:.2f}"
        rows.append((ranks, *numbers, *state, *sent))
    header = ["ranks", "plain", "shared, to plain", "all-gather alone", "shared without it"]
    header += ["state, plain, MB", "shared, MB", "all-reduced, MB", "all-gathered, MB"]
    print(markdown_table(header, rows))


def print_calculation(args):
    size = 4 * args.parameters
    print(
        f"Calculated for {args.parameters:g} weights ({size / 1e6:.0f} MB of float32 gradients, fused into one "
        f"message), {args.latency * 1e6:g} us and {args.bandwidth / 1e9:g} GB/s for each hop, and {args.step:g} s of "
        f"computing that nothing overlaps:\n"
    )
    rows = []
    for ranks in CALCULATED_RANKS:
        gradients, flag = (ring(ranks, n, args.latency, args.bandwidth) for n in (size, 4))
        milliseconds = f"{gradients * 1e3:.1f}", f"{flag * 1e3:.2f}", f"{tree(ranks, args.latency) * 1e3:.2f}"
        efficiencies = (f"{args.step / (args.step + sent):.0%}" for sent in (gradients, gradients + flag))
        rows.append((ranks, *milliseconds, *efficiencies))
    header = ["ranks", "gradients, ring, ms", "flag, ring, ms", "flag, tree, ms"]
    print(markdown_table([*header, "efficiency without flag", "with, ring"], rows))


def main():
    if sys.argv[1:2] == ["--rank-work"]:
        rank_main(*sys.argv[2:4], Path(sys.argv[4]))
        return
    args = make_parser().parse_args()
    if args.sharing:
        print_sharing()
        return
    if not args.calculate:
        print_counts()
        print_measurements()
        print_sharing()
    print_calculation(args)


if __name__ == "__main__":
    main()
