"""Models of peft under every plan: what one process computes, the frozen base bit for bit as it was."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tensorshard as ts
from parity import assert_same_state
from tensorshard import cli
from tensorshard.checkpoint.export import export_checkpoint
from tensorshard.comm.sharding import to_local
from tensorshard.model.quantized import as_bytes
from tensorshard.weights.files.checkpoint_files import open_checkpoint

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
VOCABULARY, STEPS = 64, 4
ENGINE: dict[str, Any] = dict(plan=ts.Plan(zero=1), optimizer=ADAMW, loss_fn=nn.functional.mse_loss)


def llama(dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        **{"num_key_value_heads": 2, "initializer_range": 0.2, **more},
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=32, initializer_range=0.2)
    dropouts = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **dropouts))


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=4, initializer_range=0.2, **sizes
    )
    return transformers.MixtralForCausalLM(config)


def _lora(base: nn.Module, *targets: str, **fields: Any) -> nn.Module:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), init_lora_weights=False, **fields)
    return peft.get_peft_model(base, config)


class _ByHand(nn.Module):
    """A LoRA layer as people write it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, inner.in_features) / inner.in_features**0.5)
        self.up = nn.Parameter(torch.randn(inner.out_features, 4) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 2.0 * nn.functional.linear(nn.functional.linear(x, self.down), self.up)


class _ByHandOfLinears(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 4, bias=False)
        self.up = nn.Linear(4, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 2.0 * self.up(self.down(x))


def _by_hand(kind: type[nn.Module]) -> nn.Module:
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, kind(getattr(layer.self_attn, name)))
    return model


def _vera() -> nn.Module:
    config = peft.VeraConfig(r=8, target_modules=["q_proj", "o_proj"], init_weights=False, projection_prng_key=1)
    return peft.get_peft_model(llama(), config)


def _ia3() -> nn.Module:
    config = peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    )
    return peft.get_peft_model(llama(), config)


def _several() -> nn.Module:
    model = _lora(llama(), "q_proj", "v_proj")
    fields = dict(r=2, target_modules=["v_proj", "up_proj"], init_lora_weights=False)
    model.add_adapter("second", peft.LoraConfig(**fields))
    model.set_adapter("second")
    return model


def _two_at_once() -> nn.Module:
    model = _several()
    model.base_model.set_adapter(["default", "second"])
    return model


def _merged() -> nn.Module:
    model = _lora(llama(), "q_proj", "v_proj")
    fields = dict(r=2, target_modules=["v_proj", "up_proj"], init_lora_weights=False)
    model.add_adapter("second", peft.LoraConfig(**fields))
    model.merge_adapter(["default"])
    model.unmerge_adapter()
    return _lora(model.merge_and_unload(), "q_proj", "down_proj")


