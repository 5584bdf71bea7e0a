"""Megatron-Core's torch_dist checkpoints: training goes on from them, by a model's names; others are refused.

They are written here as Megatron-Core 0.16 (and, flattened, 0.12) writes them: its names, layers behind one another,
queries, keys and values by groups of heads.
"""

import io
import pickle
import re
import shutil
import signal
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

import tensorshard as ts
from tensorshard.checkpoint.export import export_checkpoint
from tensorshard.checkpoint.imported import import_checkpoint
from tensorshard.weights.files.checkpoint_files import read_tensors
from tensorshard.weights.files.foreign.opening import open_any
from tensorshard.weights.files.manifest import DamagedCheckpointError

_HEADS, _GROUPS, _SIZE, _LAYERS, _VOCABULARY, _PADDED = 4, 2, 4, 2, 100, 128
_LR, _CLIP = 0.01, 1.0
_Cut = Callable[[torch.Tensor, int], Any]


def _model(kind: str, **changed: Any) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=_VOCABULARY, n_positions=16, n_embd=16, n_layer=_LAYERS, n_head=_HEADS,
                          attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
        )  # fmt: skip
    values = {
        "vocab_size": _VOCABULARY, "hidden_size": 16, "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS,
        "num_key_value_heads": _GROUPS, "intermediate_size": 24, "max_position_embeddings": 16, "head_dim": _SIZE,
        "tie_word_embeddings": False, **changed,
    }  # fmt: skip
    if kind == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**values, num_local_experts=3))
    if kind == "qwen3 with experts":
        return hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(**values, num_experts=3, moe_intermediate_size=24, num_experts_per_tok=2)
        )
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    return getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**values))


def _loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def _batch(step: int) -> torch.Tensor:
    return torch.randint(0, _VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(100 + step))


def _adamw(named_parameters: Any) -> torch.optim.AdamW:
    """As Megatron's: what has one axis is trained without decay, in a second group."""
    ps = [p for _, p in named_parameters]
    groups = [{"params": [p for p in ps if p.dim() > 1], "weight_decay": 0.1}]
    return torch.optim.AdamW([*groups, {"params": [p for p in ps if p.dim() < 2], "weight_decay": 0.0}], lr=_LR)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = _loss(model(_batch(step)), _batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _of_layer(of: dict[str, torch.Tensor], *, apart: bool, single: bool) -> dict[str, torch.Tensor]:
    """One layer of transformers by Megatron's names."""
    new: dict[str, torch.Tensor] = {}
    qkv, fc1 = "self_attention.linear_qkv", "mlp.linear_fc1"
    for leaf in ("weight", "bias"):
        if f"attn.c_attn.{leaf}" in of:
            q, k, v = of[f"attn.c_attn.{leaf}"].T.chunk(3) if leaf == "weight" else of["attn.c_attn.bias"].chunk(3)
            groups = _HEADS
        elif f"self_attn.q_proj.{leaf}" in of:
            q, k, v = (of[f"self_attn.{one}_proj.{leaf}"] for one in "qkv")
            groups = _GROUPS
        else:
            continue
        rows = [x.unflatten(0, (groups, -1)) for x in (q, k, v)]
        new[f"{qkv}.{leaf}"] = torch.cat(rows, dim=1).flatten(0, 1)
    norms = {"input_layernorm": qkv, "ln_1": qkv, "post_attention_layernorm": fc1, "ln_2": fc1}
    for name, value in of.items():
        path, _, leaf = name.rpartition(".")
        if path in norms:
            own = "input_layernorm" if norms[path] == qkv else "pre_mlp_layernorm"
            new[f"{own}.{leaf}" if apart else f"{norms[path]}.layer_norm_{leaf}"] = value
    if single:
        new.update({f"{fc1}.weight_w": of["mlp.gate_proj.weight"], f"{fc1}.weight_v": of["mlp.up_proj.weight"]})
    elif "mlp.gate_proj.weight" in of:
        new[f"{fc1}.weight"] = torch.cat([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]])
    same = {
        "self_attn.o_proj.weight": "self_attention.linear_proj.weight", "mlp.down_proj.weight": "mlp.linear_fc2.weight",
        "self_attn.q_norm.weight": "self_attention.q_layernorm.weight", "mlp.gate.weight": "mlp.router.weight",
        "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
        "mlp.experts.gate_up_proj": "mlp.experts.experts.linear_fc1.weight",
        "mlp.experts.down_proj": "mlp.experts.experts.linear_fc2.weight",
        "attn.c_proj.bias": "self_attention.linear_proj.bias", "mlp.c_fc.bias": "mlp.linear_fc1.bias",
        "mlp.c_proj.bias": "mlp.linear_fc2.bias",
    }  # fmt: skip
    new.update({theirs: of[ours] for ours, theirs in same.items() if ours in of})
    turned = {"attn.c_proj": "self_attention.linear_proj", "mlp.c_fc": fc1, "mlp.c_proj": "mlp.linear_fc2"}
    new.update({f"{turned[n]}.weight": of[f"{n}.weight"].T for n in turned if f"{n}.weight" in of})
    return new


