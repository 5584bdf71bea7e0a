"""Folders of peft models: what peft itself would write, under every plan, or a refusal by name."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
PLANS = [
    *(dict(zero=level) for level in range(4)),
    dict(tp=2),
    dict(pp=2, micro_batches=2),
    dict(zero=3, precision="bf16"),
    dict(zero=2, precision="bf16"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.hidden, self.outlet = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(input_ids % 6, 6).to(self.inlet.weight.dtype)
        return self.outlet(torch.tanh(self.hidden(torch.tanh(self.inlet(x)))))


def llama(**more: Any) -> nn.Module:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes, **more))


def _lora(**fields: Any) -> Any:
    return peft.LoraConfig(**({"r": 4, "target_modules": ["q_proj", "v_proj"]} | fields))


def _made(kind: str) -> nn.Module:
    torch.manual_seed(1)
    if kind == "module":
        torch.manual_seed(0)
        return peft.get_peft_model(Net(), _lora(target_modules=["hidden"], modules_to_save=["outlet"]))
    if kind == "tied":
        return peft.get_peft_model(llama(tie_word_embeddings=True), _lora(bias="lora_only"))
    if kind == "saved":
        return peft.get_peft_model(llama(), _lora(modules_to_save=["lm_head"]))
    if kind in ("prompt", "prefix"):
        config = (
            peft.PromptTuningConfig if kind == "prompt" else partial(peft.PrefixTuningConfig, prefix_projection=True)
        )
        return peft.get_peft_model(llama(), config(task_type="CAUSAL_LM", num_virtual_tokens=4))
    model = peft.get_peft_model(llama(), _lora())
    if kind == "several":
        model.add_adapter("second", _lora(target_modules=["k_proj"]))
        model.set_adapter("default")
    return model


def _base(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Net() if kind == "module" else llama(**({"tie_word_embeddings": True} if kind == "tied" else {}))


def _loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)[:, -targets.size(1) :]
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _tokens() -> torch.Tensor:
    return torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(0))


def _train(kind: str, folder: str, fields: dict[str, Any]) -> None:
    model = _made(kind)
    sample = {"input_ids": _tokens()[:1]}
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=ADAMW, loss_fn=_loss, sample_inputs=sample)
    share = slice(engine.mesh.dp_rank, None, engine.mesh.dp_size)
    tokens = _tokens()[share]
    for _ in range(3):
        engine.step({"input_ids": tokens[:, :-1]}, tokens[:, 1:])
    engine.save_pretrained(folder)


def _train_alone(kind: str) -> Any:
    model: Any = _made(kind)
    optimizer = ADAMW([p for p in model.parameters() if p.requires_grad])
    for _ in range(3):
        _loss(model(input_ids=_tokens()[:, :-1]), _tokens()[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _files(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return {str(file.relative_to(folder)): load_file(file) for file in folder.rglob("adapter_model.safetensors")}


def _check(ranks: Any, kind: str, fields: dict[str, Any], folder: Path) -> Any:
    ranks(2, _train, kind, str(folder / "ours"), fields)
    alone = _train_alone(kind)
    alone.save_pretrained(folder / "theirs")
    found, expected = _files(folder / "ours"), _files(folder / "theirs")
    assert found.keys() == expected.keys()
    tolerance = 2e-2 if "precision" in fields else 1e-5
    for file, tensors in expected.items():
        assert found[file].keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(found[file][name], tensor, rtol=tolerance, atol=tolerance, msg=name)
    return alone


@pytest.mark.slow
@pytest.mark.parametrize("fields", PLANS, ids=str)
@pytest.mark.parametrize("kind", ["lora", "saved"])
def test_adapters_are_those_of_one_process(ranks, tmp_path, kind, fields):
    alone = _check(ranks, kind, fields, tmp_path)
    tokens = {"input_ids": _tokens()}
    tolerance = 5e-2 if "precision" in fields else 1e-4
    with torch.no_grad():
        expected = alone.eval()(**tokens).logits
        opened = peft.PeftModel.from_pretrained(_base(kind), tmp_path / "ours").eval()
        torch.testing.assert_close(opened(**tokens).logits, expected, rtol=tolerance, atol=tolerance)
        alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()  # with its base
        torch.testing.assert_close(alone(**tokens).logits, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "fields",
    [
        dict(zero=3),
        pytest.param(dict(tp=2), marks=pytest.mark.slow),
        pytest.param(dict(zero=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["module", "tied", "several", "prompt", "prefix"])
def test_other_models_of_peft(ranks, tmp_path, kind, fields):
    _check(ranks, kind, fields, tmp_path)


def test_a_base_model_with_a_name_is_not_written(ranks, tmp_path):
    _base("lora").save_pretrained(tmp_path / "base")
    ranks(2, _from_a_directory, str(tmp_path))
    assert "config.json" not in {file.name for file in (tmp_path / "ours").iterdir()}
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert any("lora_A" in name for name, _ in opened.named_parameters())


def _from_a_directory(folder: str) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "base")
    engine = ts.parallelize(peft.get_peft_model(base, _lora()), ts.Plan(), optimizer=ADAMW, loss_fn=_loss)
    engine.save_pretrained(Path(folder) / "ours")


class Normalized(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)


def _refusals(folder: str) -> list[str]:
    trained_beside = peft.get_peft_model(llama(), _lora())
    trained_beside.base_model.model.model.norm.weight.requires_grad_(True)
    injected = peft.inject_adapter_in_model(_lora(), llama())
    statistics = peft.get_peft_model(Normalized(), _lora(target_modules=["hidden"]))
    tasks = dict(num_virtual_tokens=4, num_tasks=2, prompt_tuning_init="RANDOM")
    prompts = peft.MultitaskPromptTuningConfig(task_type="CAUSAL_LM", **tasks)
    mixed = peft.get_peft_model(llama(), _lora(), mixed=True)
    found = []
    for model in (trained_beside, injected, statistics, peft.get_peft_model(llama(), prompts), mixed):
        engine = ts.parallelize(model, ts.Plan(), optimizer=ADAMW, loss_fn=_loss)
        with pytest.raises(ValueError) as caught:
            engine.save_pretrained(folder)
        found.append(str(caught.value))
    engine = ts.parallelize(peft.get_peft_model(llama(), _lora()), ts.Plan(), optimizer=ADAMW, loss_fn=_loss)
    with pytest.raises(ValueError) as caught:
        engine.save_pretrained(folder, max_shard_size=100)
    return [*found, str(caught.value)]


def test_what_peft_would_not_open_is_refused_by_name(ranks, tmp_path):
    expected = [
        "1 parameters are trained beside them, such as 'base_model.model.model.norm.weight'",
        "into which peft injected the layer 'model.layers.0.self_attn.q_proj'",
        "the statistics of 'base_model.model.norm' (BatchNorm1d) change in training",
        "cannot write the adapter 'default' of peft's type MULTITASK_PROMPT_TUNING",
        "was called for a PeftMixedModel, which peft itself cannot save",
        "max_shard_size is 100 bytes, but peft reads an adapter from one file",
    ]
    for message, part in zip(ranks(1, _refusals, str(tmp_path / "refused"))[0], expected, strict=True):
        assert part in message
    assert not (tmp_path / "refused").exists()


def _load(kind: str, folder: str, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Loads the adapters into an engine whose own differ, and takes a step."""
    model = _made(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    sample = {"input_ids": _tokens()[:1]}
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=ADAMW, loss_fn=_loss, sample_inputs=sample)
    engine.load_adapters(folder)
    state = engine.full_state_dict()
    tokens = _tokens()[engine.mesh.dp_rank :: engine.mesh.dp_size]
    loss = engine.step({"input_ids": tokens[:, :-1]}, tokens[:, 1:])
    return {**state, "loss": loss}