def _prefix() -> nn.Module:
    return peft.get_peft_model(llama(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def _prompt() -> nn.Module:
    return peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def _experts() -> nn.Module:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return _lora(mixtral(), target_parameters=parameters)


class Integers(torch.Tensor):
    """A weight of integers and scales, with the protocol that torchao's have."""

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor) -> "Integers":
        shape = integers.shape
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=scale.device)

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor) -> None:
        self.integers, self.scale = integers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> "Integers":
        return cls(**inner)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = (*args, None)[:3]
            return nn.functional.linear(x, weight.integers.to(x.dtype) * weight.scale.to(x.dtype), bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(func(args[0].integers), func(args[0].scale))
        raise NotImplementedError(f"{func} of integers")


def quantized(model: nn.Module, levels: int = 127) -> nn.Module:
    """`model`, the weights of whose linear layers are integers."""
    for module in model.modules():
        if type(module) is nn.Linear:
            scale = module.weight.detach().abs().amax(1, keepdim=True) / levels
            weight = Integers((module.weight.detach() / scale).round().to(torch.int8), scale)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return model


def _on_integers(levels: int = 127) -> nn.Module:
    torch.manual_seed(1)
    model = llama().requires_grad_(False)
    for layer in quantized(model.model, levels).layers:
        for name in ("q_proj", "o_proj"):
            setattr(layer.self_attn, name, _ByHandOfLinears(getattr(layer.self_attn, name)))
    return model


def _of_torchao(name: str, **fields: Any) -> nn.Module:
    """LoRA on what torchao quantizes."""
    from torchao import quantization

    config = getattr(quantization, name)
    more = {"weight_dtype": torch.int4, "granularity": quantization.granularity.PerGroup(16)} if "Intx" in name else {}
    model = llama()
    quantization.quantize_(model.model, config(**more))
    return _lora(model, *_ALL_LINEAR, **fields)


_ALL_LINEAR = "q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"

KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: _lora(llama(), *_ALL_LINEAR),
    "embedding": lambda: _lora(llama(), "embed_tokens", "q_proj"),
    "Conv1D": lambda: _lora(gpt2(), "c_attn", "c_proj", "c_fc", fan_in_fan_out=True),
    "experts": _experts,
    "mixture": lambda: _lora(mixtral(), "q_proj", "v_proj", "o_proj"),
    "rsLoRA": lambda: _lora(llama(), "q_proj", "v_proj", use_rslora=True),
    "DoRA": lambda: _lora(llama(), "q_proj", "o_proj", "down_proj", use_dora=True),
    "VeRA": _vera,
    "IA3": _ia3,
    "prompt": _prompt,
    "prefix": _prefix,
    "saved": lambda: _lora(llama(), "q_proj", "v_proj", modules_to_save=["lm_head", "norm"]),
    "bias": lambda: _lora(gpt2(), "c_attn", "c_fc", fan_in_fan_out=True, bias="lora_only"),
    "tied": lambda: _lora(llama(tie_word_embeddings=True), "q_proj", "lm_head"),
    "several": _several,
    "two at once": _two_at_once,
    "merged": _merged,
    "integers": _on_integers,
    "by hand": lambda: _by_hand(_ByHand),
    "by hand of linears": lambda: _by_hand(_ByHandOfLinears),
}

if find_spec("torchao") is not None:
    KINDS |= {
        "int8": lambda: _of_torchao("Int8WeightOnlyConfig"),
        "int8 DoRA": lambda: _of_torchao("Int8WeightOnlyConfig", use_dora=True),
        "int4": lambda: _of_torchao("IntxWeightOnlyConfig"),
        "float8": lambda: _of_torchao("Float8WeightOnlyConfig"),
    }

PLANS: dict[str, dict[str, Any]] = {
    "zero0": dict(),
    "zero1": dict(zero=1),
    "zero2": dict(zero=2),
    "zero3": dict(zero=3),
    "tp": dict(tp=2),
    "sp": dict(tp=2, sequence_parallel=True),
    "pp": dict(pp=2, micro_batches=2),
    "recompute": dict(zero=3, recompute="full"),
    "offload": dict(zero=3, offload=ts.Offload(parameters="cpu", optimizer="cpu")),
}


def tokens(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (4, 13), generator=torch.Generator().manual_seed(step))


def loss_fn(output: Any, targets: torch.Tensor) -> torch.Tensor:
    logits = getattr(output, "logits", output)[:, -targets.size(1) :]
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def made(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return KINDS[kind]()


Trained = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]


def _train(kind: str, fields: dict[str, Any]) -> Trained:
    """Losses, the full state, and what this rank has of each parameter that is whole on it."""
    engine = _engine(made(kind), fields)
    losses = _steps(engine, range(STEPS))
    sharded = engine.sharded
    sharded.finish_gather()
    whole = {name: p.detach().clone() for name, p in sharded.shown_parameters().items() if not sharded.is_part(name)}
    return losses, engine.full_state_dict(), whole