def _by_their_names(
    tensors: dict[str, torch.Tensor], *, each: bool, apart: bool = False, single: bool = False
) -> dict[str, torch.Tensor]:
    """Tensors of a model of transformers by Megatron's names, with layers stacked, or `each` one by itself."""
    new: dict[str, torch.Tensor] = {}
    layers = []
    for number in range(_LAYERS):
        marks = [f".layers.{number}.", f".h.{number}."]
        of = {n.partition(mark)[2]: t for n, t in tensors.items() for mark in marks if mark in n}
        layers.append(_of_layer(of, apart=apart, single=single))
    for suffix in layers[0]:
        of_all = [layer[suffix] for layer in layers]
        if each:
            new.update({f"decoder.layers.{at}.{suffix}": tensor for at, tensor in enumerate(of_all)})
        else:
            new[f"decoder.layers.{suffix}"] = torch.stack(of_all)
    others = {
        "embed_tokens.weight": "embedding.word_embeddings.weight", "wte.weight": "embedding.word_embeddings.weight",
        "wpe.weight": "embedding.position_embeddings.weight", "ln_f.weight": "decoder.final_layernorm.weight",
        "ln_f.bias": "decoder.final_layernorm.bias", "model.norm.weight": "decoder.final_layernorm.weight",
        "lm_head.weight": "output_layer.weight",
    }  # fmt: skip
    for name, tensor in tensors.items():
        key = next((theirs for ours, theirs in others.items() if name.endswith(ours)), None)
        if key is not None:
            has_words = key in ("embedding.word_embeddings.weight", "output_layer.weight")
            new[key] = functional.pad(tensor, (0, 0, 0, _PADDED - _VOCABULARY)) if has_words else tensor
    return new


def _flattened(tensor: torch.Tensor, *, stacked: bool) -> torch.Tensor:
    """A state as 0.12 stores it: the parts of two tensor ranks, with the elements of each on a last axis."""
    lead = tensor.shape[:1] if stacked else ()
    if tensor.dim() - len(lead) == 1:
        return tensor.unsqueeze(-2)
    return tensor.reshape(*lead, 2, *(1,) * (tensor.dim() - len(lead) - 1), -1)


