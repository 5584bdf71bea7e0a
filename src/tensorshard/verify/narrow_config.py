"""Smaller configs for models of transformers: fewer layers, heads and experts, smaller widths and vocabularies.

A config names its sizes as it likes. The names that most configs use are known here, and every size of one kind is
divided by one number, so that sizes which were equal, or multiples of each other, still are. Whether a model can be
made of such a config, and run, is for the caller to find out.

Also here: which of a model's equal blocks a small copy of it keeps, and the model without the others.
"""

import copy
import math
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from tensorshard.model.blocks import find_blocks
from tensorshard.plan.plan import Plan
from tensorshard.tensor_parallel.verify.block_kinds import group_equal_blocks

_HEADS = re.compile(
    r"(^|_)(n_heads?|(num_)?(attention_|key_value_|kv_|query_|self_attention_|n_)?heads(_kv)?|n_head_kv)$"
)
_HEAD_SIZES = re.compile(r"(^|_)(head_dim|head_size|d_kv|rotary_dim|attention_head_dim|kv_channels)$")
_WIDTHS = re.compile(
    r"(^|_)(d_model|n_embd|n_inner|d_ff|dim|hidden_dim|ffn_dim|mlp_dim|inner_dim|model_dim|embed_dims?|embedding_size|"
    r"embed_size|hidden_sizes?|intermediate_sizes?|word_embed_proj_dim|projection_dim|proj_dim|lora_rank|lru_width|"
    r"encoder_ffn_dim|decoder_ffn_dim|ffn_hidden_size|projector_hidden_act_size|output_dim|attention_hidden_size)$"
)
_OTHER_SIZES = re.compile(
    r"head_|vocab|image|patch|position|window|kernel|chunk|label|channel_|max_|num_mel|conv_|state_"
)
_VOCABULARIES = re.compile(r"(^|(?<!type)_)vocab_size$")
_EXPERTS = re.compile(r"^(num_local_experts|num_experts|n_routed_experts|moe_num_experts|n_experts)$")
_EXPERTS_OF_TOKEN = re.compile(r"(experts_per_tok(en)?|moe_top_?k|moe_k|router_top_?k|top_?k_experts)$")
_EXPERT_GROUPS = re.compile(r"^n_group$")
_DEPTHS = re.compile(r"^(encoder_|decoder_)?depths$")
_DROPOUT = re.compile(r"drop")
_TOKENS = re.compile(r"token_(id|index|ids)$")

_LEAST_HEAD = 8
_HEAD = 16  # head sizes are at least this where they can be
_LEAST_WIDTH = 32
_VOCABULARY = 64
_LEAST_DEPTH = 2  # of a stage of blocks whose windows are shifted in turn

LAYERS, VOCABULARY, EXPERTS, WIDTHS = "layers", "vocabulary", "experts", "widths"
COUNTS_LAYERS = re.compile(
    r"(^|_)((n|num)_)?((hidden|encoder|decoder|transformer|attention)_)?(layers?|blocks?|depth)$"
)
"""Names of attributes that hold how many blocks there are."""


@dataclass
class Narrowed:
    """A smaller config.

    Attributes:
        config: a copy.
        parts: what is smaller.
        tokens: what a token of the model becomes; None if the vocabulary is the same.
        said: a sentence for each thing that is smaller.
    """

    config: Any
    parts: frozenset[str]
    tokens: Callable[[torch.Tensor], torch.Tensor] | None
    said: list[str]


def narrow(config: Any, parts: frozenset[str], layers: Mapping[int, int], *, tp: int) -> Narrowed:
    """A copy of `config` in which those of the `parts` are smaller that can be.

    Args:
        config: of transformers.
        parts: of :data:`LAYERS`, :data:`VOCABULARY`, :data:`EXPERTS` and :data:`WIDTHS`.
        layers: the new number of layers for each number that there is.
        tp: what divides evenly by it, still does. What does not, still does not.
    """
    made = copy.deepcopy(config)
    configs = list(_configs(made))
    done: set[str] = set()
    said: list[str] = []
    tokens = None
    if LAYERS in parts and _fewer_layers(configs, layers):
        done.add(LAYERS)
    if WIDTHS in parts and _narrower(configs, tp, said):
        done.add(WIDTHS)
    if EXPERTS in parts and _fewer_experts(configs, said):
        done.add(EXPERTS)
    if VOCABULARY in parts:
        tokens = _smaller_vocabulary(configs, tp, said)
        if tokens is not None:
            done.add(VOCABULARY)
    return Narrowed(made, frozenset(done), tokens, said)


