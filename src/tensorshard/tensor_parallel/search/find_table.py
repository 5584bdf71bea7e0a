"""The search for a tensor-parallel table of any model.

Blocks are searched one by one, for pairs of column and row (:mod:`.block_search`). The plans that Hugging Face
publishes with its models are taken as proposals, too. What is split outside of such pairs, in this order:

- Embeddings and output layers outside of the blocks.
- Layers in no pair: each is split alone, and its output is gathered. A pair communicates once and keeps what is between
  the two split. Some layers have no partner: the third convolution of a bottleneck, a shortcut, the layers of an
  attention that cannot be split by its heads. Their output features can still be computed on as many ranks.
- Parameters that nothing else splits: each rank keeps a slice, and they are gathered when their module is called. This
  splits memory (of the parameters, their gradients and the optimizer's states), but no computation, so it comes last.

The first two are right wherever the layer is called as a module. Only layers with their own forward are checked by
numbers.
"""

from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from tensorshard.comm.sharding import shard_sizes
from tensorshard.common.words import join_names
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.transformers_settings import GenerationCache
from tensorshard.tensor_parallel.apply.apply_table import split_shares
from tensorshard.tensor_parallel.search.block_search import BlockSearch, SplitRegion, search_block
from tensorshard.tensor_parallel.search.check_table import WrongTableError, check_around_run
from tensorshard.tensor_parallel.table.layer_kinds import SplittableLayer, as_splittable
from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.styles import (
    CLASSES,
    COLWISE,
    COLWISE_GATHER,
    ROWWISE,
    SUM_GRADIENTS,
    VOCAB,
    Divide,
    Gather,
    Replicate,
)
from tensorshard.tensor_parallel.table.table import (
    TensorTable,
    VerifiedTable,
    collapse,
    first_names,
    starred,
)
from tensorshard.tensor_parallel.verify.block_calls import BlockCall, Capture
from tensorshard.tensor_parallel.verify.block_checks import BlockChecks, KnownModules
from tensorshard.tensor_parallel.verify.model_check import OuterLayersCheck
from tensorshard.tensor_parallel.verify.model_run import ModelRun, find_units, run_once
from tensorshard.torch_private.modules import own_parameters

# If a table has more parts than this, those with the fewest weights are left out untried.
_MOST_TRIES = 12
# Tables that are much smaller than the largest (positions, segments) are not worth their communication.
_SHARE_OF_LARGEST = 0.5
# Nor are layers and parameters with a smaller share of the model's: the first convolutions of a network have few
# weights and large outputs. Equal ones in a list of blocks count together, except for convolutions.
_WORTHWHILE_SHARE = 0.01
Found = tuple[dict[str, Style], dict[str, str]]
"""The styles of layers by name, and why others stay whole."""
# The names of styles since transformers 4.56.
_STYLES: dict[str, Style] = {
    "colwise": COLWISE,
    "local_colwise": COLWISE,
    "rowwise": ROWWISE,
    "local_rowwise": ROWWISE,
    "rowwise_rep": ROWWISE,
    "rowwise_split_input": ROWWISE,
    "colwise_rep": COLWISE_GATHER,
    "colwise_gather_output": COLWISE_GATHER,
    "embedding_rowwise": VOCAB,
    "replicated_with_grad_allreduce": SUM_GRADIENTS,
    "replicate": Replicate(),
}
# Styles for mixtures of experts, and for activations alone. The search decides about what they name.
_NO_EQUIVALENT = frozenset([
    "all_reduce", "embedding_colwise", "ep_dispatch_experts", "ep_router", "free_full_weight", "gather",
    "grouped_gemm", "isolated_from_parallel", "local", "local_packed_rowwise", "local_params", "mla_kv_a_proj",
    "moe_identity_expert", "moe_tp_experts", "packed_colwise", "packed_rowwise", "sequence_parallel",
])  # fmt: skip


class NoTableError(ValueError):
    """Nothing of a model can be split. The message has a table to start from."""


