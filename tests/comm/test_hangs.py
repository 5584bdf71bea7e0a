"""Nine ways to keep the other ranks waiting: each is named, with the rank and the cause, within half a minute."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

_SCRIPT = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
import torch
from torch import nn
import tensorshard as ts
from tensorshard.trainer.launch.worker import end_process

kind, folder = sys.argv[1:]
rank = int(os.environ["RANK"])

def loss(output, targets):
    if kind == "raises" and rank == 1 and engine.step_count == 2:
        raise ZeroDivisionError("made by the test")
    return nn.functional.mse_loss(output, targets)

def batches():
    for number in range(6):
        if rank == 1 and number == 2:
            Path(folder, "begins").write_text(str(time.time()))
        while kind == "loads" and rank == 1 and number == 2:
            time.sleep(0.01)  # the loop in data loading
        yield torch.ones(4, 8), torch.ones(4, 4)

engine = ts.parallelize(partial(nn.Linear, 8, 4), ts.Plan(zero=1), optimizer=partial(torch.optim.SGD, lr=0.1),
                        loss_fn=loss, timeout=100, watchdog=9)
engine.call_watch.stacks = Path(folder, "stacks")
engine.call_watch.end_process = end_process
for number, batch in enumerate(batches()):
    if rank == 1 and number == 2:
        if kind == "sleeps":
            time.sleep(300)  # the sleep
        if kind == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "skips":
            continue
        if kind == "exits":
            sys.exit(0)
        if kind == "saves":
            engine.save(folder + "/checkpoint")
        if kind == "shape":
            engine.mean({"a": 1.0, "b": 2.0})
    elif number == 2 and kind == "shape":
        engine.mean({"a": 1.0})
    engine.step(*batch)
if kind == "skips":
    engine.evaluate(*batch)
"""

_CAUSES = {
    "sleeps": r"rank 1 did not come for 9 s .*rank 1 is at script.py:\d+, process \d+ on",
    "stops": r"rank 1 is stopped \(by SIGSTOP",
    "dies": r"rank 1 has died without a word: process \d+ on",
    "skips": r"rank 1 (called engine.evaluate while|has ended, or let go of its Engine)",
    "shape": r"wait in different collectives of engine.mean, call 3: rank [01] in .* \(.*rank [01] in .*script.py:\d+",
    "raises": r"rank 1 failed in engine.step: ZeroDivisionError: made by the test",
    "loads": r"rank 1 did not come for 9 s .*rank 1 is at script.py:\d+",
    "exits": r"rank 1 has ended, or let go of its Engine",
    # Either rank may find out.
    "saves": r"rank 1 called engine.save while rank 0 called engine.step|"
    r"rank 0 called engine.step while rank 1 called engine.save",
}
_FAST = ("dies",)
_BOUND = 30.0  # seconds from the hang to the end of the rank that waited


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k if k in _FAST else pytest.param(k, marks=pytest.mark.slow) for k in _CAUSES])
def test_each_hang_is_named(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environment = {**os.environ, "WORLD_SIZE": "2", "TENSORSHARD_STORE_FILE": str(tmp_path / "store")}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), kind, str(tmp_path)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = processes[0].communicate(timeout=240)[1]
        ended = time.time()
        processes[1].wait(timeout=60)
    finally:
        for process in processes:
            process.kill()
    assert processes[0].returncode != 0
    assert re.search(_CAUSES[kind], said.replace("\n", " ")), said
    seconds = ended - float((tmp_path / "begins").read_text())
    assert seconds < _BOUND, f"it took {seconds:.0f} s"
    if kind in ("sleeps", "loads"):
        assert "script.py" in (tmp_path / "stacks" / "rank1.txt").read_text()
