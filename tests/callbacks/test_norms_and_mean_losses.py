"""A monitor's records have the norm, the mean loss and the dropped calls of their own step, whenever they are read."""

import csv
import itertools
import os
from pathlib import Path

import mindspore
import numpy as np
import pytest
from conftest import quick_in_pynative_mode, slow
from mindspore import Tensor, nn
from support.networks import BATCH, LossOfShape, batch_for
from support.sloped_networks import manual, with_norm
from support.token_networks import Tokens, batch, sgd, tensors
from support.training import cell_of

from ms_lossscale import DynamicLossScale, LossScaleMonitor

STEPS = 2


class MeanOfTokens(nn.Cell):
    """The mean over the tokens that a mask keeps, without a weight."""

    def __init__(self, name):
        super().__init__(auto_prefix=False)
        self.tokens = Tokens(name)
        self.weight = self.tokens.weight

    def construct(self, *inputs):
        loss, weight = self.tokens(*inputs)
        return loss / weight


class Recording(LossScaleMonitor):
    """Keeps the records, which it reads at the end of an epoch."""

    def __init__(self):
        super().__init__(1000)
        self.records = []

    def on_record(self, record):
        self.records.append(record)


class Followed:
    """A cell whose norms, losses and counts are read at once after each call, and a monitor that reads them later."""

    def __init__(self, kind, weighted, every=(1, 1), how="eagerly", **keywords):
        self.kind, self.weighted, self.every, self.how = kind, weighted, every, how
        self.keywords = {"clip_norm": float("inf"), **keywords}
        self.cycles, self.calls_in_cycle = 0, 0
        self.expected, self.monitor = [], Recording()
        self.build()

    def build(self):
        names = [f"network_{i}" for i in range(len(self.weighted))]
        is_manual = self.kind == "manual"
        networks = [
            Tokens(name) if weighted or is_manual else MeanOfTokens(name)
            for name, weighted in zip(names, self.weighted)
        ]
        keywords = dict(self.keywords)
        if not is_manual:
            keywords["weighted"] = list(self.weighted) if len(self.weighted) > 1 else self.weighted[0]
        if self.kind == "alternating":
            keywords["every"] = self.every
        self.cell = cell_of(self.kind, networks, list(map(sgd, networks)), DynamicLossScale(2.0**10), **keywords)
        self.call = self.manual_call() if is_manual else self.cell
        self.groups = range(len(self.weighted)) if self.kind == "alternating" else [0]
        self.calls = [[] for _ in self.groups]
        self.steps, self.dropped = self.read()

    def manual_call(self):
        step, (is_weighted,) = self.cell, self.weighted
        network = step.networks[0]

        def forward(x, y, mask):
            loss, tokens = network(x, y, mask)
            return (loss if is_weighted else loss / tokens), tokens

        value_and_grad = step.value_and_grad(forward, has_aux=True)

        def call(x, y, mask):
            x, y, mask = step.begin(x, y, mask)
            (loss, tokens), grads = value_and_grad(x, y, mask)
            if is_weighted:
                return loss / tokens, step.end(grads, weight=tokens)
            return loss, step.end(grads)

        return mindspore.jit(call) if self.how == "in_jit" else call

    def read(self):
        """Returns, for each overflow check, how many steps there were, and how many calls were dropped."""
        counters = self.cell.counters()
        counters = counters if self.kind == "alternating" else [counters]
        steps = [each["applied_steps"] + each["skipped_steps"] for each in counters]
        return steps, [each.get("dropped_calls", 0) for each in counters]

    def run(self, plan):
        """Makes calls of so many tokens each; `x` overflows, `flush` ends a cycle, `resume` loads into a new cell."""
        parts = [list(part) for _, part in itertools.groupby(plan, lambda each: each == "resume")]
        for part in parts:
            if part[0] == "resume":
                saved = {name: Tensor(value.asnumpy()) for name, value in self.cell.parameters_dict().items()}
                self.build()
                self.cell.load_state_dict(saved)
                self.steps, self.dropped = self.read()
                continue
            with self.monitor.watching(self.cell):
                for seed, tokens in enumerate(part):
                    self.flush() if tokens == "flush" else self.one_call(tokens, seed)
        return self

    def one_call(self, tokens, seed):
        x, y, mask = batch(3 if tokens == "x" else tokens, seed)
        if tokens == "x":
            x[0, 0] = np.inf
        outputs = self.call(*tensors((x, y, mask)))
        self.monitor.after_step(*outputs)
        losses = outputs[3].asnumpy() if len(outputs) > 3 else np.atleast_1d(outputs[0].asnumpy())
        weights = np.where(self.weighted, mask.sum(), 1.0)
        _, dropped = self.read()
        for i in self.groups:
            if (self.cycles + 1) % self.every[i] == 0 and dropped[i] == self.dropped[i]:
                its = slice(i, i + 1) if self.kind == "alternating" else slice(None)
                self.calls[i].append((losses[its], weights[its]))
        self.calls_in_cycle += 1
        if self.calls_in_cycle == self.keywords.get("gradient_accumulation_steps", 1):
            self.cycles, self.calls_in_cycle = self.cycles + 1, 0
        self.expect()

    def flush(self):
        self.cell.flush()
        if self.calls_in_cycle > 0:
            self.cycles, self.calls_in_cycle = self.cycles + 1, 0
            self.expect()
        self.monitor.after_epoch()

    def expect(self):
        steps, self.dropped = self.read()
        norms = self.cell.grad_norm()
        norms = norms if isinstance(norms, list) else [norms]
        for i in self.groups:
            its_norms = norms[i : i + 1] if self.kind == "alternating" else norms
            ended = steps[i] > self.steps[i]
            norm = tuple(norm for norm in its_norms if norm is not None) if ended else None
            self.expected.append((norm, self.mean(i) if ended else None, self.dropped[i]))
        self.steps = steps

    def mean(self, i):
        if not self.calls[i]:
            return None
        losses, weights = map(np.float64, zip(*self.calls[i]))
        self.calls[i].clear()
        with np.errstate(invalid="ignore"):
            totals = weights.sum(0)
            means = (losses * np.where(weights > 0, weights, 1)).sum(0) / np.where(totals > 0, totals, 1)
            return float(means.sum())

    def compare(self):
        norms, means, dropped = zip(*self.expected)
        written = [str(norm or None) for norm in norms]
        assert [str(record.grad_norm and (*record.grad_norm,)) for record in self.monitor.records] == written
        assert [record.dropped_calls for record in self.monitor.records] == list(dropped)
        assert [record.step_loss is None for record in self.monitor.records] == [mean is None for mean in means]
        for record, mean in zip(self.monitor.records, means):
            if mean is not None:
                np.testing.assert_allclose(record.step_loss, mean, rtol=1e-6)