def _write(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    each: bool = False,
    apart: bool = False,
    single: bool = False,
    flat: bool = False,
    buckets: bool = False,
    nemo: bool = False,
    cut: _Cut = lambda tensor, dim: tensor,
    **args: Any,
) -> None:
    named = {name: p.detach() for name, p in model.named_parameters()}
    in_theirs = partial(_by_their_names, each=each, apart=apart, single=single)

    def pieces(tensor: torch.Tensor, key: str) -> Any:
        stacked = key.startswith("decoder.layers.") and not each
        by_columns = key.endswith(("linear_proj.weight", "linear_fc2.weight"))
        return cut(tensor.contiguous(), tensor.dim() - 1 if by_columns else min(int(stacked), tensor.dim() - 1))

    # What is trained in fewer digits, with masters in the optimizer's states
    state: dict[str, Any] = {key: pieces(t.bfloat16(), key) for key, t in in_theirs(named).items()}
    state["decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2"] = io.BytesIO(b"nothing")
    of_states: dict[str, dict[str, torch.Tensor]] = {"fp32_param" if flat else "param": named}
    for key in ("exp_avg", "exp_avg_sq"):
        of_states[key] = {name: optimizer.state[p][key] for name, p in model.named_parameters()}
    groups = [
        {"wd_mult": float(decay > 0), "is_expert_parallel": False, "lr": _LR, "betas": (0.9, 0.999), "eps": 1e-8,
         "weight_decay": decay, "max_lr": _LR, "step": 3}
        for decay in (0.1, 0.0)
    ]  # fmt: skip
    common: dict[str, Any] = {
        "args": Namespace(exit_signal=signal.SIGTERM, params_dtype=torch.bfloat16, **args),
        "iteration": 3,
        "opt_param_scheduler": {"num_steps": 12},
    }
    if buckets:
        state["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.exp_avg"] = torch.zeros(8)
    else:
        for key, of_key in of_states.items():
            for name, tensor in in_theirs(of_key).items():
                if flat:
                    flattened = _flattened(tensor, stacked=name.startswith("decoder.layers.") and not each)
                    state[f"optimizer.state.{key}.{name}"] = cut(flattened.contiguous(), flattened.dim() - 1)
                else:
                    state[f"optimizer.state.{key}.{name}"] = pieces(tensor, name)
        described = {"param_groups": groups}
        if flat:
            state["optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"] = [described]
        else:
            common["optimizer"] = {"optimizer": described, "grad_scaler": {"scale": 512.0, "growth_tracker": 2}}
    alone = not dist.is_initialized()
    if nemo:  # names begin with that of Lightning's module
        state = {re.sub(r"^(optimizer\.state\.\w+\.)?", r"\g<1>module.", key, count=1): t for key, t in state.items()}
        common = {"global_step": 3, "optimizer": [common["optimizer"]], "opt_param_scheduler": {"num_steps": 12}}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=folder, planner=planner, no_dist=alone)
    if alone or dist.get_rank() == 0:
        torch.save(common, folder / "common.pt")
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        metadata.all_local_plans = [SavePlan([], planner_data=WriteItemType.SHARD)]  # as Megatron-Core keeps them
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _alone(folder: Path, kind: str, layout: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Trains, writes what Megatron would on these ranks, and goes on: losses, and what a load has to give."""
    model = _model(kind)
    optimizer = _adamw(model.named_parameters())
    _train(model, optimizer, range(3))
    mesh = init_device_mesh("cpu", (2,))
    _write(folder, model, optimizer, cut=lambda tensor, dim: distribute_tensor(tensor, mesh, [Shard(dim)]), **layout)
    there = {f"model.{name}": p.detach().clone() for name, p in model.named_parameters()}
    for key in ("exp_avg", "exp_avg_sq"):
        there.update(
            {f"optimizer.{key}.{name}": optimizer.state[p][key].clone() for name, p in model.named_parameters()}
        )
    return _train(model, optimizer, range(3, 6)), there


def _go_on(path: Path, again: Path, kind: str, fields: dict[str, Any]) -> tuple[list[float], int, Any, Any]:
    torch.manual_seed(7)
    plan = ts.Plan(clip_grad_norm=_CLIP, **fields)
    engine = ts.parallelize(_model(kind), plan, optimizer=_adamw, loss_fn=_loss)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(1.5)  # others than the checkpoint's
    extra = engine.load(path)
    taken = engine.step_count
    engine.save(again)
    losses = []
    for step in range(3, 6):
        batch = _batch(step)
        if engine.mesh.dp_size == 2:
            batch = batch.chunk(2)[engine.mesh.dp_rank]
        losses.append(engine.step(batch, batch).item())
    groups = [(group["weight_decay"], group["lr"]) for group in engine.optimizer.param_groups]
    return losses, taken, extra, groups


_ZERO3, _TP2, _PP2 = {"zero": 3}, {"dp_shard": 1, "tp": 2}, {"dp_shard": 1, "pp": 2, "micro_batches": 2}
_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {
    "llama, ZeRO 3": ("llama", {}, _ZERO3, False),
    "llama, tp": ("llama", {}, _TP2, False),
    "llama, pp": ("llama", {}, _PP2, False),
    "llama, flattened states": ("llama", {"flat": True}, _ZERO3, False),
    "llama, imported": ("llama", {}, _TP2, True),
    "qwen2, a tensor for each layer": ("qwen2", {"each": True, "single": True}, _TP2, False),
    "qwen3, norms apart": ("qwen3", {"apart": True}, _ZERO3, False),
    "qwen3, flattened, imported": ("qwen3", {"flat": True, "each": True, "apart": True}, _PP2, True),
    "qwen3, NeMo": ("qwen3", {"nemo": True}, _PP2, False),
    "qwen3 with experts": ("qwen3 with experts", {"each": True}, _ZERO3, False),
    "mixtral": ("mixtral", {}, _ZERO3, False),
    "gpt2, ZeRO 3": ("gpt2", {}, _ZERO3, False),
    "gpt2, tp": ("gpt2", {"flat": True}, _TP2, False),
    "gpt2, pp": ("gpt2", {}, _PP2, True),
}


@pytest.mark.fast_cases("llama, ZeRO 3")
@pytest.mark.parametrize("case", _CASES)
def test_training_goes_on(ranks: Any, tmp_path: Path, case: str) -> None:
    kind, layout, fields, imported = _CASES[case]
    path = tmp_path / "theirs"
    expected, there = ranks(2, _alone, path / "iter_0000003", kind, layout)[0]
    (path / "latest_checkpointed_iteration.txt").write_text("3")
    if not layout.get("flat"):
        assert open_any(path).document["scaler"] == {"scale": 512.0, "steps_since_overflow": 2}
    if imported:
        import_checkpoint(path, tmp_path / "imported")
        path = tmp_path / "imported"
    losses, taken, extra, groups = ranks(2, _go_on, path, tmp_path / "ours", kind, fields)[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert taken == extra["iteration"] == 3
    assert extra["lr_scheduler"] == {"num_steps": 12}
    assert groups == [(0.1, _LR), (0.0, _LR)]
    found = {n: t for n, t in read_tensors(tmp_path / "ours", "").items() if n.startswith(("model.", "optimizer."))}
    assert {found.pop(name).item() for name in list(found) if name.startswith("optimizer.step.")} == {3.0}
    assert set(found) == set(there)
    assert all(torch.equal(found[name], tensor) for name, tensor in there.items())


def _write_alone(folder: Path, **layout: Any) -> nn.Module:
    model = _model("llama")
    optimizer = _adamw(model.named_parameters())
    _train(model, optimizer, range(1))
    _write(folder, model, optimizer, **layout)
    return model


_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests do not change."""
    path = tmp_path_factory.mktemp("megatron") / "iter_0000003"
    args = {"num_attention_heads": _HEADS, "num_query_groups": _GROUPS, "group_query_attention": True, "swiglu": True}
    _write_alone(
        path,
        **args,
        norm_epsilon=1e-6,
        rotary_base=10000,
        use_rope_scaling=False,
        make_vocab_size_divisible_by=32,
        tensor_model_parallel_size=1,
    )
    return path


_OTHER_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 3}, r"it has 2 layers, and the model has 3\. Build"),
    "fewer layers": ({"num_hidden_layers": 1}, "num_hidden_layers=2"),
    "heads": (
        {"num_attention_heads": 8, "num_key_value_heads": 1},
        r"has 32 rows of queries.*8 heads, 1 of.*needs 40\..*num_query_groups 2",
    ),
    "heads of another size": (
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
        r"num_attention_heads 4, and the model has 2",
    ),
    "a larger vocabulary": ({"vocab_size": 130}, "has 128 rows.*vocab_size=128"),
    "a smaller vocabulary": ({"vocab_size": 96}, "at least 97 padded to a multiple of 32.*model's .* has 96"),
    "a tied head": ({"tie_word_embeddings": True}, "tie_word_embeddings=False"),
    "another width": ({"intermediate_size": 32}, "another model.*has shape"),
}


