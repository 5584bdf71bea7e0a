"""Checkpoints of other programs: training goes on from them as it would have there, and bad ones are refused."""

import itertools
import json
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import tensorshard as ts
from tensorshard.checkpoint.imported import import_checkpoint
from tensorshard.host.memory import status_bytes
from tensorshard.weights.files.foreign.dcp import DcpFolder
from tensorshard.weights.files.foreign.opening import open_any
from tensorshard.weights.files.foreign.pieces import ForeignTensor
from tensorshard.weights.files.manifest import DamagedCheckpointError

_LR, _CLIP = 0.01, 1.0


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 14)
        self.down = nn.Linear(14, 6, bias=False)
        self.register_buffer("scale", torch.full((6,), 1.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head((x + self.down(functional.gelu(self.up(self.norm(x))))) * self.scale)


def _net() -> _Net:
    torch.manual_seed(0)
    return _Net()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(100 + step))
    return ids, (ids * 3 + 1) % 11


def _adamw(named_parameters: Any) -> torch.optim.AdamW:
    """As the Trainer's: biases and norms without decay, in a second group."""
    named = list(named_parameters)
    plain = [p for name, p in named if "norm" in name or "bias" in name]
    decayed = [p for name, p in named if not ("norm" in name or "bias" in name)]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=_LR)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs, targets = _batch(step)
        loss = _loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@contextmanager
def _deepspeed_classes() -> Iterator[types.SimpleNamespace]:
    """Classes with the names of those that DeepSpeed's files hold; gone where they are read."""

    class ZeroStageEnum(IntEnum):
        disabled, optimizer_states, gradients, weights = range(4)

    class fragment_address:
        def __init__(self, numel: int, start: int) -> None:
            self.numel, self.start = numel, start

    class DynamicLossScaler:
        def __init__(self) -> None:
            self.cur_scale, self.cur_iter, self.last_overflow_iter = 1024.0, 9, 5

    places = {
        "deepspeed.runtime.zero.config": ZeroStageEnum,
        "deepspeed.utils.tensor_fragment": fragment_address,
        "deepspeed.runtime.fp16.loss_scaler": DynamicLossScaler,
    }
    added = []
    for path, cls in places.items():
        cls.__module__, cls.__qualname__ = path, cls.__name__
        parts = path.split(".")
        for at in range(1, len(parts) + 1):
            if ".".join(parts[:at]) not in sys.modules:
                added.append(".".join(parts[:at]))
                sys.modules[added[-1]] = types.ModuleType(added[-1])
        setattr(sys.modules[path], cls.__name__, cls)
    try:
        yield types.SimpleNamespace(stage=ZeroStageEnum, fragment=fragment_address, scaler=DynamicLossScaler)
    finally:
        for name in added:
            del sys.modules[name]