def find_tensor_plan(
    model: nn.Module, size: int = 2, *, inputs: Any = None, sequence_parallel: bool = False
) -> VerifiedTable:
    """Finds a table that splits `model` over `size` ranks, and checks it by numbers.

    For each distinct block, layers that could be split together are proposed from the flow of the data. Each proposal
    is run on `size` simulated ranks, forward and backward, on random weights. The model itself is only run on fake
    tensors, and is left as it is. It may be on the meta device.

    Args:
        model: any module.
        size: number of tensor-parallel ranks.
        inputs: as for ``Engine.step``; their values do not matter. None to guess them from the model.
        sequence_parallel: whether to also find out how its blocks can compute on parts of a sequence.

    Raises:
        NoTableError: nothing can be split. The message names the reasons.
        WrongTableError: blocks that can be split one by one cannot be split together, and none of them alone.
        ValueError: the model does not run on `inputs`, or none were given and none could be guessed.
    """
    with GenerationCache(model).off():
        return _find(model, size, inputs, sequence_parallel)


def _find(model: nn.Module, size: int, inputs: Any, sequence_parallel: bool) -> VerifiedTable:
    units = find_units(model)
    run = run_once(model, list(units), inputs, size, sequences=sequence_parallel)
    checks = BlockChecks(units, run, size)
    published, unknown = published_table(model)
    whole = {name: "its block was not called" for name in units if name not in run.calls}
    searches, unexamined = _search_all(units, run, checks, published)
    whole.update({p: f"published as {s!r}, a style that is not known here" for p, s in unknown.items()})
    _drop_inconsistent(searches, run.calls)
    for name, reason in unexamined.items():  # its layers are treated like layers outside of blocks
        del units[name], run.calls[name], searches[name]
        whole[name] = reason
    styles: dict[str, Style] = {}
    first = first_names(model)  # a module that several blocks share is split once
    for name, search in searches.items():
        styles.update({first[join_names(name, key)]: style for key, style in search.styles().items()})
        whole.update({first[join_names(name, key)]: reason for key, reason in search.whole.items()})
    narrow = {first[join_names(name, layer)] for name, search in searches.items() for layer in search.narrow}
    ends = {join_names(name, layer) for name, search in searches.items() for layer in search.ends}
    single = OuterLayersCheck(model, run.inputs, size)
    outer, outer_whole = split_outer_layers(model, list(units), size, run.capture, styles, ends, single)
    styles.update(outer)
    unpaired, unpaired_whole = split_unpaired_layers(model, size, run.capture, {*styles, *narrow}, single)
    styles.update(unpaired)
    gathered = gather_parameters(model, size, run.capture, styles)
    styles.update(gathered)
    reasons_by_name = {**unpaired_whole, **outer_whole, **whole}
    unsplit = {
        name: why for name, why in reasons_by_name.items() if not styles.keys() & {name, join_names(name, "weight")}
    }
    reasons = {starred(name): reason for name, reason in unsplit.items()}
    alone = {starred(name): reasons_by_name[name] for name in unpaired if name in reasons_by_name}
    if not styles:
        listed = "\n".join(f"  {name}: {reason}" for name, reason in reasons.items())
        linear = [starred(n) for n, m in model.named_modules() if (s := as_splittable(m)) and s.has_rows]
        start = dict.fromkeys(dict.fromkeys(linear), "colwise or rowwise")
        raise NoTableError(
            f"nothing of this {type(model).__name__} can be split over {size} ranks:\n{listed}\n"
            f"you can also pass a table of your own, as Plan(tp_plan=...), starting from {start}"
        )

    def check(table: TensorTable) -> VerifiedTable:
        return check_around_run(model, table, run, checks, sequence_parallel=sequence_parallel)

    try:
        verified = check(collapse(styles, model))
    except WrongTableError as error:
        together = {name: starred(name) for name in (*unpaired, *gathered)} | _regions_of_names(searches)
        verified, left_out = _partial_table(model, styles, together, size, check, error)
        reasons |= {starred(name): reason for name, reason in left_out.items()}
        alone = {name: reason for name, reason in alone.items() if name not in reasons}
    return replace(verified, whole=reasons | verified.whole, alone=alone)


