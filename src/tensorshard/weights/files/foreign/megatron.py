"""Megatron-Core's ``torch_dist`` checkpoints, of Megatron-LM and NeMo, and their tensors by a model's names.

Such a folder is one of ``torch.distributed.checkpoint`` with ``common.pt`` beside it. Names are Megatron's. The layers
lie behind one another in one tensor with a leading axis, or each has its own. The rows of queries, keys and values are
interleaved by groups of heads; gate and up projection are one tensor; the vocabulary is padded. Layout as in
``megatron.core.dist_checkpointing`` 0.12 to 0.16.
"""

import itertools
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tensorshard.weights.files.checkpoint_files import OpenCheckpoint
from tensorshard.weights.files.foreign.dcp import DcpFolder
from tensorshard.weights.files.foreign.pieces import (
    Contents,
    ForeignTensor,
    Piece,
    boxes,
    in_pieces,
    load_safely,
    plain_values,
)
from tensorshard.weights.files.manifest import DamagedCheckpointError

logger = logging.getLogger(__name__)

_LATEST = "latest_checkpointed_iteration.txt"
_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.state\.(\w+?)\.((?:module\.)?(?:embedding|decoder|output_layer)\b.*)"
)
_LAYER = re.compile(r"(?:.*\.)?(?:layers|h)\.(\d+)\.(.+)")
_WEIGHTS_ALONE = "ts.from_pretrained takes the weights alone"
_MASTERS = ("fp32_param", "param")
_ATTENTION, _MLP = "self_attention.linear_qkv", "mlp.linear_fc1"
_NORMS = {  # a layer's, by the names of models; fused into the layer that follows, or apart
    "input_layernorm": (_ATTENTION, "input_layernorm"),
    "ln_1": (_ATTENTION, "input_layernorm"),
    "post_attention_layernorm": (_MLP, "pre_mlp_layernorm"),
    "pre_mlp_layernorm": (_MLP, "pre_mlp_layernorm"),
    "ln_2": (_MLP, "pre_mlp_layernorm"),
}
_LAYERS = {  # other parts of a layer: Megatron's name, and which rows of it
    "self_attn.q_proj": (_ATTENTION, "q"),
    "self_attn.k_proj": (_ATTENTION, "k"),
    "self_attn.v_proj": (_ATTENTION, "v"),
    "attn.c_attn": (_ATTENTION, "qkv"),
    "self_attn.o_proj": ("self_attention.linear_proj", ""),
    "attn.c_proj": ("self_attention.linear_proj", ""),
    "self_attn.q_norm": ("self_attention.q_layernorm", ""),
    "self_attn.k_norm": ("self_attention.k_layernorm", ""),
    "mlp.gate_proj": (_MLP, "gate"),
    "mlp.up_proj": (_MLP, "up"),
    "mlp.c_fc": (_MLP, ""),
    "mlp.down_proj": ("mlp.linear_fc2", ""),
    "mlp.c_proj": ("mlp.linear_fc2", ""),
    "mlp.gate": ("mlp.router", ""),
    "mlp.experts.gate_up_proj": ("mlp.experts.experts.linear_fc1.weight", ""),
    "mlp.experts.down_proj": ("mlp.experts.experts.linear_fc2.weight", ""),
}
_OTHERS = {
    "embed_tokens": "embedding.word_embeddings",
    "wte": "embedding.word_embeddings",
    "wpe": "embedding.position_embeddings",
    "norm": "decoder.final_layernorm",
    "ln_f": "decoder.final_layernorm",
    "lm_head": "output_layer",
}
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_OTHER_WEIGHTS = {  # arguments under which the stored weights mean something else
    "rotary_interleaved": "rotates neighbouring elements of a head, where models of transformers rotate its halves",
    "apply_layernorm_1p": "stores the weights of norms less one",
    "multi_latent_attention": "has multi-latent attention, whose projections are others",
}
_SAME = {  # arguments, and what configs of transformers call them
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "rotary_base": ("rope_theta",),
    "rotary_percent": ("partial_rotary_factor",),
}


