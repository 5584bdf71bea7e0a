"""TRL's Trainers with their import line changed compute what TRL's compute in one process. Runs where TRL is."""

from typing import Any

import pytest

import peer_scripts
import tensorshard as ts
from rank_pool import RankError

pytest.importorskip("trl")

_IMPORTS = {
    "from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer": (
        "from trl import DPOConfig, SFTConfig\nfrom tensorshard.compat.trl import DPOTrainer, SFTTrainer"
    ),
}


def _theirs(method: str, folder: str) -> list[float]:
    given = {"method": method, "output_dir": folder, "per_device_train_batch_size": 4}
    found: list[float] = peer_scripts.run("trl_training", given)
    return found


def _ours(method: str, folder: str, plan: dict[str, Any], size: int) -> list[float]:
    given = {"method": method, "output_dir": folder, "plan": ts.Plan(**plan), "per_device_train_batch_size": size}
    found: list[float] = peer_scripts.run("trl_training", given, _IMPORTS)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_losses_are_those_of_trl(ranks, tmp_path, method, zero):
    theirs = _theirs(method, str(tmp_path / "theirs"))
    assert len(theirs) == 6 and theirs[-1] < theirs[0]
    for found in ranks(2, _ours, method, str(tmp_path / "ours"), {"zero": zero}, 2):
        assert found == pytest.approx(theirs, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"tp": 2}, {"pp": 2}])
def test_what_trl_cannot_be_split_along_is_refused_by_name(ranks, tmp_path, plan):
    (axis,) = plan
    with pytest.raises(RankError, match=rf"{axis}=2 was given to TRL's SFTTrainer, which puts a forward of its own"):
        ranks(1, _ours, "sft", str(tmp_path), plan, 2)