def drop_nothing(config: Any) -> bool:
    """Sets every rate of dropout in `config` to 0; returns whether one was not."""
    has_dropout = False
    for part in _configs(config):
        for name, value in _plain(part):
            if type(value) is float and value and _DROPOUT.search(name):
                setattr(part, name, 0.0)
                has_dropout = True
            elif name == "apply_spec_augment" and value is True:
                setattr(part, name, False)
                has_dropout = True
    return has_dropout


def _configs(config: Any) -> Iterator[Any]:
    """A config and the configs of its parts."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _configs(value)


def _plain(config: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(config).items() if not name.startswith("_")]


def _fewer_layers(configs: list[Any], layers: Mapping[int, int]) -> bool:
    has_changed = False
    for config in configs:
        for name, value in _plain(config):
            if type(value) is int and value in layers and COUNTS_LAYERS.search(name):
                setattr(config, name, layers[value])
                has_changed = True
            elif _DEPTHS.search(name) and isinstance(value, list | tuple) and max(value) > _LEAST_DEPTH:
                setattr(config, name, type(value)(min(depth, _LEAST_DEPTH) for depth in value))
                has_changed = True
    for config in configs:  # afterwards, since a setter may look at the number of layers
        for name, value in _plain(config):
            if isinstance(value, list | tuple) and len(value) in layers and re.search(r"layer|block|rope|type", name):
                setattr(config, name, value[: layers[len(value)]])
    return has_changed


def _ints(configs: list[Any], names: re.Pattern[str], but: re.Pattern[str] | None = None) -> list[int]:
    return [
        one
        for config in configs
        for name, value in _plain(config)
        if names.search(name) and not (but is not None and but.search(name))
        for one in (value if isinstance(value, list | tuple) else [value])
        if type(one) is int and one > 0
    ]


def _divide(configs: list[Any], names: re.Pattern[str], by: int, but: re.Pattern[str] | None = None) -> None:
    def divided(value: Any) -> Any:
        return value // by if type(value) is int and value > 0 else value

    for config in configs:
        for name, value in _plain(config):
            if names.search(name) and not (but is not None and but.search(name)):
                numbers = isinstance(value, list | tuple) and all(type(one) is int for one in value)
                if numbers or type(value) is int:
                    setattr(config, name, type(value)(map(divided, value)) if numbers else divided(value))


def _narrower(configs: list[Any], tp: int, said: list[str]) -> bool:
    """Divides heads by one number, sizes of heads by another, and all widths by their product."""
    heads, sizes = _ints(configs, _HEADS), _ints(configs, _HEAD_SIZES)
    widths = _ints(configs, _WIDTHS, _OTHER_SIZES)
    if not widths:
        return False
    implied = [
        width // count
        for config in configs
        if not _ints([config], _HEAD_SIZES)
        for width in _ints([config], re.compile(r"^(hidden_size|d_model|n_embd|dim)$"))
        for count in _ints([config], re.compile(r"^((num|n|encoder|decoder)_)?(attention_)?heads?$|^n_head$"))[:1]
        if width % count == 0
    ]

    def allowed(value: int, by: int, least: int) -> bool:
        smaller, rest = divmod(value, by)
        return not rest and smaller >= min(value, least) and (smaller % tp == 0) == (value % tp == 0)

    fewest = min(heads, default=1)
    best, divisors = 0, (1, 1)
    for by_heads in _divisors(math.gcd(*heads)):
        # The fewest are those of keys and values.
        if not all(allowed(n, by_heads, max(2, tp) if n == fewest and len(set(heads)) > 1 else 2 * tp) for n in heads):
            continue
        for by_size in _divisors(math.gcd(*sizes, *implied, *([] if sizes or implied else widths))):
            product = by_heads * by_size
            small = [size // by_size for size in (*sizes, *implied)]
            if any(size % 2 for size in small) or any(size < min(_LEAST_HEAD, 2 * max(small)) for size in small):
                continue
            if min(widths) // product < min(4 * tp, *widths) or max(widths) // product < _LEAST_WIDTH:
                continue
            if max(small, default=_HEAD) < _HEAD and by_size > 1:
                continue
            if product > best and all(allowed(width, product, tp) for width in widths):
                best, divisors = product, (by_heads, by_size)
    if best <= 1:
        return False
    main = next(iter(_ints(configs, re.compile(r"^(hidden_size|d_model|n_embd|dim)$"))), max(widths))
    said.append(
        f"width {main // best} of {main}" + (f", {heads[0] // divisors[0]} of {heads[0]} heads" if heads else "")
    )
    _divide(configs, _HEADS, divisors[0])
    _divide(configs, _HEAD_SIZES, divisors[1])
    _divide(configs, _WIDTHS, best, _OTHER_SIZES)
    for config in configs:
        for name, value in _plain(config):
            if isinstance(value, dict) and "rope" in name:
                _divide_frequencies(value, divisors[1], {size // 2 for size in (*sizes, *implied)})
    return True


def _divide_frequencies(parameters: dict[str, Any], by: int, halves: set[int]) -> None:
    """Rotary embeddings may have a list with a number for each pair of a head's channels, or one that adds up to it."""
    for name, value in parameters.items():
        if isinstance(value, dict):
            _divide_frequencies(value, by, halves)
        elif isinstance(value, list | tuple) and name.endswith("section"):
            parameters[name] = [one // by for one in value]
        elif isinstance(value, list | tuple) and len(value) in halves:
            parameters[name] = value[: len(value) // by]


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0] if number else [1]


def _smaller_vocabulary(configs: list[Any], tp: int, said: list[str]) -> Callable[[torch.Tensor], torch.Tensor] | None:
    sizes = set(_ints(configs, _VOCABULARIES))
    if len(sizes) != 1:
        return None
    (size,) = sizes
    special: set[int] = set()
    for config in configs:
        for name, value in _plain(config):
            if _TOKENS.search(name):
                tokens = value if isinstance(value, list | tuple) else [value]
                special.update(one for one in tokens if type(one) is int and 0 <= one < size)
    small = _VOCABULARY + size % tp
    high = sorted(token for token in special if token >= small - len(special))
    if small >= size or len(special) > _VOCABULARY // 2:
        return None
    moved = {token: small - len(high) + place for place, token in enumerate(high)}
    plain = [token for token in range(small - len(high)) if token not in special]
    table = torch.tensor(plain)[torch.arange(size) % len(plain)]
    for token in special:
        table[token] = moved.get(token, token)
    for config in configs:
        for name, value in _plain(config):
            if _VOCABULARIES.search(name) and type(value) is int:
                setattr(config, name, small)
            elif _TOKENS.search(name):
                numbers = isinstance(value, list)
                again = [moved.get(one, one) for one in (value if numbers else [value])]
                setattr(config, name, again if numbers else again[0])
    said.append(f"vocabulary {small} of {size}")

    def smaller(given: torch.Tensor) -> torch.Tensor:
        """Those below 0, which a loss ignores, stay."""
        return torch.where(given < 0, given, table[given.clamp(min=0)].to(given.dtype))

    return smaller


def _fewer_experts(configs: list[Any], said: list[str]) -> bool:
    has_changed = False
    for config in configs:
        each = max(_ints([config], _EXPERTS_OF_TOKEN), default=2)
        groups = max(_ints([config], _EXPERT_GROUPS), default=1)
        for name, value in _plain(config):
            if type(value) is int and _EXPERTS.search(name):
                fits = [n for n in _divisors(value) if n % groups == 0 and n >= max(2 * each, 2 * groups, 4)]
                if fits and fits[0] < value:
                    setattr(config, name, fits[0])
                    said.append(f"{fits[0]} of {value} experts")
                    has_changed = True
    return has_changed


class BlockList:
    """A list of a model's blocks.

    Attributes:
        name: of the list in the model.
        blocks: all of its blocks, by their names in the model, in order.
        groups: the names of blocks that are built alike, and whose parameters are trained or frozen alike.
    """

    def __init__(self, name: str, blocks: Mapping[str, nn.Module]) -> None:
        self.name = name
        self.blocks = dict(blocks)
        self.groups = list(_groups(blocks))

    def first_of_each(self, least: int) -> int:
        """How many of the first blocks have one of each group, `least` blocks at least if there are so many."""
        names = list(self.blocks)
        each = max(min(names.index(name) for name in group) + 1 for group in self.groups)
        return min(len(names), max(each, least))


def _groups(blocks: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    for alike in group_equal_blocks(blocks):
        trained: dict[Hashable, list[str]] = defaultdict(list)
        for name in alike:
            trained[tuple(parameter.requires_grad for parameter in blocks[name].parameters())].append(name)
        yield from trained.values()


def block_lists(model: nn.Module) -> list[BlockList]:
    """The lists that hold the blocks of `model`."""
    lists: dict[str, dict[str, nn.Module]] = defaultdict(dict)
    for name, block in find_blocks(model).items():
        lists[name.rpartition(".")[0]][name] = block
    return [BlockList(name, blocks) for name, blocks in lists.items()]


def blocks_needed(plan: Plan, blocks: int) -> int:
    """How many blocks a small model needs: `blocks`, and one for each stage of a pipeline and one more, so that the
    stages are not equal."""
    return blocks if plan.pp == 1 else max(blocks, plan.pp * plan.stages_per_rank + 1)


def kept_blocks(lists: list[BlockList], needed: int, blocks: int) -> frozenset[str]:
    """The names of the blocks to keep: the first `blocks` of each group, and more of the largest groups if these are
    fewer than `needed`."""
    groups = [group for each in lists for group in each.groups]
    counts = [min(blocks, len(group)) for group in groups]
    while sum(counts) < needed:
        growing = max(range(len(groups)), key=lambda i: len(groups[i]) - counts[i], default=None)
        if growing is None or counts[growing] == len(groups[growing]):
            break
        counts[growing] += 1
    return frozenset(name for group, count in zip(groups, counts, strict=True) for name in group[:count])


def leave_out_blocks(model: nn.Module, lists: list[BlockList], kept: frozenset[str], *, counts: bool) -> None:
    """Takes the blocks that are not `kept` out of `model`; those after them move up.

    Args:
        counts: whether attributes that hold the number of blocks get the new number, too.
    """
    changed: dict[int, int] = {}
    for each in lists:
        left = [name for name in each.blocks if name in kept]
        if len(left) == len(each.blocks):
            continue
        owner = model.get_submodule(each.name)
        wanted = {name.rpartition(".")[2] for name in left}
        own = {name.rpartition(".")[2] for name in each.blocks}
        members = [(key, child) for key, child in owner.named_children() if key in wanted or key not in own]
        if all(key.isdigit() for key, _ in members):
            members = [(str(place), child) for place, (_, child) in enumerate(members)]
        for key in list(dict(owner.named_children())):
            delattr(owner, key)
        for key, child in OrderedDict(members).items():
            owner.add_module(key, child)
        changed[len(each.blocks)] = max(len(left), changed.get(len(each.blocks), 0))
    if counts:
        for module in model.modules():
            if not type(module).__module__.startswith("torch."):
                _set_counts(vars(module), changed)
                config = vars(module).get("config")
                if hasattr(config, "__dict__"):
                    _set_counts(vars(config), changed)


def _set_counts(attributes: dict[str, Any], changed: Mapping[int, int]) -> None:
    for name, value in attributes.items():
        if type(value) is int and value in changed and COUNTS_LAYERS.search(name):
            attributes[name] = changed[value]


def unmatched_names(model: nn.Module, plan: Plan) -> list[str]:
    """The names and globs of modules in `plan` that no module of `model` has."""
    named = [*(plan.pp_split or []), *(plan.pp_units or []), *(plan.tp_plan or {})]
    if isinstance(plan.shard_units, list):
        named += plan.shard_units
    modules = [name for name, _ in model.named_modules()]
    modules += [name for name, _ in model.named_parameters()]  # a table may name parameters
    return [pattern for pattern in named if not any(fnmatchcase(name, pattern) for name in modules)]


def describe_kept(lists: list[BlockList], left: Mapping[str, int]) -> list[str]:
    """Sentences that say how many blocks of each list there are.

    Args:
        left: the number of blocks of each list, by its name.
    """
    sizes = Counter({each.name: len(each.blocks) for each in lists})
    fewer = {name: count for name, count in left.items() if count < sizes[name]}
    total = sum(sizes.values())
    if not fewer:
        return [f"all {total} blocks"] if total else []
    said = f"{sum(left.values())} of {total} blocks"
    if len(lists) > 1:
        said += " (" + ", ".join(f"{count} of {sizes[name]} in {name}" for name, count in left.items()) + ")"
    return [said]
