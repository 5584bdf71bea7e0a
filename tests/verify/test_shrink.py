"""Small models and batches that stand for large ones."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts
from tensorshard.models.gpt import GPT
from tensorshard.verify.shrink import Shrunk, shrink

PLAN = ts.Plan(dp_shard=2, tp=2, pp=2, micro_batches=2).resolve(8)
BY_RANK = replace(PLAN, random="by_rank")
SAMPLES = 8  # two for each data rank and micro-batch


def _transformers(model: str, config: str | None = None, **settings: Any) -> nn.Module:
    import transformers

    kind: Any = getattr(transformers, model)
    return kind(getattr(transformers, config)(**settings) if config else kind.config_class(**settings))


def _tokens(size: int, samples: int = 4, positions: int = 100) -> torch.Tensor:
    return torch.arange(samples * positions).mul(7).remainder(size).view(samples, positions)


_SIZES = {"num_hidden_layers": 8, "num_attention_heads": 8, "hidden_size": 512, "intermediate_size": 1024}
_LLAMA = {**_SIZES, "vocab_size": 1000, "num_key_value_heads": 4, "eos_token_id": 999}
_IDS = {"input_ids": _tokens(1000)}
_IMAGE = {"pixel_values": torch.ones(4, 3, 64, 64)}
_CLASSES = torch.zeros(4, dtype=torch.long)
CASES: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "Llama": (
        partial(_transformers, "LlamaForCausalLM", **_LLAMA), _IDS, _tokens(1000),
        ["3 of 8 blocks", "width 64 of 512, 4 of 8 heads", "vocabulary 64 of 1000"],
    ),
    "Llama, tied": (
        partial(_transformers, "LlamaForCausalLM", **_LLAMA, tie_word_embeddings=True), _IDS, _tokens(1000),
        ["3 of 8 blocks", "width 64 of 512, 4 of 8 heads", "vocabulary 64 of 1000"],
    ),
    "GPT-2": (
        partial(_transformers, "GPT2LMHeadModel", n_layer=6, vocab_size=1001), _IDS, _tokens(1000),
        ["3 of 6 blocks", "width 64 of 768, 4 of 12 heads", "vocabulary 65 of 1001"],
    ),
    "BERT": (
        partial(_transformers, "BertForSequenceClassification", **_SIZES, vocab_size=1000),
        {**_IDS, "attention_mask": torch.ones(4, 100, dtype=torch.long)}, _CLASSES,
        ["3 of 8 blocks", "width 64 of 512, 4 of 8 heads", "vocabulary 64 of 1000"],
    ),
    "T5": (
        partial(_transformers, "T5ForConditionalGeneration", num_layers=6, num_decoder_layers=4, vocab_size=1000),
        {**_IDS, "decoder_input_ids": _tokens(1000, positions=50)}, _tokens(1000, positions=50),
        ["4 of 10 blocks (2 of 6 in encoder.block, 2 of 4 in decoder.block)", "width 64 of 512, 4 of 8 heads",
         "vocabulary 64 of 1000", "14 of 50 positions", "24 of 100 positions"],
    ),
    "Mixtral": (
        partial(_transformers, "MixtralForCausalLM", **_LLAMA), _IDS, _tokens(1000),
        ["3 of 8 blocks", "width 64 of 512, 4 of 8 heads", "4 of 8 experts", "vocabulary 64 of 1000"],
    ),
    "ViT": (
        partial(_transformers, "ViTForImageClassification", **_SIZES, image_size=64), _IMAGE, _CLASSES,
        ["3 of 8 blocks", "width 64 of 512, 4 of 8 heads"],
    ),
    "text and image": (
        partial(
            _transformers, "CLIPModel", text_config={**_SIZES, "vocab_size": 1000, "eos_token_id": 999},
            vision_config={**_SIZES, "image_size": 64, "patch_size": 16}, projection_dim=512,
        ), {**_IMAGE, "input_ids": _tokens(1000, positions=40)}, _CLASSES,
        ["4 of 16 blocks", "width 64 of 512, 4 of 8 heads", "vocabulary 64 of 1000"],
    ),
    "layers of two types": (
        partial(
            _transformers, "Gemma3ForCausalLM", "Gemma3TextConfig", **{**_LLAMA, "num_hidden_layers": 14}, head_dim=64
        ),
        _IDS, _tokens(1000), ["6 of 14 blocks", "width 64 of 512, 4 of 8 heads", "vocabulary 64 of 1000"],
    ),
    "stages": (
        partial(_transformers, "ResNetForImageClassification"), {"pixel_values": torch.ones(4, 3, 160, 160)}, _CLASSES,
        ["8 of 16 blocks", "width 256 of 2048", "96 of 160 pixels of a side"],
    ),
}  # fmt: skip


def _shrunk(case: str) -> Shrunk:
    build, inputs, targets, _ = CASES[case]
    return shrink(build, PLAN, inputs, targets)


def _assert_runs(small: Shrunk) -> nn.Module:
    model = small.build()
    tensors = [*small.inputs.values()] if isinstance(small.inputs, dict) else [small.inputs]
    assert all(tensor.size(0) == SAMPLES for tensor in (*tensors, small.targets))
    model(**small.inputs) if isinstance(small.inputs, dict) else model(small.inputs)
    return model


@pytest.mark.slow_cases("text and image", "layers of two types")
@pytest.mark.parametrize("case", CASES)
def test_models_of_transformers_get_smaller_in_every_way(case: str) -> None:
    *_, expected = CASES[case]
    small = _shrunk(case)
    for sentence in (*expected, f"{SAMPLES} samples, made of the 4 given"):
        assert any(said.startswith(sentence) for said in small.said), (sentence, small.said)
    model = _assert_runs(small)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


def test_a_small_vocabulary_has_the_special_tokens_and_the_targets() -> None:
    targets = _tokens(1000)
    targets[:, 3] = -100
    ids = _tokens(1000)
    ids[:, 5] = 999
    small = shrink(CASES["Llama"][0], PLAN, {"input_ids": ids}, targets)
    model = small.build()
    assert model.config.vocab_size == 64 and model.config.eos_token_id == 63
    assert (small.inputs["input_ids"][:4] == 63).any(0).tolist() == [place == 5 for place in range(12)]
    assert (small.targets[:4, 3] == -100).all() and small.targets.max() < 64


def test_weights_are_the_constructors_and_tied_or_frozen_as_the_models() -> None:
    whole = _transformers("LlamaForCausalLM", **_LLAMA, tie_word_embeddings=True).to(torch.bfloat16).eval()
    whole.model.embed_tokens.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    model = shrink(whole, PLAN, _IDS, _tokens(1000)).build()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["model.embed_tokens.weight"]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not model.model.layers[0].training
    assert model.model.layers[0].mlp.up_proj.weight.detach().float().std().item() == pytest.approx(0.02, rel=0.1)
    assert len(whole.model.layers) == 8 and whole.config.hidden_size == 512
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())


def test_a_changed_model_of_transformers_keeps_its_width() -> None:
    whole = _transformers("LlamaForCausalLM", **{**_LLAMA, "hidden_size": 64, "intermediate_size": 96})
    whole.lm_head = nn.Sequential(whole.lm_head, nn.Tanh())
    small = shrink(whole, PLAN, _IDS, _tokens(1000))
    assert "3 of 8 blocks" in small.said and not any("width" in said for said in small.said)
    assert torch.equal(_assert_runs(small).model.embed_tokens.weight, whole.model.embed_tokens.weight)


def test_files_of_weights_are_not_read(tmp_path: Any) -> None:
    _transformers("LlamaForCausalLM", **_LLAMA).save_pretrained(tmp_path)
    small = shrink(ts.from_pretrained(tmp_path), PLAN, _IDS, _tokens(1000))
    assert "3 of 8 blocks" in small.said and _assert_runs(small).config.hidden_size == 64


def _gpt(depth: int = 6, dropout: float = 0.1) -> nn.Module:
    return GPT(64, 64, depth, 4, 32, dropout=dropout)


@pytest.mark.parametrize("plan", [PLAN, BY_RANK], ids=["same", "by_rank"])
def test_other_models_have_fewer_blocks_and_their_own_weights(plan) -> None:
    whole = _gpt()
    before = copy.deepcopy(whole.state_dict())
    small = shrink(whole, plan, _tokens(64, positions=50), _tokens(64, positions=50))
    assert small.said[0] == "3 of 6 blocks"
    drops = plan is PLAN
    assert drops != ("dropout off: ranks draw other random numbers" in small.said)
    assert "14 of 50 positions" in small.said
    model = _assert_runs(small)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    rate = 0.1 if drops else 0.0
    assert all(module.p == rate for module in model.modules() if isinstance(module, nn.Dropout))
    assert any(module.p == 0.1 for module in whole.modules() if isinstance(module, nn.Dropout))
    with torch.no_grad():
        next(iter(model.parameters())).zero_()
    assert all(torch.equal(value, before[name]) for name, value in small.build().state_dict().items())


def test_the_weights_of_a_callable_are_like_those_that_its_constructor_draws() -> None:
    torch.manual_seed(0)
    expected = _gpt().state_dict()
    small = shrink(_gpt, PLAN, _tokens(64, positions=50), _tokens(64, positions=50))
    first, second = small.build().state_dict(), small.build().state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    for name, value in first.items():
        if value.numel() >= 256:
            assert float(value.std()) == pytest.approx(float(expected[name].std()), rel=0.2), name


def test_a_model_that_a_callable_returns_stays_as_it_is() -> None:
    whole = _gpt()
    small = shrink(lambda: whole, PLAN, _tokens(64, positions=50), _tokens(64, positions=50))
    assert "3 of 6 blocks" in small.said and not any(p.is_meta for p in whole.parameters())


class _Alternating(nn.Module):
    """Blocks of two kinds in turn, the last one of a third, counted by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.n_layers = 9
        kinds = [nn.Sequential(nn.Linear(8, 8), nn.ReLU() if i % 2 else nn.Tanh()) for i in range(8)]
        self.layers = nn.ModuleList([*kinds, nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(self.n_layers):
            x = self.layers[i](x)
        return x


def test_blocks_of_every_kind_stay_in_order() -> None:
    whole = _Alternating()
    model = _assert_runs(shrink(whole, PLAN, torch.ones(4, 8), torch.ones(4, 8)))
    kinds = [type(block[1]) for block in model.layers]
    assert kinds == [nn.Tanh, nn.ReLU, nn.Tanh, nn.ReLU, nn.Linear] and model.n_layers == 5
    for place, original in enumerate((0, 1, 2, 3, 8)):
        assert torch.equal(next(model.layers[place].parameters()), next(whole.layers[original].parameters()))


def test_frozen_blocks_stay_beside_trained_ones() -> None:
    whole = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(12)])
    whole[:10].requires_grad_(False)
    model = _assert_runs(shrink(whole, PLAN, torch.ones(4, 8), torch.ones(4, 8)))
    assert [block[0].weight.requires_grad for block in model] == [False, False, True, True]