@pytest.mark.slow
@pytest.mark.parametrize("fields", PLANS[:6], ids=str)
@pytest.mark.parametrize("kind", ["lora", "saved", "several", "prompt", "tied"])
def test_an_engine_reads_what_peft_has_written(ranks, tmp_path, kind, fields):
    alone = _train_alone(kind)
    alone.save_pretrained(tmp_path / "theirs")
    found = ranks(2, _load, kind, str(tmp_path / "theirs"), fields)[0]
    expected = alone.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name, p in alone.named_parameters() if p.requires_grad)
    with torch.no_grad():
        loss = _loss(alone(input_ids=_tokens()[:, :-1]), _tokens()[:, 1:])
    torch.testing.assert_close(found["loss"], loss, rtol=1e-5, atol=0.0)


def _other_adapters(folder: str) -> list[str]:
    found = []
    peft.get_peft_model(llama(), _lora(lora_alpha=16)).save_pretrained(folder)
    others = [
        _lora(lora_alpha=8),
        _lora(lora_alpha=16, target_modules=["k_proj"]),
        peft.LoraConfig(r=2, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
    ]
    for model in (*(peft.get_peft_model(llama(), config) for config in others), llama()):
        engine = ts.parallelize(model, ts.Plan(), optimizer=ADAMW, loss_fn=_loss)
        before = engine.full_state_dict()
        with pytest.raises(ValueError) as caught:
            engine.load_adapters(folder)
        found.append(str(caught.value))
        assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
    with pytest.raises(ValueError) as caught:
        engine.save_pretrained(folder + "-new", adapters_only=True)
    return [*found, str(caught.value)]


def test_other_adapters_are_refused_by_name(ranks, tmp_path):
    expected = [
        "has lora_alpha=16, and the adapter 'default' of this model 8",
        "is of another adapter than 'default' of this model: only",
        "has r=4, and the adapter 'default' of this model 2",
        "engine.load_adapters was called for a LlamaForCausalLM, which has no adapters of peft",
        "adapters_only=True) was called for a LlamaForCausalLM, which is no model of peft",
    ]
    for message, part in zip(ranks(1, _other_adapters, str(tmp_path / "adapters"))[0], expected, strict=True):
        assert part in message


def _adapters_only(folder: str) -> None:
    engine = ts.parallelize(_made("lora"), ts.Plan(), optimizer=ADAMW, loss_fn=_loss)
    engine.save_pretrained(folder, adapters_only=True)


def test_adapters_only(ranks, tmp_path):
    ranks(1, _adapters_only, str(tmp_path / "ours"))
    names = {file.name for file in (tmp_path / "ours").iterdir()}
    assert names - {"README.md"} == {"adapter_config.json", "adapter_model.safetensors"}
