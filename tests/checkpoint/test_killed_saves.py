"""A process that is killed while it saves leaves the last completed checkpoint whole."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tensorshard.checkpoint.integrity import check, is_whole

_PROGRAM = """
import sys
from functools import partial
import torch
import tensorshard as ts

engine = ts.parallelize(
    partial(torch.nn.Linear, 500, 300), ts.Plan(), optimizer=partial(torch.optim.AdamW, lr=1e-3),
    loss_fn=torch.nn.functional.mse_loss,
)
x, y = torch.ones(4, 500), torch.ones(4, 300)
begun = engine.step_count
while True:
    engine.step(x, y)
    step, background = engine.step_count, engine.step_count % 2 == 0
    engine.save(f"{sys.argv[1]}/last", overwrite=True, background=background)
    engine.save(f"{sys.argv[1]}/step-{step}", background=background)
    if not background:
        print(step, flush=True)  # those before it are complete as well
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", [10 if "TENSORSHARD_WHOLE_GRID" in os.environ else 2])
def test_a_whole_checkpoint_is_there_after_each_kill(tmp_path: Path, kills: int) -> None:
    draws = random.Random(kills)
    for number in range(kills):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        printed = [process.stdout.readline()]  # one save is complete
        time.sleep(draws.random() * 0.5)
        process.send_signal(signal.SIGKILL)
        printed += process.stdout.readlines()
        process.wait()
        completed = int(printed[-1])
        steps = [int(path.name.removeprefix("step-")) for path in folder.glob("step-*")]
        assert all(is_whole(folder / f"step-{step}") for step in steps) and max(steps) >= completed
        check(folder / f"step-{max(steps)}")
        assert check(folder / "last").document["step_count"] >= completed
