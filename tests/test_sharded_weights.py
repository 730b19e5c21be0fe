"""Parallel modes that shard weights. MindSpore runs them on GPU and Ascend only: cells are constructed, not run."""

import pytest
from support.python_process import check_msrun, skip_with_older_mindspore

pytestmark = pytest.mark.long

PROGRAM = """
import mindspore
from mindspore import nn
from ms_lossscale import AlternatingTrainOneStepCell, DynamicLossScale, ScaledTrainOneStepCell
from ms_lossscale.step.ranks import Ranks

mindspore.set_context(mode=mindspore.GRAPH_MODE)


def construct(cell=ScaledTrainOneStepCell, **keywords):
    networks = [nn.WithLossCell(nn.Dense(4, 1), nn.MSELoss()) for _ in range(2)]
    for i, network in enumerate(networks):
        network.update_parameters_name(f"{i}.")
    optimizers = [nn.Momentum(network.trainable_params(), 0.1, 0.9) for network in networks]
    if cell is ScaledTrainOneStepCell:
        networks, optimizers = networks[0], optimizers[0]
    return cell(networks, optimizers, DynamicLossScale(), **keywords)


def refused(**keywords):
    try:
        construct(**keywords)
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__, error, flush=True)


for mode in ("semi_auto_parallel", "auto_parallel"):
    mindspore.set_auto_parallel_context(parallel_mode=mode)
    if mode == "semi_auto_parallel":
        refused()
        mindspore.communication.init()
    for cell in (ScaledTrainOneStepCell, AlternatingTrainOneStepCell):
        for step in construct(cell).steps:
            decision = step.window.decision
            print("in", mode, isinstance(decision.ranks, Ranks), decision.verdict.ranks is decision.ranks, flush=True)
    refused(gradient_accumulation_steps=2)
    refused(ema_decay=0.9)
mindspore.set_auto_parallel_context(pipeline_stages=2)
refused()
"""


def test_the_verdict_is_agreed_on_and_the_rest_is_refused(tmp_path):
    skip_with_older_mindspore()
    (tmp_path / "program.py").write_text(PROGRAM)
    for log in check_msrun(2, "program.py", cwd=tmp_path).logs:
        for mode in ("semi_auto_parallel", "auto_parallel"):
            assert log.count(f"in {mode} True True") == 3
            assert f"'gradient_accumulation_steps' is not supported with parallel_mode='{mode}'" in log
            assert f"'ema_decay' is not supported with parallel_mode='{mode}'" in log
        assert "RuntimeError For 'ScaledTrainOneStepCell', the parallel_mode is 'semi_auto_parallel'" in log
        assert "pipeline stages are not supported, but pipeline_stages is 2" in log