def test_layers_of_other_sizes_all_stay() -> None:
    whole = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.Dropout(0.5), nn.Linear(12, 4))
    small = shrink(whole, PLAN, torch.ones(4, 8), torch.ones(4, 4))
    assert small.said[0] == "all 3 blocks"
    _assert_runs(small)


def test_a_model_that_cannot_be_smaller_keeps_its_size_and_says_so() -> None:
    class Full(_Alternating):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(self.layers) < 9:
                raise ValueError("nine layers are needed")
            return super().forward(x)

    small = shrink(Full(), PLAN, torch.ones(4, 8), torch.ones(4, 8))
    assert small.said[0] == "all 9 blocks" and len(_assert_runs(small).layers) == 9
    small = shrink(Full(), PLAN, torch.ones(4, 9), torch.ones(4, 8))
    (said,) = small.said[-1:]
    assert said.startswith("nothing was made smaller: a forward fails (RuntimeError: ") and "mat1 and mat2" in said


def test_modules_that_a_plan_names_stay() -> None:
    plan = ts.Plan(pp=2, pp_split=["layers.5"], zero=0, micro_batches=2).resolve(2)
    small = shrink(_Alternating(), plan, torch.ones(4, 8), torch.ones(4, 8))
    assert small.said[0] == "all 9 blocks"
    plan = ts.Plan(pp=2, pp_split=["layers.2"], zero=0, micro_batches=2).resolve(2)
    assert shrink(_Alternating(), plan, torch.ones(4, 8), torch.ones(4, 8)).said[0] == "5 of 9 blocks"