@pytest.mark.parametrize("case", _OTHER_MODELS)
def test_another_model_is_refused(theirs: Path, case: str) -> None:
    changed, message = _OTHER_MODELS[case]
    with pytest.raises(ValueError, match=message):
        ts.from_pretrained(theirs, partial(_model, "llama", **changed))()


def test_other_numbers_of_the_config_are_said(theirs: Path, caplog: pytest.LogCaptureFixture) -> None:
    ts.from_pretrained(theirs, partial(_model, "llama"))()
    assert "was trained with" not in caplog.text
    ts.from_pretrained(theirs, partial(_model, "llama", rms_norm_eps=1e-5, rope_parameters=_LINEAR))()
    assert "was trained with norm_epsilon 1e-06" in caplog.text
    assert "rotary_base 10000, and the config of this LlamaForCausalLM has 500.0" in caplog.text
    assert "use_rope_scaling False" in caplog.text


class _Own(nn.Module):
    """A user's own model with Megatron's names, of which it has those of the MLPs."""

    def __init__(self) -> None:
        super().__init__()
        mlps = [nn.ModuleDict({"linear_fc1": nn.Linear(16, 48, bias=False)}) for _ in range(_LAYERS)]
        layers = nn.ModuleList(nn.ModuleDict({"mlp": mlp}) for mlp in mlps)
        self.decoder = nn.ModuleDict({"layers": layers, "final_layernorm": nn.RMSNorm(16)})


