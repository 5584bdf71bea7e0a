"""Tables kept on disk: taken again for the same model, checked again, and searched anew where they are wrong."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from log_lines import logged
from tensorshard.common.paths import CACHE_VARIABLE, cache_folder
from tensorshard.tensor_parallel.search import choose_table
from tensorshard.tensor_parallel.search.choose_table import choose_tensor_table, model_digest
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.table.table import VerifiedTable


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.names = heads, {"up", "down", "heads", "width"}
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).view(*x.shape[:-1], self.heads, -1).tanh().flatten(-2))


def net(width: int = 16, heads: int = 4) -> nn.Sequential:
    return nn.Sequential(Block(width, heads), Block(width, heads), nn.Linear(8, 8))


def choose(model: nn.Module) -> VerifiedTable:
    return choose_tensor_table(model, 2, inputs=torch.zeros(2, 8))


def digest(model: nn.Module, size: int = 2) -> str:
    return model_digest(model, size, torch.zeros(2, 8), False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    caplog.set_level(logging.INFO, "tensorshard")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "tensor_plans"


def test_a_table_is_found_once(folder, monkeypatch):
    first = choose(net())
    (file,) = folder.iterdir()
    monkeypatch.delattr(choose_table, "find_tensor_plan")
    with logged() as messages:
        again = choose(net())
    assert again == first
    assert again.alone == {"*": "outside of the blocks, and not an output layer larger than its input"}
    assert [message for message in messages if str(file) in message and "passed its check again" in message]


def test_a_table_that_does_not_pass_its_check_is_searched_anew(folder):
    first = choose(net())
    (file,) = folder.iterdir()
    text = file.read_text()
    file.write_text(text.replace("rowwise", "colwise"))
    with logged() as messages:
        again = choose(net())
    assert again == first
    assert file.read_text() == text
    assert [message for message in messages if "searched again" in message]


@pytest.mark.parametrize("text", ["", "tp_plan: [", "tp_plan: {'*.up': no such style}\nwhole: {}", "\0"])
def test_a_file_that_makes_no_sense_is_passed_over(folder, text):
    first = choose(net())
    (file,) = folder.iterdir()
    file.write_text(text)
    assert choose(net()) == first
    assert "colwise" in file.read_text()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    assert choose(net()) == find_tensor_plan(net(), 2, inputs=torch.zeros(2, 8))
    assert (tmp_path / "file").read_text() == "in the way"


def test_what_a_search_depends_on_changes_the_digest():
    digests = [digest(net()), digest(net(width=32)), digest(net(heads=2)), digest(net(), size=4)]
    assert len(set(digests)) == 4
    tied = net()
    tied[1].up.weight = tied[0].up.weight
    assert digest(tied) not in digests
    torch.manual_seed(3)
    with torch.device("meta"):
        assert digest(net()) == digests[0]


def test_the_digest_is_the_same_in_another_process(ranks):
    assert ranks(1, _digest_on_a_rank) == [digest(net())]


def _digest_on_a_rank() -> str:
    return digest(net())


def test_where_tables_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert cache_folder() is None
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "tensorshard"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "tensorshard"