def _search_all(
    units: Mapping[str, nn.Module], run: ModelRun, checks: BlockChecks, published: TensorTable
) -> tuple[dict[str, BlockSearch], dict[str, str]]:
    """The search of each block, one for blocks that are alike; and why other blocks could not be searched."""
    known: dict[int, BlockSearch | str] = {}
    modules = KnownModules()
    searches: dict[str, BlockSearch] = {}
    unexamined: dict[str, str] = {}
    for name, call in run.calls.items():
        kind = run.kinds[name]
        if kind not in known:
            given = published.restricted_to(name, units[name])
            try:
                known[kind] = search_block(units[name], call, checks.of(name), given, modules)
            except Exception as error:  # sizes that are computed from a mask (ViLT): random inputs are no valid mask
                if not raised_by_model(error):
                    raise
                known[kind] = f"it does not run alone, on random numbers: {type(error).__name__}: {error}"
        search = known[kind]
        if isinstance(search, str):
            unexamined[name], search = search, BlockSearch()
        searches[name] = replace(search, split=list(search.split), whole=dict(search.whole), ends=list(search.ends))
    return searches, unexamined


def _regions_of_names(searches: Mapping[str, BlockSearch]) -> dict[str, str]:
    """For each name, what it is split together with: a region, of all blocks of a list."""
    return {
        join_names(unit, name): f"{starred(unit)}: {split.region}"
        for unit, search in searches.items()
        for split in search.split
        for name in split.proposal.styles
    }


def _drop_inconsistent(searches: Mapping[str, BlockSearch], calls: Mapping[str, BlockCall]) -> None:
    """Removes regions that pass something per head to another block split while the other expects it whole, or the
    reverse, until all agree."""
    while mistaken := _mistaken_regions(searches, calls):
        for search, split in mistaken:
            search.split.remove(split)
            reason = f"{split.region}: it shares something per head with another block that does not split it alike"
            search.whole.update(dict.fromkeys((*split.region.columns, *split.region.rows), reason))


def _mistaken_regions(
    searches: Mapping[str, BlockSearch], calls: Mapping[str, BlockCall]
) -> list[tuple[BlockSearch, SplitRegion]]:
    mistaken: dict[int, tuple[BlockSearch, SplitRegion]] = {}
    for name, search in searches.items():
        providers = calls[name].providers
        wanted = {index: dim for split in search.split for index, dim in split.proposal.sliced_inputs.items()}
        for split in search.split:
            for index, dim in split.proposal.sliced_inputs.items():
                given = _sharded_outputs(searches[providers[index][0]]) if index in providers else {}
                if index not in providers or given.get(providers[index][1]) != dim:
                    mistaken[id(split)] = (search, split)
        for index, (provider, output) in providers.items():
            if index not in wanted:
                for split in searches[provider].split:
                    if output in split.sharded_outputs:
                        mistaken[id(split)] = (searches[provider], split)
    return list(mistaken.values())


def _sharded_outputs(search: BlockSearch) -> dict[int, int]:
    return {index: dim for split in search.split for index, dim in split.sharded_outputs.items()}


# -- the part of a table that is right --


