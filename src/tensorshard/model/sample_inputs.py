"""Small inputs to run a model with once: guessed, if the user gave none, or cut from a large batch.

Guesses come from a model's first layer, from its arguments' names and from the layers that it has. They are tried one
after the other on fake tensors until one runs, so that a wrong guess costs time and nothing else.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from itertools import islice, pairwise
from math import isqrt
from typing import Any

import torch
from torch import nn

from tensorshard.model.tensors import map_tensors_once, tensor_leaves
from tensorshard.torch_private.pytree import tree_map_only

# Inputs for the models of transformers and diffusers, made from their configs.

SAMPLES = 2
TOKENS = 6
_LARGEST_TOKEN = 100
_WAVEFORM = 4000
_PARTS = ("text_config", "vision_config", "audio_config")
_FRAMES = 2
_LENGTH = 64  # of one-dimensional signals
_MAIN = ("sample", "hidden_states")
_WIDTHS_OF_TEXT = (
    "encoder_hid_dim",
    "caption_channels",
    "text_embed_dim",
    "joint_attention_dim",
    "cross_attention_dim",
    "embedding_dim",
)

Inputs = dict[str, Any]


def transformers_inputs(model: nn.Module) -> list[Inputs]:
    """Candidates for keyword arguments of `model`, the most likely first; [] if it is not from transformers.

    They follow from its documented attributes ``config`` and ``main_input_name``. The values are arbitrary.
    """
    config, main = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or not isinstance(main, str):
        return []
    accepted = inspect.signature(type(model).forward).parameters
    beside: Inputs = {}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        beside["decoder_input_ids"] = _token_ids(config)[:, :-1]
    if "use_cache" in accepted:
        beside["use_cache"] = False
    candidates = []
    for value in _values(config, main):
        candidates.append({main: value, **beside})
        if main == "input_ids" and "pixel_values" in accepted and _look_up(config, "image_size") is not None:
            candidates.append({main: value, "pixel_values": _image(config), **beside})
    if main == "states":  # a decision transformer, with earlier actions and rewards
        candidates.insert(0, _decisions(config))
    return candidates


def tokens(vocabulary: int, special: frozenset[int] = frozenset()) -> torch.Tensor:
    """Tokens of a `vocabulary`, none of them `special` if there are others."""
    plain = [token for token in range(min(vocabulary, _LARGEST_TOKEN)) if token not in special] or [0]
    return torch.tensor([plain[5 * i % len(plain)] for i in range(SAMPLES * TOKENS)]).view(SAMPLES, TOKENS)


def _values(config: Any, main: str) -> Iterator[torch.Tensor]:
    """Candidates for the main input."""
    if main == "pixel_values":
        yield _image(config)
    elif main == "input_values":  # a spectrogram, or a waveform
        bins, length = _look_up(config, "num_mel_bins"), _look_up(config, "max_length")
        if bins is not None and length is not None:
            yield torch.zeros(SAMPLES, length, bins)
        yield torch.zeros(SAMPLES, _WAVEFORM)
    elif main == "input_features":
        bins, positions = _look_up(config, "num_mel_bins"), _look_up(config, "max_source_positions")
        if bins is not None and positions is not None:
            yield torch.zeros(SAMPLES, bins, 2 * positions)  # a convolution of stride 2 comes first
        yield torch.zeros(SAMPLES, TOKENS, _look_up(config, "num_mel_bins", "input_dim", "hidden_size") or 80)
    elif main == "past_values":
        length, channels = _look_up(config, "context_length"), _look_up(config, "num_input_channels", "input_size")
        yield torch.zeros(SAMPLES, length or TOKENS, channels or 1)
    else:
        yield _token_ids(config)


def _decisions(config: Any) -> Inputs:
    return {
        "states": torch.zeros(SAMPLES, TOKENS, config.state_dim),
        "actions": torch.zeros(SAMPLES, TOKENS, config.act_dim),
        "rewards": torch.zeros(SAMPLES, TOKENS, 1),
        "returns_to_go": torch.zeros(SAMPLES, TOKENS, 1),
        "timesteps": torch.arange(TOKENS).expand(SAMPLES, -1).contiguous(),
        "attention_mask": torch.ones(SAMPLES, TOKENS, dtype=torch.long),
    }


def _image(config: Any) -> torch.Tensor:
    size = _look_up(config, "image_size")
    size = 224 if size is None else size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.zeros(SAMPLES, _look_up(config, "num_channels") or 3, height, width)


def _token_ids(config: Any) -> torch.Tensor:
    values = [value for part in _parts(config) for key, value in vars(part).items() if key.endswith("_token_id")]
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return tokens(_look_up(config, "vocab_size") or 2, frozenset(each for each in flat if isinstance(each, int)))


def _look_up(config: Any, *names: str) -> Any:
    """The first of `names` that the config or one of its parts has."""
    for name in names:
        for part in _parts(config):
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _parts(config: Any) -> list[Any]:
    return [config, *(part for name in _PARTS if (part := getattr(config, name, None)) is not None)]


def diffusers_inputs(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Candidates for keyword arguments of `model`, the most likely first; [] if it is not from diffusers.

    The sizes come from its ``config``, a mapping, and the names from its forward. The values are arbitrary.
    """
    config = getattr(model, "config", None)
    accepted = inspect.signature(type(model).forward).parameters
    main = next((name for name in _MAIN if name in accepted), None)
    if not isinstance(config, Mapping) or main is None:
        return []
    beside = {name: value for name in accepted if (value := _conditioning(config, name)) is not None}
    needed = {name for name, parameter in accepted.items() if parameter.default is parameter.empty} - {"self", main}
    if not all(name in beside for name in needed if accepted[name].kind is not inspect.Parameter.VAR_KEYWORD):
        return []
    first = next((m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)
    return [{main: torch.zeros(SAMPLES, *shape), **beside} for shape in _sample_shapes(config, first)]


def _sample_shapes(config: Mapping[str, Any], first: nn.Module | None) -> Iterator[tuple[int, ...]]:
    """Shapes of one sample for a model whose first convolution is `first`."""
    channels = config.get("in_channels")
    if channels is None:
        if config.get("embedding_dim") is not None:  # a prior, which denoises an embedding
            yield (config["embedding_dim"],)
    elif isinstance(first, nn.Conv1d):
        yield channels, _LENGTH
    elif "sample_frames" in config:  # a transformer for videos, whose latents have frames first
        yield _FRAMES, channels, *_sizes(config)
    else:
        yield channels, *_sizes(config)
        yield channels, _FRAMES, *_sizes(config)


def _sizes(config: Mapping[str, Any]) -> tuple[int, int]:
    size = config.get("sample_size")
    if isinstance(size, tuple | list):
        return size[-2], size[-1]
    height = config.get("sample_height") or size or 32
    return height, config.get("sample_width") or size or 32


def _conditioning(config: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """A value for the argument `name`; None if it is optional."""
    if name in ("timestep", "timesteps"):
        return torch.ones(SAMPLES, dtype=torch.long)
    if name == "encoder_hidden_states":
        width = next((config[key] for key in _WIDTHS_OF_TEXT if isinstance(config.get(key), int)), None)
        length = config.get("max_text_seq_length") or config.get("num_embeddings") or TOKENS
        return None if width is None else torch.zeros(SAMPLES, length, width)
    if name == "class_labels":
        classes = config.get("num_embeds_ada_norm") or config.get("num_class_embeds")
        return torch.zeros(SAMPLES, dtype=torch.long) if classes else None
    width = {
        "pooled_projections": config.get("pooled_projection_dim"),
        "proj_embedding": config.get("embedding_dim"),
    }.get(name)
    return None if width is None else torch.zeros(SAMPLES, width)


_SAMPLES = 2
_POSITIONS = 12
# Batches with at most this many samples, and at most this many positions in all, stay as they are.
_FEW_SAMPLES = 8
_FEW_POSITIONS = 512


_MOST_GUESSES = 48
_INDICES = re.compile(
    r"(^|_)(ids?|idx|index|indices|tokens?|categor\w*|sparse|users?|items?|words?|labels?|src|tgt)($|_)"
)
_MASKS = re.compile(r"mask|padding")
_TIMES = re.compile(r"^(t|times?|timesteps?|noise_level|sigmas?)$")
_GRAPHS = re.compile(r"adj|edge|graph")
_POINTS = re.compile(r"pos(ition)?s?$|dir(ection)?s?$|coord|points?|xyz|rays?")
_CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d
_IMAGE_SIZES = (64, 224, 32)
_CHANNELS = (3, 1, 4)
_SIDES = (4, 7, 8, 14, 16)
_MOST_EXTRA_TOKENS = 5  # that a table of positions may have beside those of the patches, for a class and registers


def example_inputs(model: nn.Module) -> list[Any]:
    """Candidates for inputs that `model` takes, the most likely first. The values are arbitrary.

    Models of transformers and diffusers say themselves what they take. For others, the first layer with parameters
    shows it: an embedding wants indices, a convolution images, a linear layer features or the patches of images. Then
    the names of the forward's arguments are tried. A model with a head that computes its loss takes targets as well,
    and may take masks. Numbers have the type of the model's first weight.
    """
    candidates = _candidates(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    typed: list[Any] = tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, candidates)
    return typed


def _candidates(model: nn.Module) -> list[Any]:
    published = transformers_inputs(model) or diffusers_inputs(model)
    if any(getattr(module, "takes_targets", False) for module in model.modules()):
        main = [next(iter(inputs.values())) for inputs in published[:1]]
        return [given for inputs in [*main, *inputs_of_first_layer(model)] for given in _with_targets(model, inputs)]
    if published:
        return list(published)
    return [*inputs_of_first_layer(model), *guesses_by_arguments(model)]


def _with_targets(model: nn.Module, inputs: Any) -> list[Any]:
    """What a model may take whose last layer is its loss: its input, and small class indices, one a token or a sample.

    Required arguments that are called masks are ones.
    """
    if not isinstance(inputs, torch.Tensor):
        return []
    shape = inputs.shape if not inputs.is_floating_point() else inputs.shape[: 2 if inputs.ndim == 3 else 1]
    targets = [torch.zeros(size, dtype=torch.long) for size in dict.fromkeys((shape, inputs.shape[:1]))]
    accepted = inspect.signature(model.forward).parameters.values()
    needed = [p.name for p in accepted if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    masks = {name: torch.ones(shape, dtype=torch.long) for name in needed if "mask" in name}
    others = [name for name in needed if name not in masks]
    if masks and len(others) == 2:
        return [{**masks, others[0]: inputs, others[1]: classes} for classes in targets]
    return [(inputs, classes) for classes in targets]


def smaller_inputs(inputs: Any, size: int) -> Any | None:
    """The first samples of `inputs`, and the first positions of sequences; None where that would save little.

    Sequences are token ids [samples, positions] or features [samples, positions, channels], all equally long. If their
    length is divisible by `size`, they are cut to another length that is.

    Args:
        inputs: as for ``Engine.step``.
    """
    leaves = [leaf for leaf in tensor_leaves(inputs) if leaf.ndim]
    if len({leaf.shape[0] for leaf in leaves}) != 1:  # samples may be along another dimension
        return None
    samples, positions = leaves[0].shape[0], _positions(leaves)
    kept = positions
    if positions is not None and positions % size == 0 and samples * positions > _FEW_POSITIONS:
        kept = min(positions, -(-_POSITIONS // size) * size)
    if kept == positions and samples <= _FEW_SAMPLES:
        return None

    def cut(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.ndim == 0:
            return leaf
        first = leaf[:_SAMPLES]
        return first if kept is None else first[:, :kept]

    return map_tensors_once(cut, inputs)


def _positions(leaves: list[torch.Tensor]) -> int | None:
    """The length of the sequences in `leaves`; None if they are not sequences, or have different lengths."""
    if any(leaf.ndim != (3 if leaf.is_floating_point() else 2) for leaf in leaves):
        return None
    lengths = {leaf.shape[1] for leaf in leaves}
    return lengths.pop() if len(lengths) == 1 else None


def inputs_of_first_layer(model: nn.Module) -> list[Any]:
    """An embedding wants indices, a convolution images, a linear layer features or images that are cut into patches."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            ids = tokens(module.num_embeddings)
            return [ids, (ids, ids)]
        if isinstance(module, _CONVOLUTIONS):
            return _convolved(model, module)
        if isinstance(module, nn.Linear):
            features = module.in_features
            sequences = torch.zeros(SAMPLES, TOKENS, features)
            plain = [torch.zeros(SAMPLES, features), sequences, (sequences, sequences)]
            return [*plain, *_images_of_patches(model, features)]
    return []


def convolved_inputs(model: nn.Module) -> list[torch.Tensor]:
    """What the model's first convolution may take, if that comes before its other layers; else nothing."""
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS):
            return _convolved(model, module)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return []
    return []


def _convolved(model: nn.Module, layer: nn.Module) -> list[torch.Tensor]:
    assert isinstance(layer, _CONVOLUTIONS)
    if isinstance(layer, nn.Conv2d):
        sizes = [*_image_sizes(model), *((size, size) for size in _IMAGE_SIZES)]
    elif isinstance(layer, nn.Conv1d):
        sizes = [(64,), (1024,), (16384,)]  # type: ignore[list-item]
    else:
        sizes = [(length,) * 3 for length in (16, 32, 64)]  # type: ignore[misc]
    images = [torch.zeros(SAMPLES, layer.in_channels, *size) for size in dict.fromkeys(sizes)]
    if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1):
        images += _images_of_patches(model, layer.in_channels)
    return images


def _image_sizes(model: nn.Module) -> list[tuple[int, int]]:
    """Image sizes that the model's attributes give."""
    sizes = []
    for name in ("image_size", "img_size", "image_shape", "input_size"):
        value = getattr(model, name, None)
        if isinstance(value, int):
            sizes.append((value, value))
        elif isinstance(value, tuple | list) and len(value) >= 2:
            sizes.append((value[-2], value[-1]))
    return sizes


def _images_of_patches(model: nn.Module, features: int) -> list[torch.Tensor]:
    """Square images of which a patch has `features` numbers. A table of positions gives the number of patches."""
    images: dict[tuple[int, int, int], None] = {}
    given = dict.fromkeys(_sides_of_tables(model))
    # Of a few patches, windows of one are made, on which attention does nothing.
    sides = [*(side for side in given if side >= min(_SIDES)), *_SIDES, *(side for side in given if side < min(_SIDES))]
    for channels in _CHANNELS:
        patch = isqrt(features // channels)
        if patch < 2 or channels * patch * patch != features:
            continue
        images |= dict.fromkeys((channels, *size) for size in _image_sizes(model))
        images |= dict.fromkeys((channels, patch * side, patch * side) for side in sides)
        # Patches that overlap are more than the image's side over theirs.
        images |= dict.fromkeys((channels, size, size) for size in _IMAGE_SIZES)
    return [torch.zeros(SAMPLES, *shape) for shape in images]


def _sides_of_tables(model: nn.Module) -> Iterator[int]:
    """The square roots of the rows of the tables that the model and its parts hold, registered or not."""
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()]
        for table in tensors:
            if not isinstance(table, torch.Tensor) or table.ndim not in (2, 3) or (table.ndim == 3 and len(table) > 1):
                continue
            for extra in range(_MOST_EXTRA_TOKENS + 1):
                side = isqrt(max(0, table.shape[-2] - extra))
                if side > 1 and side * side == table.shape[-2] - extra:
                    yield side


def guesses_by_arguments(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """Keyword arguments that the forward of `model` may take, the most likely first. Optional ones are left out.

    The values are arbitrary. The first dimension of each tensor is samples.
    """
    needed = _needed(model)
    if not needed:
        return []
    options = [list(_options(model, name)) for name in needed]
    if not all(options):
        return []
    last = [len(each) - 1 for each in options]
    # First the first options of all arguments; then combinations with one second option; and so on.
    chosen = (places for total in range(sum(last) + 1) for places in _adding_up(total, last))
    return [
        {name: each[place] for name, each, place in zip(needed, options, places, strict=True)}
        for places in islice(chosen, _MOST_GUESSES)
    ]


def _adding_up(total: int, last: list[int]) -> Iterator[tuple[int, ...]]:
    """Combinations of numbers from 0 to each of `last` that add up to `total`, made one by one since there are many."""
    if total > sum(last):
        return
    if not last:
        yield ()
        return
    for first in range(min(total, last[0]) + 1):
        yield from ((first, *rest) for rest in _adding_up(total - first, last[1:]))


def _needed(model: nn.Module) -> list[str]:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = inspect.signature(model.forward).parameters.values()
    return [p.name for p in accepted if p.default is p.empty and p.kind in by_name]


def _options(model: nn.Module, name: str) -> Iterator[torch.Tensor]:
    if _MASKS.search(name):
        yield torch.ones(SAMPLES, TOKENS, dtype=torch.bool)
    elif _TIMES.search(name):
        yield torch.ones(SAMPLES, dtype=torch.long)
        yield torch.full((SAMPLES,), 0.5)
        yield torch.full((SAMPLES, 1), 0.5)
    elif _GRAPHS.search(name):
        yield torch.ones(SAMPLES, TOKENS, TOKENS)
        yield torch.ones(SAMPLES, SAMPLES)
    elif _INDICES.search(name):
        yield from _indices(model)
        yield from _numbers(model)
    elif _POINTS.search(name):
        yield torch.zeros(SAMPLES, 3)
        yield torch.zeros(SAMPLES, TOKENS, 3)
        yield from _numbers(model)
    else:
        yield from convolved_inputs(model)
        yield from _numbers(model)
        yield from _indices(model)


def _indices(model: nn.Module) -> Iterator[torch.Tensor]:
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    if not tables:
        return
    most = min(table.num_embeddings for table in tables)
    shapes = [(SAMPLES, TOKENS), (SAMPLES, len(tables)), (SAMPLES,)]
    shapes += [(SAMPLES, fields) for fields in _fields(model, tables[0].embedding_dim)]
    for shape in dict.fromkeys(shapes):
        yield torch.arange(torch.Size(shape).numel()).remainder_(most).view(shape)


def _fields(model: nn.Module, width: int) -> Iterator[int]:
    """How many embedding rows of `width` fill a linear layer's input, alone or beside the first layer's features."""
    inputs = [m.in_features for m in model.modules() if isinstance(m, nn.Linear)]
    for features in inputs:
        for beside in (0, inputs[0]):
            count, rest = divmod(features - beside, width)
            if count > 1 and not rest:
                yield count


def _numbers(model: nn.Module) -> Iterator[torch.Tensor]:
    """Features that the linear layers take, those of the first layer first, as vectors and as sequences."""
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    widths = list(dict.fromkeys(layer.in_features for layer in linear))[:3]
    shapes = [shape for width in widths for shape in ((SAMPLES, width), (SAMPLES, TOKENS, width))]
    if linear:
        first = linear[0].in_features
        shapes.append((SAMPLES, 2 * first))  # the layer may take one half of it
        for layer, later in pairwise(linear):
            steps, rest = divmod(later.in_features, layer.out_features)
            if steps > 1 and not rest:  # the layer may take the features of all steps at once
                shapes.append((SAMPLES, steps, first))
    yield from (torch.zeros(shape) for shape in dict.fromkeys(shapes))