INF, CYCLE = float("inf"), {"gradient_accumulation_steps": STEPS}
DROPPING = {**CYCLE, "drop_overflowed_calls": True}
PLAN = [3, 6, 1, "x", "x", "x", 2, 5, 4, "flush", 3, "resume", 5, 1, 6]
CASES = {
    "scaled": ("scaled", [False], {}),
    "scaled, weighted cycle": ("scaled", [True], {"gradient_accumulation_steps": 3}),
    "scaled, retried cycle": ("scaled", [False], {**CYCLE, "max_retries": 2}),
    "simultaneous": ("simultaneous", [True, False], {**CYCLE, "clip_norm": [1.0, INF]}),
    "simultaneous, one norm": ("simultaneous", [False, False], {"clip_norm": [None, INF]}),
    "alternating": ("alternating", [True, False], {**CYCLE, "every": (1, 2), "clip_norm": [INF, 1.0]}),
    "alternating, one norm": ("alternating", [False, False], {"every": (2, 1), "clip_norm": [INF, None]}),
    "scaled, dropped calls": ("scaled", [True], {**DROPPING, "gradient_accumulation_steps": 3, "max_retries": 1}),
    "simultaneous, dropped calls": ("simultaneous", [False, True], DROPPING),
    "alternating, dropped calls": ("alternating", [True, False], {**DROPPING, "every": (1, 2)}),
    "manual, dropped calls": ("manual", [False], DROPPING),
    "manual": ("manual", [True], {**CYCLE, "how": "eagerly"}),
    "manual, compiled": ("manual", [True], {**CYCLE, "how": "in_jit"}),
    "manual, without weights": ("manual", [False], {**CYCLE, "how": "eagerly"}),
}
QUICK = ["scaled, dropped calls", "simultaneous", "alternating", "manual"]


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in CASES if name not in QUICK))])
def test_they_are_those_that_are_read_at_once(mode, name):
    kind, weighted, keywords = CASES[name]
    followed = Followed(kind, weighted, **keywords).run(PLAN)
    followed.compare()
    norms, _, dropped = zip(*followed.expected)
    assert len(list(filter(None, norms))) >= 3
    assert any(dropped) or not np.isfinite(sum(map(sum, filter(None, norms))))


