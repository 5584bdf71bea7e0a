"""Which program wrote a folder, and its checkpoint opened."""

from pathlib import Path

from torch import nn

from tensorshard.common.stores import open_store
from tensorshard.model.parameters import parameter_aliases
from tensorshard.weights.files.checkpoint_files import CheckpointWeights, OpenCheckpoint, open_checkpoint
from tensorshard.weights.files.foreign import dcp, deepspeed, megatron, torch_files
from tensorshard.weights.files.foreign.pieces import Contents
from tensorshard.weights.files.manifest import MANIFEST
from tensorshard.weights.files.stored_weights import WeightFile
from tensorshard.weights.files.weight_files import open_weight_files

KNOWN = (
    "DeepSpeed's (ZeRO 0 to 3, universal), torch.distributed.checkpoint's (FSDP, FSDP2, torchtitan), Accelerate's "
    "save_state, the transformers Trainer's checkpoint-N, Megatron-Core's torch_dist, full state dicts of torch.save"
)


def is_ours(path: Path | str) -> bool:
    """Whether `path`, a folder or a URL, holds a checkpoint of tensorshard, or the rest of one."""
    store = open_store(path)
    return store.size(MANIFEST) is not None or store.size("engine.json") is not None


def open_any(path: Path | str) -> OpenCheckpoint:
    """The checkpoint at `path`, of tensorshard or of a program that :data:`KNOWN` lists.

    Raises:
        FileNotFoundError: there is none.
        DamagedCheckpointError: a file of it is missing or cut off.
        ValueError: it is of a kind that is not read, or names something that could run code.
    """
    if isinstance(path, str) or is_ours(path) or not path.exists():
        return open_checkpoint(path)
    contents = read_foreign(path)
    if contents is None:
        there = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else [path.name]
        listed = ", ".join(there[:6]) + (f" and {len(there) - 6} more" if len(there) > 6 else "")
        raise FileNotFoundError(
            f"{path} is not a checkpoint that is known here: it has {listed or 'no files'}. Known are tensorshard's "
            f"own (engine.json), {KNOWN}"
        )
    return contents.opened(path if path.is_dir() else path.parent)


def read_foreign(path: Path) -> Contents | None:
    """What the checkpoint of another program at `path` holds; None if it is of none that is known."""
    if path.is_file():
        return torch_files.read_state_dicts(path) if path.suffix in (".pt", ".pth", ".bin", ".ckpt") else None
    folder = deepspeed.folder_of(path)
    if folder is not None:
        contents = deepspeed.read(folder)
        if folder != path:
            torch_files.add_side_files(contents, path)
        return contents
    folder = megatron.folder_of(path)
    if folder is not None:
        return megatron.read(folder)
    if (path / ".metadata").is_file():
        return dcp.read(path)
    models = sorted(path.glob("pytorch_model_fsdp_*"))
    models = [entry for entry in models if (entry / ".metadata").is_file()]
    if models:
        optimizer = path / f"optimizer_{models[0].name.rpartition('_')[2]}"
        contents = dcp.read(models[0], optimizer if (optimizer / ".metadata").is_file() else None)
        contents.source = f"{_folder_kind(path)}, FSDP's shards"
        torch_files.add_side_files(contents, path)
        return contents
    if any((path / name).is_file() for name in torch_files.OPTIMIZERS):
        return torch_files.read_folder(path, _folder_kind(path))
    return None


def _folder_kind(path: Path) -> str:
    return "the transformers Trainer" if (path / "trainer_state.json").is_file() else "Accelerate"


def open_weights(path: Path | str, module: nn.Module | None = None) -> list[WeightFile]:
    """The weights at `path`: those of :func:`open_weight_files`, or of another program's checkpoint.

    Args:
        module: that they are for, on the meta device: Megatron's are then found by its names.

    Raises:
        FileNotFoundError: there are none.
        ValueError: Megatron's are those of another model.
    """
    files = _weights_at(path)
    return [in_names_of(file, module) if isinstance(file, CheckpointWeights) and module else file for file in files]


def in_names_of(weights: CheckpointWeights, module: nn.Module | None) -> CheckpointWeights:
    """`weights`, which may be Megatron's, by the names of the model `module`, on the meta device.

    Raises:
        ValueError: they are Megatron's, and those of another model, or there is no model.
    """
    if not megatron.is_of_megatron(weights.checkpoint):
        return weights
    if module is None:
        raise ValueError(
            f"{weights.folder} has Megatron's names and layers, and no config.json of the model beside them, which "
            f"would say what they are called elsewhere: put one there, or load it into an engine and save that"
        )
    shapes = {name: tensor.shape for name, tensor in module.named_parameters()}
    return CheckpointWeights(megatron.by_names_of(weights.checkpoint, module, shapes, parameter_aliases(module)))


def _weights_at(path: Path | str) -> list[WeightFile]:
    if isinstance(path, Path) and path.is_dir() and not is_ours(path):
        if megatron.folder_of(path) is None:  # beside its weights lies a common.pt, which has none
            try:
                return open_weight_files(path)
            except FileNotFoundError:
                if read_foreign(path) is None:
                    raise
        return [CheckpointWeights(open_any(path))]
    return open_weight_files(path)