def _partial_table(
    model: nn.Module,
    styles: Mapping[str, Style],
    part_of: Mapping[str, str],
    size: int,
    check: Callable[[TensorTable], VerifiedTable],
    error: WrongTableError,
) -> tuple[VerifiedTable, dict[str, str]]:
    """The largest part of a table that passes a check, and why the rest of its entries stay whole.

    Blocks are checked one by one. The model around them may do what no block shows: one block reads another's weights,
    or a cache is filled once. Then parts of the table are tried together, the largest first.

    Args:
        styles: the table, which did not pass.
        part_of: for each name, the part that it belongs to, if it shares one. A part is kept or dropped as a whole.
        size: number of ranks.
        check: checks a table.
        error: what the check raised for `styles`.

    Raises:
        WrongTableError: no part passes. This is `error` itself.
    """
    parts: dict[str, dict[str, Style]] = {}
    for name, style in styles.items():
        parts.setdefault(part_of.get(name, name), {})[name] = style
    weights = {part: split_shares(model, collapse(table, model), size)[0] for part, table in parts.items()}
    taken: dict[str, Style] = {}
    verified: VerifiedTable | None = None
    left_out: dict[str, str] = {}
    for tries, part in enumerate(sorted(parts, key=lambda part: -weights[part])):
        reason = _reason(error)
        if tries < _MOST_TRIES and len(parts) > 1:
            try:
                verified = check(collapse({**taken, **parts[part]}, model))
                taken.update(parts[part])
                continue
            except WrongTableError as refused:
                reason = _reason(refused)
        left_out.update(dict.fromkeys(parts[part], f"the model around it does not compute the same: {reason}"))
    if verified is None:
        raise error
    return verified, left_out


def _reason(error: WrongTableError) -> str:
    return (str(error).partition("although its blocks do: ")[2] or str(error)).splitlines()[0]


def split_outer_layers(
    model: nn.Module,
    units: list[str],
    size: int,
    capture: Capture,
    inner: Mapping[str, Style],
    ends: Container[str],
    check: OuterLayersCheck,
) -> Found:
    """Splits embeddings, output layers and heads outside of `units`.

    Args:
        capture: what a run of the model showed of its parameters.
        inner: styles found so far, which are kept.
        ends: for a model without blocks, the linear layers whose output no other layer takes. Only these and the
            model's embeddings count as outside of what the search could split.
        check: compares layers that have their own forwards.
    """
    layers = {
        name: (module, layer)
        for name, module in model.named_modules()
        if (layer := as_splittable(module)) is not None
        and layer.kind != "convolution"
        and name not in inner
        and not any(name.startswith(f"{unit}.") for unit in units)
        and (units != [""] or layer.kind != "linear" or name in ends)
    }
    embeddings = [module.weight for module, _ in layers.values() if isinstance(module, nn.Embedding)]
    largest = max((weight.numel() for weight in embeddings), default=0)

    def worthless(module: nn.Module, layer: SplittableLayer) -> str | None:
        weight = own_parameters(module)["weight"] if layer.kind != "head" else None
        if layer.kind == "embedding" and weight is not None and weight.numel() < _SHARE_OF_LARGEST * largest:
            return "a small table"
        if layer.kind == "linear" and layer.outputs <= layer.inputs and not any(weight is w for w in embeddings):
            return "outside of the blocks, and not an output layer larger than its input"
        rows = layer.inputs if layer.kind == "embedding" else layer.outputs
        return f"{rows} rows cannot be split over {size} ranks" if 0 in shard_sizes(rows, size) else None

    names = {id(p): name for name, p in model.named_parameters()}
    styles: dict[str, Style] = {}
    whole: dict[str, str] = {}
    for name, (module, layer) in layers.items():
        style = {"embedding": VOCAB, "head": CLASSES}.get(layer.kind, COLWISE_GATHER)
        reason = _unusable(module, layer, names, capture) or worthless(module, layer) or check.refusal(name, style)
        if reason is None:
            styles[name] = style
        else:
            whole[name] = reason
    return styles, whole