def folder_of(path: Path) -> Path | None:
    """The folder of the iteration at `path`, which may be the one above it; None if it is none of Megatron's.

    Raises:
        DamagedCheckpointError: the latest iteration's folder is not there.
        ValueError: it is of another format of Megatron's.
    """
    if (path / _LATEST).is_file():
        name = (path / _LATEST).read_text(encoding="utf-8").strip()
        folder = path / (f"iter_{int(name):07d}" if name.isdigit() else name)
        if not folder.is_dir():
            raise DamagedCheckpointError(
                f"{path / _LATEST} names {name}, and there is no folder {folder.name} in {path}"
            )
        path = folder
    if (path / "weights" / "common.pt").is_file():  # of NeMo
        path = path / "weights"
    legacy = next(path.glob("mp_rank_*/*.pt"), None)
    if legacy is not None:
        raise ValueError(
            f"{path} is of Megatron's format torch ({legacy.relative_to(path)}), in which each rank pickles its own "
            f"part: torch_dist is read. Save it once with --ckpt-format torch_dist, or convert it with Megatron's "
            f"tools/checkpoint/convert.py"
        )
    backend = None
    if (path / "metadata.json").is_file():
        with suppress(ValueError, AttributeError):  # of another program
            backend = json.loads((path / "metadata.json").read_bytes()).get("sharded_backend")
    if backend not in (None, "torch_dist"):
        raise ValueError(
            f"{path} is of Megatron's format {backend}, as its metadata.json says; torch_dist is read: save it once "
            f"with --ckpt-format torch_dist"
        )
    return path if backend is not None or (path / "common.pt").is_file() else None


def read(folder: Path) -> Contents:
    """What the checkpoint of one iteration holds, by Megatron's names.

    Raises:
        DamagedCheckpointError: a file is missing or cut off.
        ValueError: a file could run code, or has no weights of a model.
    """
    for name in (".metadata", "common.pt"):
        if not (folder / name).is_file():
            raise DamagedCheckpointError(
                f"{folder} is of Megatron, and has no file {name}: copy the whole folder, or load an older iteration"
            )
    there = DcpFolder(folder)
    contents = Contents("Megatron-Core, torch_dist", about={"megatron": {}})
    try:
        common = load_safely(folder / "common.pt", stands_for=("megatron.", "nemo.", "signal."))
    except DamagedCheckpointError:
        raise
    except ValueError as error:
        common = {}
        contents.about["unread"] = f"has steps and options in a common.pt that is not read: {error}. {_WEIGHTS_ALONE}"
    args = contents.about["megatron"] = plain_values(getattr(common.get("args"), "__dict__", {}))
    weights, states, rest = {}, {}, []
    for key, entry in there.metadata.state_dict_metadata.items():
        state = _STATE.fullmatch(key)
        if not isinstance(entry, TensorStorageMetadata):
            rest.append(key)
        elif state is not None:
            states[state[1], state[2].removeprefix("module.")] = key
        elif "._extra_state" not in key and ".distributed." not in key:
            weights[key.removeprefix("module.")] = key
        else:
            rest.append(key)
    contents.weights = {name: there.tensor(key) for name, key in weights.items()}
    if not any(name.startswith("decoder.") for name in contents.weights):
        raise ValueError(
            f"{folder} has no weights of a GPTModel of Megatron-Core, decoder.layers and the like; it has "
            f"{', '.join(list(contents.weights)[:4]) or 'no tensors'}"
        )
    for (key, name), stored in states.items():
        if name not in contents.weights:
            raise ValueError(f"{folder} has a state of the optimizer, {stored}, for a weight that it does not have")
        tensor = _unflattened(there.tensor(stored), contents.weights[name].shape)
        of_key = contents.weights if key in _MASTERS else contents.states.setdefault(key, {})
        of_key[name] = tensor
    contents.step = common.get("iteration", common.get("global_step"))  # NeMo's is the latter
    _add_optimizer(contents, common, there, rest)
    if common.get("opt_param_scheduler") is not None:
        contents.extra["lr_scheduler"] = common["opt_param_scheduler"]
    contents.extra["iteration"] = contents.step
    contents.extra["consumed_train_samples"] = args.get("consumed_train_samples")
    return contents


