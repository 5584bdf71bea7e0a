"""Runs one of several equal blocks alone and records what it does. Calls of the others are replayed from the record.

A call is replayed if its block is made like the recorded one (:mod:`.block_structure`), gets arguments of the same
shapes in the same modes, and has equal values in all plain attributes that were read. Everything around blocks runs as
usual: gathering, reduction, pipelines, and the hooks of blocks and parameters. A block runs in full if it does
something that a record cannot hold: it keeps a tensor, changes an attribute, or takes or returns other objects.
"""

import logging
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from tensorshard.model.forwards import Forward, Role, roles_of, wrap_forward
from tensorshard.predict.block_record import Backward, Owner, Pattern, Record, given
from tensorshard.predict.block_replay import Replay
from tensorshard.predict.block_structure import SIMPLE, describe_structure, values_of
from tensorshard.predict.block_trial import Trial, block_parameters, is_plain
from tensorshard.predict.operation_ledger import OperationLedger
from tensorshard.predict.storage_ledger import StorageLedger
from tensorshard.torch_private.autograd import are_saved_tensors_hooked
from tensorshard.torch_private.pytree import spec_as_tuples, tree_flatten

logger = logging.getLogger("tensorshard.predict")

_TRIALS = 2  # of a call that cannot be replayed: the first one may have failed only because it filled a cache


@dataclass
class _Kind:
    """Blocks of the same structure, and what is known of their calls."""

    records: list[Record] = field(default_factory=list)
    refused: list[tuple[Hashable, int]] = field(default_factory=list)


class ComposedBlocks:
    """The blocks of one rank's model under two ledgers.

    Attributes:
        run, told: how many calls were run, trials included, and how many were replayed from a record.
        refusals: why blocks could not be replayed, by the name of their class.
    """

    def __init__(self, storages: StorageLedger, operations: OperationLedger) -> None:
        self._storages, self._operations = storages, operations
        self._kinds: dict[Hashable, _Kind] = {}
        self._structures: dict[int, Hashable] = {}
        self._kept: list[Any] = []
        self.run = self.told = 0
        self.refusals: dict[str, str] = {}

    def compose(self, blocks: Iterable[nn.Module]) -> None:
        """From now on, calls of `blocks` are replayed if possible."""
        for block in blocks:
            if any(Role.PIPELINE_STAGE in roles_of(module) for module in block.modules() if module is not block):
                continue  # only a part of this block is in a pipeline stage
            wrap_forward(block, Role.COMPOSED, partial(self._call, block))

    def _call(self, block: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if (
            are_saved_tensors_hooked()
            or not all(map(is_plain, tensors))
            or not all(isinstance(leaf, (*SIMPLE, torch.Tensor)) for leaf in leaves)
        ):
            self.run += 1
            self.refusals.setdefault(type(block).__name__, "its arguments are not plain tensors")
            return forward(*args, **kwargs)
        metas = given(tensors)
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        phase = self._storages.phase()
        key = (
            tuple((type(leaf), None if isinstance(leaf, torch.Tensor) else leaf) for leaf in leaves),
            spec_as_tuples(spec),
            tuple(metas),
            torch.is_grad_enabled(),
            autocast,
            phase,
        )
        kind = self._kinds.setdefault(self._structure(block), _Kind())
        described = iter(metas)
        shapes = [next(described) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        trial = partial(Trial, self._storages, self._operations, block, forward, shapes, spec, autocast)
        record = self._known(kind, key, block) or self._tried(kind, key, block, trial, phase)
        if record is None:
            self.run += 1
            return forward(*args, **kwargs)
        self.told += 1
        replay = Replay(
            record, self._storages, self._operations, tensors, metas, partial(_other_backward, record, trial, phase)
        )
        inputs = [tensor for tensor in tensors if tensor.requires_grad]
        return replay.run(inputs, block_parameters(block))

    def _structure(self, block: nn.Module) -> Hashable:
        if id(block) not in self._structures:
            self._structures[id(block)] = describe_structure(block, self._kept, self)
        return self._structures[id(block)]

    def _known(self, kind: _Kind, key: Hashable, block: nn.Module) -> Record | None:
        for record in kind.records:
            if record.key == key and values_of(block, record.reads) == record.reads:
                return record
        return None

    def _tried(self, kind: _Kind, key: Hashable, block: nn.Module, trial: Any, phase: str) -> Record | None:
        refused = next((place for place, (other, _) in enumerate(kind.refused) if other == key), None)
        if refused is not None and kind.refused[refused][1] >= _TRIALS:
            return None
        self.run += 1
        try:
            record: Record = trial().run(key, phase)
        except Exception as error:  # the model's code may raise anything when a block runs alone; then it runs in full
            reason = f"{type(error).__name__}: {error}"
            self.refusals[type(block).__name__] = reason
            logger.debug("calls of %s are run one by one: %s", type(block).__name__, reason)
            if refused is None:
                kind.refused.append((key, 1))
            else:
                kind.refused[refused] = (key, kind.refused[refused][1] + 1)
            return None
        kind.records.append(record)
        return record


def _other_backward(record: Record, trial: Any, phase: str, pattern: Pattern) -> Backward | None:
    """What a backward from other gradients does; None if a trial cannot find it out."""
    try:
        with torch.enable_grad():  # it is called in a backward
            found: Record = trial().run(record.key, phase, pattern)
    except Exception as error:
        logger.debug("a backward is told as if its gradients were dense: %s", error)
        return None
    other = found.backwards.get(pattern)
    # Forward has run as the record says, and keeps tensors for those storages that are handed on.
    made = {step.number for step in record.forward_steps if step.owner is Owner.CALL}
    alike = [step[:3] for step in found.forward_steps] == [step[:3] for step in record.forward_steps]
    return other if alike and made & found.handed_on.keys() == made & record.handed_on.keys() else None