def _write_deepspeed(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, stage: int) -> None:
    """As two ranks of DeepSpeed: one vector for each group at ZeRO 1 and 2, parts of each parameter at ZeRO 3."""
    names = {p: name for name, p in model.named_parameters()}
    groups = [[(names[p], p) for p in group["params"]] for group in optimizer.param_groups]
    (folder / "global_step5").mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    shapes = [{name: p.shape for name, p in group} for group in groups]
    values: list[dict[str, Callable[[Any], torch.Tensor]]] = [
        {"weights": lambda p: p.detach(), "exp_avg": lambda p: optimizer.state[p]["exp_avg"],
         "exp_avg_sq": lambda p: optimizer.state[p]["exp_avg_sq"]}
        for _ in groups
    ]  # fmt: skip
    with _deepspeed_classes() as named:
        for rank in range(2):
            vectors: list[dict[str, torch.Tensor]] = []
            places: list[dict[str, Any]] = []
            for group, of_group in zip(groups, values, strict=True):
                vectors.append({})
                places.append({})
                for key, value in of_group.items():
                    if stage == 3:
                        padded = [functional.pad(value(p).flatten(), (0, p.numel() % 2)) for _, p in group]
                        vectors[-1][key] = torch.cat([one.chunk(2)[rank] for one in padded])
                        continue
                    flat = torch.cat([value(p).flatten() for _, p in group])
                    half = (flat.numel() + 1) // 2
                    vectors[-1][key] = flat[rank * half : (rank + 1) * half].clone()
                    start = 0
                    for name, p in group:
                        low, high = max(start, rank * half), min(start + p.numel(), (rank + 1) * half)
                        if low < high:
                            places[-1][name] = named.fragment(high - low, low - rank * half)
                        start += p.numel()
            base = {
                "state": {
                    at: {"step": torch.tensor(5.0), "exp_avg": v["exp_avg"], "exp_avg_sq": v["exp_avg_sq"]}
                    for at, v in enumerate(vectors)
                },
                "param_groups": [
                    {**{k: v for k, v in group.items() if k != "params"}, "params": [at]}
                    for at, group in enumerate(optimizer.param_groups)
                ],
            }
            states: dict[str, Any] = {
                "loss_scaler": named.scaler(),
                "dynamic_loss_scale": True,
                "zero_stage": named.stage(stage),
                "partition_count": 2 if stage == 3 else [2, 2],
                "optimizer_state_dict" if stage == 3 else "base_optimizer_state": base,
                "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups": [
                    v["weights"] for v in vectors
                ],
            }
            if stage != 3:
                states["param_slice_mappings"] = places
            torch.save(
                {"optimizer_state_dict": states, "ds_version": "0.19.8"},
                folder / f"global_step5/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
            if stage == 3 or rank == 0:
                module = {n: t if n == "scale" or stage != 3 else t[:0].clone() for n, t in model.state_dict().items()}
                prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
                torch.save(
                    {
                        "module": module,
                        "buffer_names": ["scale"],
                        "optimizer": None,
                        "param_shapes": shapes,
                        "frozen_param_shapes": {},
                        "shared_params": {"head.weight": "embed.weight"},
                        "frozen_param_fragments": {},
                        "lr_scheduler": {"last_batch_iteration": 4},
                        "global_steps": 5,
                        "dp_world_size": 2,
                        "ds_version": "0.19.8",
                        "epoch": 2,
                    },
                    folder / f"global_step5/{prefix}mp_rank_00_model_states.pt",
                )


def _write_universal(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As from ZeRO 3: each parameter is flat, and the steps are those of groups."""
    for name, p in model.named_parameters():
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": p.detach().flatten()}, folder / "zero" / name / "fp32.pt")
        for key in ("exp_avg", "exp_avg_sq"):
            torch.save({"param": optimizer.state[p][key].flatten()}, folder / "zero" / name / f"{key}.pt")
    names = {p: name for name, p in model.named_parameters()}
    shapes = [{names[p]: p.shape for p in group["params"]} for group in optimizer.param_groups]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    base = {"state": {at: {"step": torch.tensor(5.0)} for at in range(2)}, "param_groups": groups}
    torch.save({"zero_stage": 3, "optimizer_state_dict": base}, folder / "zero" / "optimizer_state.pt")
    torch.save(
        {"module": {"scale": model.scale}, "buffer_names": ["scale"], "param_shapes": shapes, "global_steps": 5},
        folder / "mp_rank_00_model_states.pt",
    )


def _write_trainer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    folder.mkdir()
    save_file({n: t.clone() for n, t in model.state_dict().items() if n != "head.weight"}, folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"last_epoch": 5, "_last_lr": [_LR]}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 5, "epoch": 0.5}))


def _write_full(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    folder.mkdir()
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    torch.save({"model": weights, "optimizer": states, "step": 5}, folder / "all.pt")


def _alone(folder: Path, kind: str) -> list[float]:
    """Trains in one process, writes the checkpoint that program `kind` would, and goes on."""
    model = _net()
    optimizer = _adamw(model.named_parameters())
    _train(model, optimizer, range(5))
    if kind.startswith("zero"):
        _write_deepspeed(folder, model, optimizer, int(kind[-1]))
    else:
        {"universal": _write_universal, "trainer": _write_trainer, "full": _write_full}[kind](folder, model, optimizer)
    return _train(model, optimizer, range(5, 10))


def _fsdp2(folder: Path, kind: str) -> list[float]:
    """The same with FSDP2 and torch.distributed.checkpoint, on these ranks."""
    model = _net()
    fully_shard(model)
    optimizer = _adamw(model.named_parameters())
    _train(model, optimizer, range(5))
    options = StateDictOptions(flatten_optimizer_state_dict=kind == "titan")
    weights, states = get_state_dict(model, optimizer, options=options)
    if kind == "titan":
        train_state = {"step": torch.tensor(5), "ntokens_seen": torch.tensor(100)}
        dcp.save({**weights, "optimizer": states, "train_state": train_state}, checkpoint_id=folder)
    elif kind == "accelerate":
        dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": states}, checkpoint_id=folder / "optimizer_0")
    else:
        dcp.save({"app": {"model": weights, "optim": states}, "step": 5}, checkpoint_id=folder)
    return _train(model, optimizer, range(5, 10))


def _engine(optimizer: Any = _adamw, **fields: Any) -> ts.Engine:
    torch.manual_seed(7)  # other weights than the checkpoint's
    plan = ts.Plan(clip_grad_norm=_CLIP, **fields)
    return ts.parallelize(_Net(), plan, optimizer=optimizer, loss_fn=_loss)


def _go_on(path: Path, fields: dict[str, Any]) -> tuple[list[float], int, dict[str, Any]]:
    engine = _engine(**fields)
    extra = engine.load(path)
    taken = engine.step_count
    losses = []
    for step in range(5, 10):
        inputs, targets = _batch(step)
        part = slice(2 * engine.mesh.dp_rank, 2 * engine.mesh.dp_rank + 2) if engine.mesh.dp_size == 2 else slice(None)
        losses.append(engine.step(inputs[part], targets[part]).item())
    return losses, taken, extra


@pytest.mark.fast_cases("zero2")
@pytest.mark.parametrize(
    "kind", ["zero1", "zero2", "zero3", "universal", "trainer", "full", "titan", "accelerate", "fsdp2"]
)
def test_training_goes_on(ranks: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "theirs"
    program = _fsdp2 if kind in ("titan", "accelerate", "fsdp2") else _alone
    world = 2 if program is _fsdp2 else 1
    expected = ranks(world, program, path, kind)[0]
    source = path / "all.pt" if kind == "full" else path
    import_checkpoint(source, tmp_path / "ours")
    for place, fields in ((source, {"zero": 3}), (tmp_path / "ours", {"dp_shard": 1, "tp": 2})):
        losses, taken, extra = ranks(2, _go_on, place, fields)[0]
        assert losses == pytest.approx(expected, rel=1e-5)
        assert taken == 5
    if kind.startswith("zero"):
        assert extra["client_state"] == {"epoch": 2}
        assert extra["lr_scheduler"] == {"last_batch_iteration": 4}


def _calls_of_deepspeed(path: Path) -> tuple[list[float], Any, int]:
    from tensorshard.compat import deepspeed

    torch.manual_seed(7)
    net = _Net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2, "overlap_comm": False},
        "gradient_clipping": _CLIP,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": _LR, "warmup_num_steps": 2}},
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=_adamw(net.named_parameters()), config=config)
    _, state = engine.load_checkpoint(path)
    losses = []
    for step in range(5, 10):
        inputs, targets = _batch(step)
        loss = _loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, state, engine.global_steps


@pytest.mark.slow
def test_the_calls_of_deepspeed_go_on_from_its_own_files(ranks: Any, tmp_path: Path) -> None:
    expected = ranks(1, _alone, tmp_path / "theirs", "zero2")[0]
    losses, state, steps = ranks(1, _calls_of_deepspeed, tmp_path / "theirs")[0]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert (state, steps) == ({"epoch": 2}, 10)


def test_weights_alone(ranks: Any, tmp_path: Path) -> None:
    ranks(1, _alone, tmp_path / "theirs", "zero3")
    model = ts.from_pretrained(tmp_path / "theirs", _Net)()
    expected = _net()
    _train(expected, _adamw(expected.named_parameters()), range(5))
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    assert open_any(tmp_path / "theirs").document["scaler"] == {"scale": 1024.0, "steps_since_overflow": 3}


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (4, 1, 3)])
def test_flat_runs_are_boxes_of_the_tensor(shape: tuple[int, ...]) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    for cuts in ([], [1], [2, 3], [1, 5, 6]):
        ends = [0, *[cut for cut in cuts if cut < whole.numel()], whole.numel()]
        runs = [whole.flatten()[a:b] for a, b in itertools.pairwise(ends)]
        tensor = ForeignTensor.of_flat(shape, [*runs, torch.zeros(2)])
        assert tensor.missing() == 0
        filled = torch.full(shape, -1.0)
        for piece in tensor.pieces:
            index = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.sizes, strict=True))
            filled[index] = piece.read()
        assert torch.equal(filled, whole)


class _Runs:
    def __reduce__(self) -> Any:
        return print, ("planted",)


def _cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


def _plant(file: Path) -> None:
    torch.save({**torch.load(file, weights_only=False), "note": _Runs()}, file)


_ONE = "global_step5/zero_pp_rank_1_mp_rank_00_optim_states.pt"
_BAD = {
    "a rank's file is missing": ("zero2", _ONE, Path.unlink, "file of rank 1 is missing"),
    "no optimizer's file": (
        "zero2",
        _ONE,
        lambda file: [f.unlink() for f in file.parent.glob("*optim*")],
        "of all ranks",
    ),
    "a file is cut off": ("zero2", _ONE, _cut_off, "is cut off"),
    "a planted pickle": ("universal", "zero/up.bias/exp_avg.pt", _plant, "could run code"),
    "a state is missing": ("universal", "zero/up.bias/exp_avg.pt", Path.unlink, "has no file exp_avg.pt"),
    "another pickle": ("trainer", "optimizer.pt", _plant, "could run code"),
    "safetensors cut off": ("trainer", "model.safetensors", _cut_off, "cut off"),
    "latest names nothing": ("zero2", "latest", lambda file: file.write_text("global_step9"), "names global_step9"),
}


@pytest.mark.parametrize("case", _BAD)
def test_a_bad_checkpoint_is_refused_before_anything_is_written(ranks: Any, tmp_path: Path, case: str) -> None:
    kind, file, harm, message = _BAD[case]
    with torch.random.fork_rng():
        _alone(tmp_path / "theirs", kind)
    with torch.serialization.safe_globals([]):
        harm(tmp_path / "theirs" / file)
    with pytest.raises((DamagedCheckpointError, ValueError), match=message):
        import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert [entry.name for entry in tmp_path.iterdir()] == ["theirs"]


def test_a_folder_of_no_known_kind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(FileNotFoundError, match=r"it has notes\.txt\. Known are .*DeepSpeed"):
        import_checkpoint(tmp_path, tmp_path / "ours")


def test_of_a_tensor_of_dcp_only_what_is_used_is_read(tmp_path: Path) -> None:
    whole = torch.arange(1024.0)
    given = {"turned": whole.view(32, 32).T, "part": whole[3:7], "odd": whole[:3].bfloat16(), "one": whole[5]}
    dcp.save({**given, "large": torch.ones(1 << 24)}, checkpoint_id=tmp_path, no_dist=True)
    there = DcpFolder(tmp_path)
    for name, tensor in given.items():
        assert torch.equal(there.tensor(name).pieces[0].read(), tensor)
    before = status_bytes("VmRSS")
    large = there.tensor("large").pieces[0].read()
    assert large[1000:2000].sum() == 1000
    after = status_bytes("VmRSS")
    assert before is None or after is None or after - before < 16 << 20  # of 64 MiB


def test_code_in_a_folder_of_dcp_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Runs()))
    with pytest.raises(ValueError, match="could run code"):
        import_checkpoint(tmp_path, tmp_path / "ours")


def test_a_shard_of_dcp_that_is_cut_off_is_found_at_once(tmp_path: Path) -> None:
    dcp.save({"model": _net().state_dict()}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    _cut_off(next((tmp_path / "theirs").glob("*.distcp")))
    with pytest.raises(DamagedCheckpointError, match="is cut off"):
        import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def _load_others(path: Path) -> list[str]:
    messages = []
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    for optimizer, module in ((sgd, _Net()), (_adamw, nn.Linear(6, 11)), (partial(torch.optim.Adam, lr=0.1), _Net())):
        engine = ts.parallelize(module, ts.Plan(), optimizer=optimizer, loss_fn=_loss)
        with pytest.raises(ValueError) as caught:
            engine.load(path)
        messages.append(str(caught.value))
    return messages


def test_another_optimizer_or_model_is_refused(ranks: Any, tmp_path: Path) -> None:
    ranks(1, _alone, tmp_path / "theirs", "zero2")
    sgd, model, adam = ranks(1, _load_others, tmp_path / "theirs")[0]
    assert "has the states of Adam" in sgd
    assert "checkpoint of another model" in model
    assert "decoupled_weight_decay=True" in adam