def split_unpaired_layers(
    model: nn.Module, size: int, capture: Capture, taken: Container[str], check: OuterLayersCheck
) -> Found:
    """Splits convolutions and linear layers that are not `taken`.

    Args:
        capture: what a run of the model showed of its parameters.
        taken: the layers that are split so far, and those that are too narrow for it.
        check: compares layers that have their own forwards.
    """
    least = _WORTHWHILE_SHARE * sum(p.numel() for p in model.parameters())
    layers = {
        name: (module, layer)
        for name, module in model.named_modules()
        if name not in taken and (layer := as_splittable(module)) is not None and layer.has_rows
    }
    elements = {name: own_parameters(module)["weight"].numel() for name, (module, _) in layers.items()}
    in_lists: Counter[str] = Counter()
    for name, number in elements.items():
        in_lists[starred(name)] += number

    def worthless(name: str, layer: SplittableLayer) -> str | None:
        if (elements[name] if layer.kind == "convolution" else in_lists[starred(name)]) < least:
            return "too few weights to be worth gathering its output"
        outputs = layer.outputs
        return f"{outputs} outputs cannot be split over {size} ranks" if 0 in shard_sizes(outputs, size) else None

    names = {id(p): name for name, p in model.named_parameters()}
    styles: dict[str, Style] = {}
    whole: dict[str, str] = {}
    for name, (module, layer) in layers.items():
        reason = (
            _unusable(module, layer, names, capture) or worthless(name, layer) or check.refusal(name, COLWISE_GATHER)
        )
        if reason is None:
            styles[name] = COLWISE_GATHER
        else:
            whole[name] = reason
    return styles, whole


def _unusable(module: nn.Module, layer: SplittableLayer, names: Mapping[int, str], capture: Capture) -> str | None:
    """Why the run of the model forbids to split a layer; None if it does not. `names`: of parameters, by their ids."""
    own = {names[id(p)] for p in module.parameters()}
    if not own & capture.read and layer.kind != "head":
        return "the run on the sample inputs did not use it; give inputs (sample_inputs) that do"
    return "its parameters are read by other code than its own forward" if own & capture.used_outside else None


def gather_parameters(model: nn.Module, size: int, capture: Capture, taken: Mapping[str, Style]) -> dict[str, Style]:
    """Styles of the parameters of `model` that are still whole, and that each rank can keep a slice of.

    This is right if only the module that holds a parameter reads it, in its forward: a recurrent layer, a table of
    positions, or any other code. It is also right if one module around it does (attention that multiplies by its
    layers' weights itself: Swin, BEiT).

    Args:
        capture: what a run of the model showed: its ``readers`` say which modules read the parameters of others.
        taken: the styles so far.
    """
    readers, parameters = capture.readers, dict(model.named_parameters())
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    least = _WORTHWHILE_SHARE * sum(p.numel() for p in parameters.values())
    in_lists: Counter[str] = Counter()
    for name, parameter in parameters.items():
        in_lists[starred(name)] += parameter.numel()
    styles: dict[str, Style] = {}
    for name, parameter in parameters.items():
        owner = name.rpartition(".")[0]
        layer = as_splittable(model.get_submodule(owner))
        if name not in capture.read or name in taken or (owner in taken and not isinstance(taken[owner], Divide)):
            continue
        reader = readers.get(name, owner)
        called_as_layer = name not in readers and layer is not None and not layer.own_forward
        if names[id(parameter)] > 1 or (name in readers and not reader) or called_as_layer:
            continue
        if parameter.ndim < 2 or in_lists[starred(name)] < least:
            continue
        dim = max(range(parameter.ndim), key=lambda dim, shape=parameter.shape: shape[dim])  # type: ignore[misc]
        if 0 not in shard_sizes(parameter.shape[dim], size):
            styles[name] = Gather(dim, owner.count(".") - reader.count("."))
    return styles


def published_table(model: nn.Module) -> tuple[TensorTable, dict[str, str]]:
    """The table published with `model`, perhaps empty; and its entries whose style tensorshard does not know."""
    table: dict[str, str] = {}
    prefix = getattr(model, "base_model_prefix", "")
    within = f"{prefix}." if prefix and getattr(model, "base_model", model) is not model else ""
    published = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    table.update({within + pattern: style for pattern, style in (published or {}).items()})
    own = vars(type(model)).get("_tp_plan")
    if isinstance(own, Mapping):
        table.update(own)
    entries = {pattern: style for pattern, name in table.items() if (style := _STYLES.get(name)) is not None}
    unknown = {p: name for p, name in table.items() if name not in _STYLES and name not in _NO_EQUIVALENT}
    return TensorTable(entries), unknown