def test_a_model_with_their_names_is_read_as_it_is(theirs: Path) -> None:
    read = ts.from_pretrained(theirs, _Own)().state_dict()
    model = _model("llama")
    _train(model, _adamw(model.named_parameters()), range(1))
    expected = _by_their_names(dict(model.named_parameters()), each=True)
    for name, value in read.items():
        torch.testing.assert_close(value, expected[name])


class _Runs:
    def __reduce__(self) -> Any:
        return print, ("planted",)


def _legacy(path: Path) -> None:
    (path / "common.pt").unlink()
    (path / "metadata.json").unlink()
    (path / "mp_rank_00").mkdir()
    (path / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"")


_BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "torch": (_legacy, "format torch .mp_rank_00/model_optim_rng.pt.*--ckpt-format torch_dist"),
    "zarr": (lambda path: (path / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "Megatron's format zarr"),
    "no common.pt": (lambda path: (path / "common.pt").unlink(), "has no file common.pt"),
    "planted": (lambda path: torch.save({"args": _Runs()}, path / "common.pt"), "common.pt that .* could run code"),
    "no layers": (lambda path: dcp.save({"x": torch.ones(2)}, checkpoint_id=path, no_dist=True), "no weights of a GPT"),
    "the latest is lost": (
        lambda path: (path / "latest_checkpointed_iteration.txt").write_text("7"),
        "there is no folder iter_0000007",
    ),
}


@pytest.mark.parametrize("case", _BAD)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, case: str) -> None:
    harm, message = _BAD[case]
    path = tmp_path / "theirs"
    _write_alone(path)
    harm(path)
    with pytest.raises((DamagedCheckpointError, ValueError), match=message):
        import_checkpoint(path, tmp_path / "ours")
    assert [entry.name for entry in tmp_path.iterdir()] == ["theirs"]


def test_states_by_buckets_are_refused_and_the_weights_are_read(tmp_path: Path) -> None:
    model = _write_alone(tmp_path, buckets=True)
    with pytest.raises(ValueError, match=r"by buckets.*--dist-ckpt-optim-fully-reshardable"):
        import_checkpoint(tmp_path, tmp_path / "ours")
    read = ts.from_pretrained(tmp_path, partial(_model, "llama"))().state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(read[name], value.bfloat16().float())


def test_what_was_imported_is_exported_by_the_names_of_a_config(theirs: Path, tmp_path: Path) -> None:
    import_checkpoint(theirs, tmp_path / "imported")
    with pytest.raises(ValueError, match=r"no config\.json of the model"):
        export_checkpoint(tmp_path / "imported", tmp_path / "hf")
    path = shutil.copytree(theirs, tmp_path / "theirs")
    model: Any = _model("llama")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(path)
    import_checkpoint(path, tmp_path / "imported", overwrite=True)
    export_checkpoint(tmp_path / "imported", tmp_path / "hf")
    places = [tmp_path / "theirs", tmp_path / "imported", tmp_path / "hf"]
    _train(model, _adamw(model.named_parameters()), range(1))
    for read in [ts.from_pretrained(place)().state_dict() for place in places]:
        assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())
