"""What ``tensorshard check`` writes before it measures, and the page of such files."""

import json
from pathlib import Path

import pytest
from benchmarks.harness.predictions_document import DOCUMENT, write_document
from benchmarks.harness.predictions_document import rows as rows_of

from tensorshard.predict.hardware import find_hardware, known_hardware
from tensorshard.trainer import checked_predictions as module


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"vocab_size": 64, "context_length": 16, "num_layers": 1, "num_heads": 2, "width": 16}
    monkeypatch.setattr(module, "_SIZES", {"cuda": size})
    monkeypatch.setattr(module, "plans", lambda *_: {"zero=0": module.Plan(zero=0)})


def test_predictions_are_written_first_and_measurements_beside_them(small: None, tmp_path: Path) -> None:
    found = module.predict(1, "cuda", find_hardware("h100"))
    values = module.document(found, 1, "cuda", "NVIDIA H100 80GB HBM3")
    path = tmp_path / "new" / "predictions.json"
    module.write(path, values)
    written = json.loads(path.read_text())
    (run,) = written["runs"]
    assert written["profile"] == "h100" and run["measured"] is None and "measured" not in module.describe(values)
    predicted = run["predicted"]
    assert len(predicted["memory"]) == 1 and predicted["flops"] > 0
    assert predicted["step_span"][0] < predicted["step_seconds"] < predicted["step_span"][1]
    assert "by the profile h100, not validated" in predicted["times"]
    assert rows_of([written])[0] == f"| {known_hardware()[0]} | | | | | | |"  # nothing was measured yet
    values["runs"][0]["measured"] = {"memory": [3 << 20], "step_seconds": 0.5}
    assert "measured   3.00 MiB a rank, a step 500.00 ms" in module.describe(values)
    row, *others = rows_of([json.loads(json.dumps(values))])
    assert row.startswith("| NVIDIA H100 80GB HBM3,") and "| 3.00 MiB |" in row and "| 500.00 ms |" in row
    assert len(others) == len(known_hardware()) - 1 and not any(line.startswith("| h100 ") for line in others)


def test_the_page_is_written_from_the_files() -> None:
    before = DOCUMENT.read_text()
    assert write_document().read_text() == before
