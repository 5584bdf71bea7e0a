"""The search for sequence parallelism: which of a split model's blocks can compute on parts of a sequence, and how.

As for the table, ways are proposed from the flow of the data. A way is right if the block computes the same numbers on
simulated ranks as on one device, forward and backward.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import nn

from tensorshard.common.dotted_names import is_inside, join_names
from tensorshard.model.tensors import tensor_leaves
from tensorshard.tensor_parallel.search.sequence_flow import StreamFlow, follow_stream, leaves_as_long
from tensorshard.tensor_parallel.table.layer_kinds import is_multihead_attention
from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.layouts import SequenceSplit
from tensorshard.tensor_parallel.table.table import starred
from tensorshard.tensor_parallel.verify.block_calls import BlockCall, Capture, capture_calls
from tensorshard.tensor_parallel.verify.block_checks import BlockChecks, styles_inside
from tensorshard.tensor_parallel.verify.block_kinds import block_kinds
from tensorshard.tensor_parallel.verify.comparison import MismatchError
from tensorshard.tensor_parallel.verify.model_run import ModelRun, find_units
from tensorshard.torch_private.modules import NormBase

_MOST_TRIES = 32


class NoSequenceParallelError(ValueError):
    """No block of a model can compute on parts of a sequence."""


@dataclass(frozen=True)
class SplitBlocks:
    """What is known of a model's blocks from the search for its table.

    Args:
        styles: of everything in the model.
        shared_inputs: names of column layers that read the same tensor.
        sliced_inputs: for each block that gets something split by another (a bias per head, say), the indices of these
            tensor inputs, each with its dimension.
    """

    styles: Mapping[str, Style]
    shared_inputs: Sequence[Sequence[str]]
    sliced_inputs: Mapping[str, Mapping[int, int]]


def find_sequence_splits(
    model: nn.Module, blocks: SplitBlocks, run: ModelRun, checks: BlockChecks
) -> tuple[dict[str, SequenceSplit], dict[str, str]]:
    """How the blocks of `model`, which is split already, can compute on parts of a sequence.

    Args:
        run: how the model calls its blocks.
        checks: the checks of its blocks, for a number of ranks.

    Returns:
        The split of each block that can, by name, and why others cannot.

    Raises:
        NoSequenceParallelError: no block can. The message names the reasons.
    """
    units, run, checks = _sequence_units(model, blocks.styles, run, checks)
    known: dict[object, SequenceSplit | str] = {}
    splits: dict[str, SequenceSplit] = {}
    refused: dict[str, str] = {}
    for name, call in run.calls.items():
        inside = styles_inside(name, blocks.styles)
        sliced = blocks.sliced_inputs.get(name, {})
        key = (run.kinds[name], tuple(inside.items()), tuple(sliced.items()))
        if key not in known:
            prefix = f"{name}." if name else ""
            shared = [tuple(n.removeprefix(prefix) for n in s) for s in blocks.shared_inputs if s[0].startswith(prefix)]
            known[key] = _search_block(name, units[name], call, inside, sliced, checks, shared)
        outcome = known[key]
        if isinstance(outcome, SequenceSplit):
            splits[name] = outcome
        else:
            refused[name] = outcome
    reasons = {starred(name): reason for name, reason in refused.items()}
    if not splits:
        why = "\n".join(f"  {name or type(model).__name__}: {reason}" for name, reason in reasons.items())
        why = why or "  none of its blocks runs alone, on random numbers"
        raise NoSequenceParallelError(
            f"sequence_parallel=True: no block of this {type(model).__name__} can be split along a sequence:\n{why}\n"
            f"set sequence_parallel=False"
        )
    # Guessed floating-point inputs may be features without positions. Token ids and images cannot.
    features = run.guessed and all(t.is_floating_point() and t.ndim < 4 for t in tensor_leaves(run.inputs))
    if features and not any(checks.of(n).relates_positions(s.input, s.dim) for n, s in splits.items()):
        raise NoSequenceParallelError(
            f"sequence_parallel=True: nothing of this {type(model).__name__} relates positions of a sequence to each "
            f"other, and it may be meant for [samples, features]; give parallelize(sample_inputs=...) sequences, or "
            f"set sequence_parallel=False"
        )
    return link_splits(splits, run.capture), reasons


def _sequence_units(
    model: nn.Module, styles: Mapping[str, Style], run: ModelRun, checks: BlockChecks
) -> tuple[dict[str, nn.Module], ModelRun, BlockChecks]:
    """What may compute on parts of a sequence, how it is called, and its checks: mostly the blocks of the table's
    search.

    If that search took the model as one, these are the innermost members of lists that have several split layers. A
    list may have a single member that is called again and again (ALBERT's layer is).
    """
    units = find_units(model)
    if "" not in units:
        return units, run, checks
    members = {
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        for key, _ in module.named_children()
    }
    several = [name for name in members if sum(key.startswith(f"{name}.") for key in styles) > 1]
    names = sorted(name for name in several if not any(other.startswith(f"{name}.") for other in several))
    inner = {name: model.get_submodule(name) for name in names}
    capture = capture_calls(model, names, run.inputs)
    if not capture.calls:
        return units, run, checks
    inside = ModelRun(capture, run.inputs, block_kinds(inner, capture.calls), guessed=run.guessed)
    return inner, inside, BlockChecks(inner, inside, checks.size)


def link_splits(splits: Mapping[str, SequenceSplit], capture: Capture) -> dict[str, SequenceSplit]:
    """`splits`, linked: a block's output stays split if the next block takes it as it is."""
    whole = {name for name, split in splits.items() if any((name, i) in capture.read_outside for i in split.outputs)}
    whole |= capture.repeated & set(splits)
    for name, call in capture.calls.items():
        for index, (provider, output) in call.providers.items():
            if provider not in splits or output not in splits[provider].outputs:
                continue
            takes = name in splits and splits[name].input == index and splits[name].dim == splits[provider].dim
            if not takes or name in capture.repeated:
                whole.add(provider)
    linked = {}
    for name, split in splits.items():
        provider, output = capture.calls[name].providers.get(split.input, ("", -1))
        handed = provider in splits and output in splits[provider].outputs and provider not in whole
        linked[name] = split.linked(scatters=not handed, gathers=name in whole)
    return linked


def _search_block(
    name: str,
    block: nn.Module,
    call: BlockCall,
    styles: dict[str, Style],
    sliced_inputs: Mapping[int, int],
    checks: BlockChecks,
    shared_inputs: Sequence[Sequence[str]],
) -> SequenceSplit | str:
    check = checks.of(name)
    reason = "none of its inputs looks like a sequence"
    tries = 0
    candidates = list(_candidates(block, check.inputs, checks.size))
    for index, dim in candidates:
        length = check.inputs[index].shape[dim]
        flow = follow_stream(block, call, styles, index)
        if not flow.outputs_of(dim, length):
            continue
        for split in _ways(block, styles, flow, index, dim, check.inputs[index].shape):
            if _normalizes_parts(block, flow, split):
                if tries == 0:
                    reason = "a batch or instance normalization in it takes statistics over positions"
                continue
            tries += 1
            if tries > _MOST_TRIES:
                return reason
            try:
                check.check(
                    styles, sliced_inputs, shared_inputs, sequence={"": split.linked(scatters=True, gathers=True)}
                )
            except MismatchError as error:
                if (index, dim) == candidates[0]:
                    reason = f"split along dimension {dim}, {error}"
                continue
            return split
    return reason


def _candidates(block: nn.Module, inputs: Sequence[torch.Tensor], size: int) -> Iterator[tuple[int, int]]:
    """Inputs that may be a stream of positions with features, each with the dimension of the positions.

    Splitting samples instead of positions is right too, but there may be fewer samples than ranks.
    """
    samples_second = any(is_multihead_attention(m) and not m.batch_first for m in block.modules())
    for index, tensor in sorted(enumerate(inputs), key=lambda entry: not entry[1].requires_grad):
        if tensor.is_floating_point() and tensor.ndim >= 3:
            dims = range(tensor.ndim - 1)
            for dim in dims if samples_second else (*dims[1:], 0):
                if tensor.shape[dim] >= size:
                    yield index, dim


def _ways(
    block: nn.Module, styles: Mapping[str, Style], flow: StreamFlow, index: int, dim: int, shape: torch.Size
) -> Iterator[SequenceSplit]:
    """Where to gather the sequence, the most likely way first.

    First come the ways of :func:`_plain_ways`. In the next ones, code in the block asks for the length of its part
    although layers of the block have gathered all of it, or modules around column layers get more than the sequence.
    """
    plain = list(_plain_ways(block, styles, flow, index, dim, shape))
    yield from plain
    yield from (replace(way, reshapes=True) for way in plain if way.columns and not way.modules and not way.whole)
    for way in plain:
        copied = {owner: flow.beside[owner] for owner in way.modules if flow.beside.get(owner)}
        if copied:
            yield replace(way, copied=copied)


def _plain_ways(
    block: nn.Module, styles: Mapping[str, Style], flow: StreamFlow, index: int, dim: int, shape: torch.Size
) -> Iterator[SequenceSplit]:
    """Where to gather the sequence: in each column layer, or in the module around several.

    At first all layers that are not split run on parts of the sequence. Then the modules around these run on the whole
    of it. Last, split ``nn.MultiheadAttention`` modules, or all that is not split, run on the whole of it too.
    """
    length = shape[dim]
    unsplit = list(_owners(flow, flow.unsplit))
    with_attentions = list(_owners(flow, [*flow.unsplit, *(join_names(name, "out_proj") for name in flow.attentions)]))
    for around in _distinct([], unsplit, with_attentions, [*dict.fromkeys([*unsplit, *_unsplit_parts(block, styles)])]):
        whole = {}
        for owner in around:
            ends = (
                leaves_as_long(flow.entries.get(owner, {}), dim, length),
                leaves_as_long(flow.exits.get(owner, {}), dim, length),
            )
            if all(ends) and owner and not is_inside(owner, [o for o in around if o not in ("", owner)]):
                whole[owner] = ends
        if (around or not (flow.columns or flow.attentions)) and not whole:
            continue
        attentions = {
            name: leaves_as_long(shapes, dim, length)
            for name, shapes in flow.attentions.items()
            if not is_inside(name, whole)
        }
        if not all(attentions.values()):
            continue
        owners = {o: names for o, names in _owners(flow, flow.columns).items() if not is_inside(o, whole)}
        choices = []
        for owner in owners:
            leaves = leaves_as_long(flow.entries.get(owner, {}), dim, length)
            direct = tuple(leaf for leaf in leaves if leaf in flow.direct.get(owner, {}))
            choices.append(list(dict.fromkeys([(), direct, leaves])) if owner else [()])
        ways = sorted(product(*choices), key=lambda way: sum(bool(leaves) for leaves in way))
        ways.sort(key=lambda way: len({bool(leaves) for leaves in way}) > 1)  # ways that treat all alike come first
        for way in ways:
            gathered = dict(zip(owners, way, strict=True))
            yield SequenceSplit(
                len(shape),
                dim,
                index,
                flow.outputs_of(dim, length),
                {name: not gathered[owner] for owner, names in owners.items() for name in names},
                {owner: leaves for owner, leaves in gathered.items() if leaves},
                whole,
                tuple(name for name in flow.rows if not is_inside(name, whole)),
                tuple(name for name in flow.partial if not is_inside(name, whole)),
                attentions=attentions,
            )


def _distinct(*lists: Sequence[str]) -> list[Sequence[str]]:
    return [names for index, names in enumerate(lists) if names not in lists[:index]]


def _owners(flow: StreamFlow, layers: Sequence[str]) -> dict[str, list[str]]:
    """Layers, grouped by the module that they are in. A layer with its low-rank pairs counts as one."""
    owners: dict[str, list[str]] = {}
    for name in layers:
        owners.setdefault(flow.low_rank.owner_of(name), []).append(name)
    return owners


def _unsplit_parts(block: nn.Module, styles: Mapping[str, Style]) -> list[str]:
    """Parts of `block` in which nothing is split, and whose own code may mix positions."""
    return [
        name
        for name, part in block.named_children()
        if (any(True for _ in part.children()) or any(p.ndim > 1 for p in part.parameters()))
        and not any(is_inside(key, [name]) for key in styles)
    ]


def _normalizes_parts(block: nn.Module, flow: StreamFlow, way: SequenceSplit) -> bool:
    """Whether statistics over positions would be computed on a part in training, which the check by numbers misses."""
    return any(
        isinstance(module, NormBase) and flow.entries.get(name) and not is_inside(name, way.whole)
        for name, module in block.named_modules()
    )