def _unflattened(tensor: ForeignTensor, shape: tuple[int, ...]) -> ForeignTensor:
    """A state as Megatron-Core before 0.16 may store it: the parts that the ranks had, by their places along each axis,
    with all elements of a part on a last axis."""
    if len(tensor.shape) != len(shape) + 1:
        return tensor
    part = tuple(size // count for size, count in zip(shape, tensor.shape, strict=False))
    pieces = []
    for piece in tensor.pieces:
        start, count = piece.offset[-1], piece.sizes[-1]
        for index in itertools.product(*(range(size) for size in piece.sizes[:-1])):
            corner = [(first + at) * size for first, at, size in zip(piece.offset, index, part, strict=False)]
            for offset, sizes, first in boxes(part, start, start + count):
                place = tuple(a + b for a, b in zip(corner, offset, strict=True))
                pieces.append(Piece(place, sizes, partial(_run, piece, index, first - start, sizes)))
    return ForeignTensor(shape, tensor.dtype, pieces)


def _run(piece: Piece, index: tuple[int, ...], start: int, sizes: tuple[int, ...]) -> torch.Tensor:
    return piece.read()[index].narrow(0, start, math.prod(sizes)).view(sizes)


def _add_optimizer(contents: Contents, common: Mapping[str, Any], there: DcpFolder, rest: Iterable[str]) -> None:
    """Adds options, steps and the scaler, which lie in ``common.pt`` or in entries that are no tensors."""
    parts: list[Any] = [common.get("optimizer")]
    buckets = []
    for key in rest:
        if ".distributed." not in key:
            continue
        if ".gbuf_idx_" in key or ".param_state" in key:
            buckets.append(key)
        elif key.partition("/")[0].endswith((".optimizer", ".grad_scaler")):
            value = there.value(key)
            parts.append({"grad_scaler": value[0]} if "grad_scaler" in key else value[0])
    groups = [group for part in parts for group in _find(part, "param_groups") for group in group]
    scaler = next((scaler for part in parts for scaler in _find(part, "grad_scaler") if "scale" in scaler), None)
    if scaler is not None:
        tracked = scaler.get("growth_tracker", 0)
        contents.scaler = {"scale": float(scaler["scale"]), "steps_since_overflow": int(tracked)}
    if buckets:
        contents.about["unread"] = (
            f"has the states of the distributed optimizer by buckets ({buckets[0]}), and which of their elements are "
            f"which parameter's depends on the ranks that wrote them: load it once in Megatron, on as many ranks, and "
            f"save it with --dist-ckpt-optim-fully-reshardable (before Megatron-Core 0.14, with "
            f"--ckpt-fully-parallel-save). {_WEIGHTS_ALONE}"
        )
    if not contents.states:
        return
    steps = [float(step) for key in ("common_step", "step") for part in [*parts, *groups] for step in _find(part, key)]
    step = torch.tensor(steps[0] if steps else float(contents.step or 0))
    names = dict.fromkeys(name for of_key in contents.states.values() for name in of_key)
    contents.states["step"] = {name: ForeignTensor.of(step) for name in names}
    members: dict[int, list[str]] = {}
    norms_decay = bool(contents.about["megatron"].get("apply_wd_to_qk_layernorm"))
    for name in names:
        plain = len(contents.weights[name].shape) - _stacked(name) <= 1
        plain = plain and not (norms_decay and re.search(r"\.[qk]_layernorm\.", name))
        fits = [
            at
            for at, group in enumerate(groups)
            if (group.get("wd_mult", 1.0) == 0) == plain and bool(group.get("is_expert_parallel")) == _is_expert(name)
        ]
        fits = fits or [at for at, group in enumerate(groups) if (group.get("wd_mult", 1.0) == 0) == plain]
        members.setdefault((fits or [0])[0], []).append(name)
    hidden = ("params", "step", "param_names")
    contents.groups = [
        (of_group, {k: v for k, v in groups[at].items() if k not in hidden} if groups else {})
        for at, of_group in sorted(members.items())
    ]


def _find(value: Any, name: str) -> list[Any]:
    """What nested mappings and lists have under `name`."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return []
    return [v for k, inner in value.items() for v in ([inner] if k == name else _find(inner, name)) if v is not None]


def _stacked(name: str) -> bool:
    return re.match(r"decoder\.layers\.(?!\d)", name) is not None


def _is_expert(name: str) -> bool:
    return ".experts." in name


@dataclass(frozen=True)
class _Cut:
    """Where a tensor of a model is: rows of one layer of a stored tensor.

    Args:
        key: of the stored tensor.
        layer: on its leading axis; None if it has no such axis.
        rows: for each run of rows, the first one there, how many, and the first one in the model's; None for all.
        flipped: whether the model has rows and columns the other way around.
    """

    key: str
    layer: int | None = None
    rows: tuple[tuple[int, int, int], ...] | None = None
    flipped: bool = False

    def of(self, tensor: ForeignTensor) -> ForeignTensor:
        """The model's tensor, of which each piece is read from a piece of the stored `tensor`."""
        if not tensor.shape:
            return tensor
        axes = 0 if self.layer is None else 1
        shape = tensor.shape[axes:]
        rows = self.rows or ((0, shape[0], 0),)
        pieces = []
        for piece in tensor.pieces:
            within: tuple[int, ...] = ()
            if self.layer is not None:
                within = (self.layer - piece.offset[0],)
                if not 0 <= within[0] < piece.sizes[0]:
                    continue
            (top, *corner), (height, *sizes) = piece.offset[axes:], piece.sizes[axes:]
            for first, count, to in rows:
                low, high = max(first, top), min(first + count, top + height)
                if low < high:
                    read = partial(_rows, piece, (*within, slice(low - top, high - top)), flipped=self.flipped)
                    order = slice(None, None, -1 if self.flipped else 1)
                    place, box = (to + low - first, *corner)[order], (high - low, *sizes)[order]
                    pieces.append(Piece(place, box, read))
        shape = (sum(count for _, count, _ in rows), *shape[1:])
        return ForeignTensor(shape[::-1] if self.flipped else shape, tensor.dtype, pieces)


def _rows(piece: Piece, index: tuple[int | slice, ...], *, flipped: bool) -> torch.Tensor:
    rows = piece.read()[index]
    return rows.mT if flipped else rows


def is_of_megatron(checkpoint: OpenCheckpoint) -> bool:
    """Whether `checkpoint` has Megatron's names, being Megatron's or imported from there."""
    return "megatron" in checkpoint.document.get("imported", {})


def by_names_of(
    checkpoint: OpenCheckpoint, module: nn.Module, shapes: Mapping[str, Any], aliases: Mapping[str, str]
) -> OpenCheckpoint:
    """`checkpoint` of Megatron, with the names and tensors of a model; one of another program as it is.

    Args:
        module: of Llama's kind (also Mistral, Mixtral, Qwen2 and Qwen3 with experts or without), GPT-2, or with
            Megatron's own names.
        shapes: of its parameters, by name.
        aliases: for every name of a parameter, the first one.

    Raises:
        ValueError: the checkpoint is of another model.
    """
    if not is_of_megatron(checkpoint):
        return checkpoint
    args = checkpoint.document["imported"]["megatron"]
    opened = in_pieces(checkpoint)
    stored: dict[str, dict[str, ForeignTensor]] = {}
    for key, tensor in opened.tensors.items():
        kind, name = re.fullmatch(r"(model\.|optimizer\.\w+\.)(.+)", key).groups()  # type: ignore[union-attr]
        stored.setdefault(kind, {})[name] = tensor
    weights = stored["model."]
    model = _Model(checkpoint.store.name, weights, module, shapes, args)
    cuts = {name: cut for name in shapes if (cut := model.cut(name)) is not None}
    model.check(cuts, aliases)
    used = {cut.key for cut in cuts.values()}
    tensors = {f"model.{name}": tensor for name, tensor in weights.items() if name not in used}
    for kind, of_kind in stored.items():
        tensors.update({f"{kind}{name}": cut.of(of_kind[cut.key]) for name, cut in cuts.items() if cut.key in of_kind})
    entries = checkpoint.document["optimizer"]
    groups = [
        {**group, "names": [name for name, cut in cuts.items() if cut.key in set(group["names"])]}
        for group in entries["groups"]
    ]
    document = {**checkpoint.document, "optimizer": {**entries, "groups": groups}}
    return replace(opened.with_tensors(tensors), document=document)


class _Model:
    """Finds a model's tensors among Megatron's."""

    def __init__(
        self,
        where: str,
        weights: Mapping[str, ForeignTensor],
        module: nn.Module,
        shapes: Mapping[str, Any],
        args: Mapping[str, Any],
    ) -> None:
        self._where = where
        self._weights = weights
        self._module = module
        self._shapes = shapes
        self._args = args
        self._config = getattr(module, "config", None)

    def cut(self, name: str) -> _Cut | None:
        """Where the tensor `name` of the model is; None if nothing there is known to be it."""
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            return self._of_layer(name, int(layer[1]), layer[2])
        path, _, leaf = name.rpartition(".")
        key = f"{_OTHERS.get(path.rpartition('.')[2], path)}.{leaf}"
        if name in self._weights:
            key = name
        if key not in self._weights:
            return None
        rows = self._vocabulary(key, name) if key in (_EMBEDDING, _OUTPUT) else None
        return _Cut(key, rows=rows)

    def _of_layer(self, name: str, number: int, suffix: str) -> _Cut | None:
        path, _, leaf = suffix.rpartition(".")
        stored, rows = suffix, ""
        if path in _NORMS:
            fused, apart = _NORMS[path]
            stored = f"{fused}.layer_norm_{leaf}"
            if self._key(number, stored) is None:
                stored = f"{apart}.{leaf}"
        elif suffix in _LAYERS:
            stored, rows = _LAYERS[suffix]
        elif path in _LAYERS:
            inner, rows = _LAYERS[path]
            stored = f"{inner}.{leaf}"
        single = {"gate": "_w", "up": "_v"}.get(rows)
        if single is not None and self._key(number, stored + single) is not None:  # stored apart
            stored, rows = stored + single, ""
        place = self._key(number, stored)
        if place is None:
            return None
        flipped = path.rpartition(".")[2] in ("c_attn", "c_proj", "c_fc") and leaf == "weight"
        if flipped:
            flipped = not isinstance(self._module.get_submodule(name.rpartition(".")[0]), nn.Linear)
        return replace(place, rows=self._rows(place, rows, name), flipped=flipped)

    def _key(self, number: int, suffix: str) -> _Cut | None:
        for key, layer in ((f"decoder.layers.{suffix}", number), (f"decoder.layers.{number}.{suffix}", None)):
            if key in self._weights and (layer is None or layer < self._weights[key].shape[0]):
                return _Cut(key, layer)
        return None

    def _rows(self, place: _Cut, which: str, name: str) -> tuple[tuple[int, int, int], ...] | None:
        if not which:
            return None
        there = self._weights[place.key].shape[0 if place.layer is None else 1]
        if which in ("gate", "up"):
            half = there // 2
            return ((0 if which == "gate" else half, half, 0),)
        heads, groups, size = self._heads()
        rows = (heads + 2 * groups) * size
        if heads % groups or there != rows:
            raise ValueError(
                f"{self._where} is a checkpoint of another model: {place.key} has {there} rows of queries, keys and "
                f"values, and the model's {name}, with {heads} heads, {groups} of keys and values, of {size} elements "
                f"each, needs {rows}. Build the model with the heads that it had in Megatron{self._said_heads()}"
            )
        each = heads // groups * size  # rows of queries in a group of heads
        parts = {"q": (0, each), "k": (each, size), "v": (each + size, size)}
        ranges, to = [], 0
        for part in which:
            first, count = parts[part]
            for group in range(groups):
                ranges.append((group * (each + 2 * size) + first, count, to))
                to += count
        return tuple(ranges)

    def _heads(self) -> tuple[int, int, int]:
        """The heads of queries, those of keys and values, and a head's elements; as the model's config has them."""
        config, args = self._config, self._args
        heads = getattr(config, "num_attention_heads", None) or args.get("num_attention_heads")
        if heads is None:
            raise ValueError(
                f"{self._where} does not say how many heads the model has, and {type(self._module).__name__} has no "
                f"config.num_attention_heads: queries, keys and values cannot be told apart. Give it such a config"
            )
        groups = getattr(config, "num_key_value_heads", None) or (
            self._said("num_query_groups") if config is None else 0
        )
        hidden = getattr(config, "hidden_size", None) or args.get("hidden_size") or 0
        size = getattr(config, "head_dim", None) or (config is None and args.get("kv_channels")) or hidden // heads
        return heads, groups or heads, size

    def _said(self, name: str) -> Any:
        """An argument of Megatron, where it was in use."""
        if name == "num_query_groups" and not self._args.get("group_query_attention"):
            return self._args.get("num_attention_heads")
        return self._args.get(name)

    def _said_heads(self) -> str:
        said = [
            f"{name} {self._said(name)}" for name in ("num_attention_heads", "num_query_groups") if self._said(name)
        ]
        return f" ({', '.join(said)})" if said else ""

    def _vocabulary(self, key: str, name: str) -> tuple[tuple[int, int, int], ...]:
        """The rows of the model's vocabulary, without those that Megatron has added."""
        there, here = self._weights[key].shape[0], int(self._shapes[name][0])
        ranks = self._args.get("tensor_model_parallel_size") or len({p.offset[0] for p in self._weights[key].pieces})
        step = (self._args.get("make_vocab_size_divisible_by") or 128) * ranks
        said = self._args.get("vocab_size")
        if here > there or (there - here >= step and said != here):
            said = said or f"at least {there - step + 1}"
            raise ValueError(
                f"{self._where} is a checkpoint of another model: {key} has {there} rows, which is a vocabulary of "
                f"{said} padded to a multiple of {step}, and the model's {name} has {here}. Build the model with the "
                f"vocabulary that it had in Megatron, or with vocab_size={there}"
            )
        return ((0, here, 0),)

    def check(self, cuts: Mapping[str, _Cut], aliases: Mapping[str, str]) -> None:
        """Whether the model is of the same sizes and kind as what is stored.

        Raises:
            ValueError: it is not.
        """
        here = {int(layer[1]) for name in self._shapes if (layer := _LAYER.fullmatch(name)) is not None}
        there = {tensor.shape[0] for name, tensor in self._weights.items() if _stacked(name)}
        apart = {int(match[1]) for name in self._weights if (match := re.match(r"decoder\.layers\.(\d+)\.", name))}
        layers = next(iter(there)) if there else len(apart)
        if any(cut.key.startswith("decoder.layers.") for cut in cuts.values()) and layers != len(here):
            raise ValueError(
                f"{self._where} is a checkpoint of another model: it has {layers} layers, and the model has "
                f"{len(here)}. Build the model with num_hidden_layers={layers}"
            )
        output = next((name for name in aliases if name.rpartition(".")[0].endswith(("lm_head", "output_layer"))), None)
        if output is not None and (aliases[output] == output) != (_OUTPUT in self._weights):
            tied = aliases[output] != output
            raise ValueError(
                f"{self._where} is a checkpoint of another model: it has {'an' if tied else 'no'} {_OUTPUT}, and the "
                f"model's {output} is {'tied to ' + aliases[output] if tied else 'not tied to its embedding'}. Build "
                f"the model with tie_word_embeddings={not tied}"
            )
        self._check_arguments()

    def _check_arguments(self) -> None:
        for name, meaning in _OTHER_WEIGHTS.items():
            if self._args.get(name):
                raise ValueError(f"{self._where} was trained with {name}, which {meaning}; this is not read")
        if self._config is None or not self._args:
            return
        heads, groups, size = self._heads()
        for name, value in (("num_attention_heads", heads), ("num_query_groups", groups), ("kv_channels", size)):
            if self._said(name) not in (None, value):
                raise ValueError(
                    f"{self._where} is a checkpoint of another model: it was trained with {name} {self._said(name)}, "
                    f"and the model has {value}. Build the model with the heads that it had in Megatron"
                )
        rope = getattr(self._config, "rope_parameters", None) or {}
        here = {
            name: next((v for o in others if (v := rope.get(o, getattr(self._config, o, None))) is not None), None)
            for name, others in _SAME.items()
        }
        here["use_rope_scaling"] = rope.get("rope_type", "default") != "default"
        for name, now in here.items():
            then = self._args.get(name)
            if now is not None and then is not None and not math.isclose(float(then), float(now)):
                logger.warning(
                    "%s was trained with %s %s, and the config of this %s has %s: losses differ from those there",
                    self._where, name, then, type(self._module).__name__, now,
                )  # fmt: skip