def test_a_pipeline_has_a_block_for_each_stage_and_one_more() -> None:
    plan = ts.Plan(pp=4, micro_batches=4, zero=0).resolve(4)
    ids = _tokens(64, positions=50)
    assert len(shrink(partial(_gpt, 12), plan, ids, ids).build().blocks) == 5


def test_random_numbers_beside_dropouts_are_named() -> None:
    class Noisy(_Alternating):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.randn_like(x))

    said = shrink(Noisy(), BY_RANK, torch.ones(4, 8), torch.ones(4, 8)).said
    assert said[-1].startswith("its forward draws random numbers that are not dropout's")
    for model, plan in ((_Alternating(), BY_RANK), (Noisy(), PLAN)):
        assert not any("draws" in one for one in shrink(model, plan, torch.ones(4, 8), torch.ones(4, 8)).said)


def test_no_two_samples_are_equal_and_lengths_divide_as_before() -> None:
    ids = torch.randint(0, 64, (3, 51), generator=torch.Generator().manual_seed(0))
    small = shrink(partial(_gpt, dropout=0.0), PLAN, ids, ids)
    assert len(small.inputs.unique(dim=0)) == SAMPLES
    assert small.inputs.shape[1] % 2 == 1 and "15 of 51 positions" in small.said


def test_a_loss_that_needs_the_given_sizes_is_listened_to() -> None:
    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output.view(-1, 50, 64).flatten(0, 1), targets.reshape(-1, 50).flatten())

    ids = _tokens(64, positions=50)
    assert not any("positions" in said for said in shrink(_gpt, PLAN, ids, ids, loss_fn=loss).said)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
def test_models_of_timm(name: str) -> None:
    timm = pytest.importorskip("timm")
    small = shrink(partial(timm.create_model, name), PLAN, torch.randn(8, 3, 224, 224), _CLASSES.repeat(2))
    _assert_runs(small)
    assert small.said[0].startswith("3 of 12 blocks" if name.startswith("vit") else "all 8 blocks")


@pytest.mark.parametrize("case", ["GPT", pytest.param("Llama", marks=pytest.mark.slow)])
def test_the_small_model_trains_under_a_plan(ranks: Any, case: str) -> None:
    ranks(2, _train_small, case)


def _train_small(case: str) -> None:
    ids = _tokens(64, positions=50)
    plan = ts.Plan(zero=3).resolve(2)
    small = shrink(_gpt, plan, ids, ids) if case == "GPT" else shrink(CASES[case][0], plan, {"input_ids": ids}, ids)
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    engine = ts.parallelize(small.build, plan, optimizer=adamw, loss_fn=_loss)
    assert torch.isfinite(engine.step(small.inputs, small.targets))


def _loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
