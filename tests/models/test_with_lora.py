"""A model with adapters, by one call."""

from pathlib import Path

import pretrained_models
from tensorshard.models import with_lora


def test_the_base_is_frozen_and_the_adapters_are_those_that_were_asked_for(tmp_path: Path) -> None:
    pretrained_models.llama().save_pretrained(tmp_path)
    model = with_lora(str(tmp_path), r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], dtype="bfloat16")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name and ("q_proj" in name or "v_proj" in name) for name in trained)
    assert {parameter.size(0) for name, parameter in trained.items() if "lora_A" in name} == {4}
    assert {str(p.dtype) for p in model.parameters() if not p.requires_grad} == {"torch.bfloat16"}
    everywhere = with_lora(str(tmp_path))
    assert any("down_proj" in name and "lora_" in name for name, _ in everywhere.named_parameters())