def rows_of(path):
    return list(csv.DictReader(Path(path).read_text().splitlines()))


@quick_in_pynative_mode
def test_the_line_shows_norm_and_mean_where_there_are_any(mode, capsys):
    followed = Followed("scaled", [True], **CYCLE)
    followed.monitor = LossScaleMonitor(1, csv="steps.csv")
    followed.run([3, 6, 1])
    norm, mean, _ = followed.expected[1]
    of_cycle = f"mean of the last cycle {mean:.6g}, gradient norm {norm[0]:.6g}, "
    lines = capsys.readouterr().out.splitlines()
    assert [of_cycle in line for line in lines] == [False, True, True]
    assert "norm" not in lines[0] and "mean" not in lines[0]
    rows = rows_of("steps.csv")
    assert [row["grad_norm"] for row in rows] == ["", str(norm[0]), ""]
    assert [row["step_loss"] for row in rows] == ["", str(float(rows[1]["step_loss"])), ""]
    np.testing.assert_allclose(float(rows[1]["step_loss"]), mean, rtol=1e-6)
    assert [row["dropped_calls"] for row in rows] == ["0", "0", "0"]


@quick_in_pynative_mode
def test_two_norms_in_a_row_and_in_a_line(mode, capsys):
    followed = Followed("simultaneous", [False, False])
    followed.monitor = LossScaleMonitor(1, csv="steps.csv")
    followed.run([3])
    ((norms, _, _),) = followed.expected
    (row,) = rows_of("steps.csv")
    assert row["grad_norm"] == f"{norms[0]}/{norms[1]}"
    assert row["step_loss"] == row["loss"]
    line = capsys.readouterr().out
    assert f", gradient norm {norms[0]:.6g}/{norms[1]:.6g}, loss scale" in line and "mean" not in line


@quick_in_pynative_mode
def test_a_file_that_0_4_began_goes_on_with_its_twelve_columns(mode):
    header = (
        "step,network,loss,loss_scale,skipped,applied_steps,skipped_steps,consecutive_skipped_steps,next_loss_scale,"
        "overflowed_parameters,retries,skip_reasons"
    )
    before = f"{header}\r\n1,0,0.5,1024.0,0,1,0,0,1024.0,,0,\r\n".encode()
    Path("steps.csv").write_bytes(before)
    followed = Followed("scaled", [False])
    followed.monitor = LossScaleMonitor(csv="steps.csv")
    followed.run([3, "x"])
    written = Path("steps.csv").read_bytes()
    assert written.startswith(before)
    rows = rows_of("steps.csv")
    assert [row["skip_reasons"] for row in rows] == ["", "", "loss"]
    assert all(len(row) == 12 and None not in row.values() for row in rows)


class Picture(nn.Cell):
    """Returns a loss and a picture of 4 MiB, or the picture as the loss."""

    def __init__(self, has_aux):
        super().__init__()
        self.weight = mindspore.Parameter(Tensor(np.ones(4, np.float32)), name="weight")
        self.picture = Tensor(np.ones((1024, 1024), np.float32))
        self.has_aux = has_aux

    def construct(self, x):
        loss = (self.weight * x).sum()
        return (loss, self.picture * loss) if self.has_aux else self.picture * loss