def alone(kind: str) -> tuple[list[float], nn.Module, dict[str, torch.Tensor]]:
    model = made(kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = ADAMW([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(STEPS):
        loss = loss_fn(model(input_ids=tokens(step)[:, :-1]), tokens(step)[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, before


# What no plan can split along a sequence is refused by name.
WITHOUT_SEQUENCES = ("experts", "prefix", "integers", "int8", "int8 DoRA", "int4", "float8")


@pytest.mark.slow
@pytest.mark.parametrize("fields", [dict(), dict(zero=1), dict(zero=3, recompute="full")])
def test_attention_of_a_mixture_whose_experts_are_split(ranks, fields):
    expected, model, before = alone("mixture")
    losses, state, whole = ranks(2, _train, "mixture", dict(ep=2, **fields))[0]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0.0)
    assert_same_state(state, model.state_dict(), 1e-5)
    assert sum(".experts." in name for name in before) == 4
    for name, value in before.items():
        assert torch.equal(state[name], value), name
        assert name not in whole or ".experts." not in name


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_under_every_plan(ranks, kind, plan):
    if plan == "sp" and kind in WITHOUT_SEQUENCES:
        with pytest.raises(AssertionError, match="can be split along a sequence"):
            ranks(2, _train, kind, PLANS[plan])
        return
    expected, model, before = alone(kind)
    results = ranks(2, _train, kind, PLANS[plan])
    losses, state, whole = results[0]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0.0)
    found, last = ({name: as_bytes(value) for name, value in of.items()} for of in (state, model.state_dict()))
    assert_same_state(found, last, 1e-5)
    for name, value in before.items():
        assert type(state[name]) is type(value) and torch.equal(found[name], as_bytes(value)), name
    for name in whole.keys() & results[1][2].keys():
        assert torch.equal(whole[name], results[1][2][name]), name


def _half_precision(level: int, precision: str, narrow: bool) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    torch.manual_seed(1)
    base = llama(torch.bfloat16)
    initial = {name: value.clone() for name, value in base.state_dict().items()}
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=not narrow)
    engine = _engine(model, dict(zero=level, precision=precision))
    losses = _steps(engine, range(STEPS))
    masters = engine.sharded.masters()
    frozen = {n: m for n, m in masters.items() if "lora" not in n}
    trained = [m for n, m in masters.items() if "lora" in n]
    facts = {
        "frozen": {m.dtype for m in frozen.values()},
        "copies": [n for n, m in frozen.items() if level < 3 and to_local(m).data_ptr() not in _memory(engine, n)],
        "gradients": [n for n, m in frozen.items() if m.grad is not None],
        "states": set(engine.optimizer.state) == set(trained),
        "trained": {m.dtype for m in trained},
    }
    state = engine.full_state_dict()
    plain = {n.removeprefix("base_model.model.").replace(".base_layer", ""): v for n, v in state.items()}
    facts["changed"] = [n for n, value in initial.items() if state and not same_bits(plain[n], value)]
    return losses, facts, {n: v for n, v in state.items() if "lora" in n}


def _memory(engine: ts.Engine, name: str) -> range:
    shown = engine.sharded.shown_parameters()[name]
    first = shown.untyped_storage().data_ptr()
    return range(first, first + shown.untyped_storage().nbytes() + 1)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected)


def _half_alone(narrow: bool) -> list[float]:
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(llama(torch.bfloat16), lora, autocast_adapter_dtype=True)
    if narrow:  # they begin at 16-bit values, and their masters do not stay there
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float() if parameter.requires_grad else parameter.data
    optimizer, losses = ADAMW([p for p in model.parameters() if p.requires_grad]), []
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(input_ids=tokens(step)[:, :-1]).logits
        loss = loss_fn(output.float(), tokens(step)[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("narrow", [False, True])
def test_frozen_weights_are_held_once_in_their_own_type(ranks, narrow, precision, level):
    """Under fp32 they are held as forwards compute with them."""
    losses, facts, _ = ranks(2, _half_precision, level, precision, narrow)[0]
    assert facts["frozen"] == {torch.bfloat16 if precision == "bf16" else torch.float32}
    assert facts["trained"] == {torch.float32} and facts["states"]
    assert not facts["copies"] and not facts["gradients"] and not facts["changed"]
    assert losses == pytest.approx(_half_alone(narrow), rel=2e-2)


def _thaws(level: int) -> str:
    model = llama(torch.bfloat16)
    model.model.layers[0].requires_grad_(False)
    engine = ts.parallelize(model, ts.Plan(zero=level), optimizer=ADAMW, loss_fn=loss_fn)
    engine.model.model.layers[0].mlp.up_proj.requires_grad_(True)
    with pytest.raises(RuntimeError) as caught:
        engine.step({"input_ids": tokens(0)[:, :-1]}, tokens(0)[:, 1:])
    return str(caught.value)


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_what_has_no_master_is_not_trained_later(ranks, level):
    message = ranks(2, _thaws, level)[0]
    assert "'model.layers.0.mlp.up_proj.weight' was frozen" in message
    assert "held in bfloat16 without an fp32 master weight" in message
    assert "leave requires_grad=True at parallelize" in message


def _saving(fields: dict[str, Any], path: str, kind: str) -> list[float]:
    engine = _engine(made(kind), fields)
    _steps(engine, range(2))
    engine.save(path, trained_only=True)
    return _steps(engine, range(2, STEPS))


def _loading(fields: dict[str, Any], path: str, kind: str) -> list[float]:
    """Training goes on from other adapters, on the same base."""
    model = made(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    engine = _engine(model, fields)
    engine.load(path)
    return _steps(engine, range(2, STEPS))


def _on_another_base(fields: dict[str, Any], path: str, kind: str) -> tuple[str, bool]:
    model = made(kind)
    parameter = [p for n, p in model.named_parameters() if "up_proj" in n and not p.requires_grad][-1]
    with torch.no_grad():
        parameter[[0, 1]] = parameter[[1, 0]]
    engine = _engine(model, fields)
    before = engine.full_state_dict()
    with pytest.raises(ValueError) as caught:
        engine.load(path)
    return str(caught.value), all(torch.equal(v, before[n]) for n, v in engine.full_state_dict().items())


def _engine(model: nn.Module, fields: dict[str, Any]) -> ts.Engine:
    sample = {"input_ids": tokens(0)[:1, :-1]}
    return ts.parallelize(model, ts.Plan(**fields), optimizer=ADAMW, loss_fn=loss_fn, sample_inputs=sample)


def _steps(engine: ts.Engine, steps: range) -> list[float]:
    share = slice(engine.mesh.dp_rank, None, engine.mesh.dp_size)
    batches = [tokens(step)[share] for step in steps]
    return [engine.step({"input_ids": batch[:, :-1]}, batch[:, 1:]).item() for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize("then", ["zero0", "zero1", "zero3", "tp", "pp", "offload"])
@pytest.mark.parametrize("written", ["zero0", "zero1", "zero3", "tp", "pp", "offload"])
@pytest.mark.parametrize("kind", ["linear", "saved"])
def test_checkpoints_of_what_is_trained_alone(ranks, tmp_path, kind, written, then):
    path = tmp_path / "checkpoint"
    expected = ranks(2, _saving, PLANS[written], str(path), kind)[0]
    parameters = dict(made(kind).named_parameters())
    there = {n.partition(".")[2] for n in open_checkpoint(path).metadata.state_dict_metadata if n.startswith("model.")}
    assert there == {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert ranks(2, _loading, PLANS[then], str(path), kind)[0] == pytest.approx(expected, rel=1e-5)
    message, unchanged = ranks(2, _on_another_base, PLANS[then], str(path), kind)[0]
    assert unchanged
    assert f"belongs to another base: 1 of {len(parameters) - len(there)} parameters" in message
    with pytest.raises(ValueError, match="has the trained parameters alone"):
        ts.from_pretrained(path, llama)


class _Int8(nn.Module):
    """A linear layer whose weights are integers and scales, held in buffers."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        scale = inner.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("integers", (inner.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.in_features, self.out_features = inner.in_features, inner.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.integers.to(x.dtype) * self.scale.to(x.dtype))


def _on_int8() -> nn.Module:
    torch.manual_seed(1)
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "o_proj"):
            setattr(layer.self_attn, name, _ByHandOfLinears(_Int8(getattr(layer.self_attn, name))))
    return model


def _train_on_int8(fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], set[torch.dtype]]:
    engine = _engine(_on_int8(), fields)
    losses = _steps(engine, range(STEPS))
    held = {b.dtype for n, b in engine.model.named_buffers() if n.endswith("integers")}
    return losses, engine.full_state_dict(), held


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero1", "zero3", "tp", "pp", "recompute", "offload"])
def test_a_base_of_integers_in_buffers(ranks, plan):
    expected, state, _ = ranks(1, _train_on_int8, {})[0]
    losses, found, held = ranks(2, _train_on_int8, PLANS[plan])[0]
    assert losses == pytest.approx(expected, rel=1e-5) and losses[0] > losses[-1]
    assert_same_state(found, state, 1e-5)
    assert held == {torch.int8}
    assert all(torch.equal(found[name], value) for name, value in state.items() if name.endswith("integers"))


def _saving_quantized(path: str) -> tuple[list[str], set[tuple[str, tuple[int, ...]]]]:
    """What is refused, and types and shapes of what a rank has of the weights at ZeRO 3."""
    engine = _engine(_on_integers(), dict(zero=3))
    _steps(engine, range(1))
    engine.save(f"{path}/checkpoint")
    masters = engine.sharded.masters().items()
    held = {(str(p.dtype), tuple(to_local(p).shape)) for name, p in masters if name.endswith("mlp.up_proj.weight")}
    weight = engine.full_state_dict().get("model.layers.0.mlp.up_proj.weight")
    assert weight is None or type(weight) is Integers
    said = []
    other = quantized(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    other[1] = nn.Linear(4, 4)
    calls: list[Callable[[], Any]] = [
        lambda: _engine(llama(), dict(zero=1)).load(f"{path}/checkpoint"),
        lambda: ts.parallelize(other, **ENGINE).save_pretrained(f"{path}/weights"),
    ]
    for call in calls:
        with pytest.raises(ValueError) as refusal:
            call()
        said.append(str(refusal.value))
    return said, held


def test_quantized_weights_in_files(ranks, tmp_path):
    (plain, written), held = ranks(2, _saving_quantized, str(tmp_path))[0]
    assert "is a checkpoint of another model" in plain
    assert "save_pretrained was called for a model of which 1 weights are quantized, such as '0.weight'" in written
    assert held == {("torch.uint8", ((64 * 32 + 64 * 4) // 2,))}  # integers of 64 x 32, and for each row a scale
    with pytest.raises(ValueError, match="an export was called for a model of which 14 weights are quantized"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "weights")


def _loading_quantized(path: str) -> list[float]:
    engine = _engine(_on_integers(), dict(zero=3))
    _steps(engine, range(1))
    engine.save(path)
    other = _engine(_on_integers(levels=63), dict(tp=2))
    other.load(path)
    share, whole = tokens(1)[engine.mesh.dp_rank :: 2], tokens(1)
    return [
        engine.step({"input_ids": share[:, :-1]}, share[:, 1:]).item(),
        other.step({"input_ids": whole[:, :-1]}, whole[:, 1:]).item(),
    ]


@pytest.mark.slow
def test_quantized_weights_are_read_under_another_plan(ranks, tmp_path):
    loss, other = ranks(2, _loading_quantized, str(tmp_path / "checkpoint"))[0]
    assert other == pytest.approx(loss, rel=1e-5)


def test_quantized_weights_that_no_plan_takes():
    trained = quantized(nn.Sequential(nn.Linear(4, 4)))
    trained[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"parameter '0.weight' is .*Integers.*freeze it with requires_grad_"):
        ts.parallelize(trained, **ENGINE)
    assert isinstance(trained[0].weight, Integers)


def _saved(kind: str, fields: dict[str, Any], path: str) -> dict[str, torch.Tensor]:
    """A checkpoint, one of what is trained, and the adapters as the Engine writes them; all weights."""
    engine = _engine(made(kind), fields)
    _steps(engine, range(2))
    engine.save(f"{path}/all")
    engine.save(f"{path}/trained", trained_only=True)
    engine.save_pretrained(f"{path}/by-engine", adapters_only=True)
    return engine.full_state_dict()


def _read_files(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {file.relative_to(path).as_posix(): load_file(file) for file in sorted(path.rglob("*.safetensors"))}


@pytest.mark.fast_cases("linear-zero3")
@pytest.mark.parametrize("plan", ["zero3", "tp", "pp"])
@pytest.mark.parametrize(
    "kind", ["linear", "embedding", "Conv1D", "experts", "rsLoRA", "DoRA", "IA3", "saved", "bias", "tied",
             "several", "two at once"],
)  # fmt: skip
def test_a_checkpoint_is_exported_with_its_adapters_merged_or_alone(ranks, tmp_path, capsys, kind, plan):
    state = ranks(2, _saved, kind, PLANS[plan], str(tmp_path))[0]
    model = made(kind)
    model.load_state_dict(state)
    expected = model.merge_and_unload()
    assert cli.main(["export", f"{tmp_path}/all", f"{tmp_path}/merged", "--merge"]) == 0
    found = type(expected).from_pretrained(tmp_path / "merged")
    assert_same_bits(found.state_dict(), expected.state_dict())
    assert torch.equal(found(tokens(5)).logits, expected(tokens(5)).logits)
    assert cli.main(["export", f"{tmp_path}/all", f"{tmp_path}/torch", "--merge", "--to", "torch"]) == 0
    assert_same_bits(torch.load(tmp_path / "torch" / "model.pt", weights_only=True), expected.state_dict())
    capsys.readouterr()
    for checkpoint in ("all", "trained"):
        status = cli.main(["export", f"{tmp_path}/{checkpoint}", f"{tmp_path}/{checkpoint}-adapters"])
        if checkpoint == "trained" and kind == "several":  # of which one is frozen
            assert status == 2 and "the adapter 'default', which was frozen" in capsys.readouterr().err
            assert not (tmp_path / "trained-adapters").exists()
            continue
        assert status == 0
        assert "--merge writes the base with the adapters merged into its weights" in capsys.readouterr().out
        written, by_engine = _read_files(tmp_path / f"{checkpoint}-adapters"), _read_files(tmp_path / "by-engine")
        assert written.keys() == by_engine.keys()
        for name, tensors in by_engine.items():
            # What is trained lacks the frozen embedding that peft writes beside an adapter of it.
            lacks = checkpoint == "trained" and kind in ("embedding", "tied")
            expected_here = {n: v for n, v in tensors.items() if not (lacks and ".base_layer." in n)}
            assert_same_bits(written[name], expected_here)
    assert cli.main(["export", f"{tmp_path}/trained", f"{tmp_path}/never", "--merge"]) == 2
    assert "has the trained parameters alone" in capsys.readouterr().err
    assert not (tmp_path / "never").exists()


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def _without_a_base(path: str) -> None:
    _engine(made("prompt"), dict(zero=1)).save(f"{path}/prompt")
    _engine(llama(), dict(zero=1)).save(f"{path}/plain")
    base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    own = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))
    ts.parallelize(own, **ENGINE).save(f"{path}/own")


def test_what_cannot_be_merged_says_why(ranks, tmp_path, capsys):
    ranks(1, _without_a_base, str(tmp_path))
    for checkpoint, words, said in (
        ("prompt", ["--merge"], "peft's type PROMPT_TUNING, which are not added to weights"),
        ("plain", ["--merge"], "has no adapters of peft: export it without"),
        ("own", ["--merge"], "on a base that is no model of transformers, and that no file describes"),
        ("own", [], "on a base that is no model of transformers, and that no file describes"),
    ):
        assert cli.main(["export", f"{tmp_path}/{checkpoint}", f"{tmp_path}/never", *words]) == 2
        assert said in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "never").exists()