def mebibytes_in_use():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.parametrize("has_aux", [True, False])
def test_of_99_unread_steps_no_picture_is_kept(mode, has_aux):
    network, x = Picture(has_aux), Tensor(np.ones(4, np.float32))
    cell = cell_of("scaled", [network], [nn.SGD([network.weight], 1e-6)], DynamicLossScale(), has_aux=has_aux)
    monitor = LossScaleMonitor(100)
    with monitor.watching(cell):
        for step in range(99):
            monitor.after_step(*cell(x))
            if step == 9:
                before = mebibytes_in_use()
        # The pictures of 89 steps are 356 MiB.
        assert mebibytes_in_use() - before < 100


@quick_in_pynative_mode
@pytest.mark.parametrize(
    "name", ["scaled, weighted cycle", *slow("simultaneous", "alternating, dropped calls", "manual")]
)
def test_the_host_reads_nothing_between_two_lines(mode, name, monkeypatch):
    kind, weighted, keywords = CASES[name]
    followed, reads = Followed(kind, weighted, **keywords), []
    with followed.monitor.watching(followed.cell):
        outputs = followed.call(*tensors(batch(3)))
        for method in ("asnumpy", "item", "__bool__", "__float__", "__int__"):
            read = getattr(Tensor, method)
            monkeypatch.setattr(
                Tensor, method, lambda tensor, *args, read=read: (reads.append(tensor), read(tensor, *args))[1]
            )
        followed.monitor.after_step(*outputs)
        assert reads == []
        followed.monitor.after_epoch()
        assert reads


@quick_in_pynative_mode
def test_of_a_loss_that_is_no_scalar_it_is_the_sum(mode):
    network, monitor = LossOfShape((BATCH, 1)), Recording()
    cell = cell_of("scaled", [network], [nn.SGD([network.weight], 0.1)], DynamicLossScale(), **CYCLE)
    sums = []
    with monitor.watching(cell):
        for seed in range(STEPS):
            outputs = cell(*batch_for(False, seed))
            monitor.after_step(*outputs)
            sums.append(outputs[0].asnumpy().sum())
    assert [record.loss for record in monitor.records] == pytest.approx(sums)
    assert monitor.records[-1].step_loss == pytest.approx(np.mean(sums))


@pytest.mark.parametrize("steps", [1, STEPS])
def test_an_end_without_begin_has_no_norm_and_no_mean_and_is_in_no_cycle(mode, steps, capsys):
    step, train_step = manual(DynamicLossScale(2.0**10), "in_jit", clip_norm=INF, gradient_accumulation_steps=steps)
    monitor, losses = Recording(), []

    @mindspore.jit
    def end_alone(*grads):
        return step.end(grads, loss=grads[0].sum())

    with monitor.watching(step):
        # The last step that is skipped before it has other reasons, and names.
        for norm in [INF] * steps + [4.0, None, 8.0]:
            if norm is None:
                monitor.after_step(100.0, end_alone(with_norm(2.0)))
            else:
                loss, overflow = train_step(with_norm(norm))
                losses.append(float(loss))
                monitor.after_step(loss, overflow)
    *_, first, without_begin, last = monitor.records
    assert (without_begin.skipped, without_begin.skip_reasons) == (1, "not_begun")
    assert without_begin.overflowed_parameters == ""
    assert (without_begin.grad_norm, without_begin.step_loss) == (None, None)
    assert without_begin.next_loss_scale == without_begin.loss_scale
    assert last.grad_norm == ((8.0,) if steps == 1 else (6.0,))
    assert last.step_loss == pytest.approx(np.mean(losses[-steps:]))
    assert (first.step_loss is None) == (steps > 1)
    lines = capsys.readouterr().out.splitlines()
    what = f"{'step' if steps == 1 else 'call'} {len(monitor.records) - 1}: skipped ({steps} in a row)"
    assert f"{what} as 'end' came without 'begin', loss scale 512 stays" in lines
    assert lines[-1].endswith("1 as 'end' came without 'begin'")
