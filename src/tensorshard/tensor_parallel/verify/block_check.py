"""Whether a block that is split by a table computes what the full block computes, by numbers, forward and backward.

The split block runs on as many simulated ranks as there will be, through the same code as in training, on random
weights. :mod:`.comparison` compares the results.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.model.copies import copy_module
from tensorshard.model.fake_copies import (
    compact_values,
    copy_with,
    gentle_values,
    is_large_matrix,
    pooled_values,
    random_values,
)
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.provenance import OperationCounter
from tensorshard.model.reachable_state import draws_on_host
from tensorshard.model.state_places import host_random_restored, host_random_states
from tensorshard.model.tensors import map_tensors, map_tensors_once, tensor_leaves
from tensorshard.tensor_parallel.apply.apply_table import apply_tensor_parallel, find_layouts
from tensorshard.tensor_parallel.apply.sequence_parallel import apply_sequence_parallel
from tensorshard.tensor_parallel.apply.tensor_split import shard_buffers
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable, is_convolution
from tensorshard.tensor_parallel.table.layer_styles import LayerStyle, Style
from tensorshard.tensor_parallel.table.layouts import Layout, SequenceSplit, local_shard, shard_view
from tensorshard.tensor_parallel.table.styles import Channels
from tensorshard.tensor_parallel.table.table import TensorTable
from tensorshard.tensor_parallel.verify.block_calls import BlockCall, InTraining, train_without_dropout
from tensorshard.tensor_parallel.verify.block_run import Expected, TrainingCheck, random_input, run_full, run_split
from tensorshard.tensor_parallel.verify.comparison import (
    Agreement,
    BlockRun,
    MismatchError,
    compare_gradients,
    compare_outputs,
    not_running,
)
from tensorshard.tensor_parallel.verify.layer_checks import computes_as_linear, computes_by_channel
from tensorshard.tensor_parallel.verify.simulated_ranks import run_as_ranks
from tensorshard.torch_private.tensors import tensor_version

# Gradients are compared for parameters of up to this many elements. Those of large matrices follow from activations'.
_LARGEST_GRADIENT = 1 << 18
# If weights have this many elements in all, they share their random numbers: 256 MB.
_LARGE = 1 << 26


@dataclass(frozen=True)
class _Split:
    styles: Mapping[str, Style]
    shared_inputs: Sequence[Sequence[str]]
    sequence: Mapping[str, SequenceSplit]


class BlockCheck:
    """One block with random weights and inputs, and what it computes on one device.

    Args:
        block: the block. Only its shapes, types and the values of its buffers are used.
        call: how it is called.
        size: number of ranks to split it over.
        own_inputs: whether the tensors of `call` are real and used as inputs; else inputs are random.
        dtype: of its weights, inputs and buffers.
        compact: whether large matrices take little memory, as :func:`tensorshard.model.fake_copies.compact_values`
            makes them. A few layers cannot compute with these.
        read_outside: names of its parameters that code outside of the block reads, which must stay whole.
        training: what it does in training, if that is known.
    """

    def __init__(
        self,
        block: nn.Module,
        call: BlockCall,
        size: int,
        *,
        own_inputs: bool = False,
        dtype: torch.dtype = torch.float32,
        compact: bool = False,
        read_outside: frozenset[str] = frozenset(),
        training: InTraining = InTraining(),  # noqa: B008
    ) -> None:
        self.size = size
        self._kept = own_inputs, dtype, compact
        self._read_outside = read_outside
        self.training = training
        self._frozen = {name for name, parameter in block.named_parameters() if not parameter.requires_grad}
        self._by_channel: dict[tuple[str, int], bool] = {}
        self._as_linear: dict[tuple[str, bool], bool] = {}
        for gentle in (False, True):
            self._prepare(block, call, gentle)
            self._expected = self._full_run()
            # Code may take roots and logarithms of parameters, and a deep network of large weights overflows.
            if self.expected.is_a_number:
                break

    def _prepare(self, block: nn.Module, call: BlockCall, gentle: bool) -> None:
        """Gives a copy of `block` its random weights, and `call` its random inputs."""
        own_inputs, dtype, compact = self._kept
        generator = torch.Generator().manual_seed(0)
        # Whether ranks take their columns of large matrices as views of the full ones, with longer rows. Copies would
        # take as much memory again. They are only made if an operation refuses such a view.
        self._views = False
        values = random_values(generator, {f"{name}.weight" for name, m in block.named_modules() if is_convolution(m)})
        if compact:
            values = compact_values(generator, values)
        elif sum(parameter.numel() for parameter in block.parameters()) >= _LARGE:
            values = pooled_values(generator, values, block)
            self._views = True
        if gentle:
            values = gentle_values(values)
        self._block = copy_with(block, values).to(dtype)
        self._block.eval()  # some modules return nothing in training
        for parameter in self._block.parameters():
            parameter.requires_grad_(parameter.is_floating_point() and parameter.numel() <= _LARGEST_GRADIENT)

        def input(leaf: torch.Tensor) -> torch.Tensor:
            value = leaf.detach() if own_inputs else random_input(leaf, generator, dtype)
            value = value.abs() if gentle and not own_inputs and value.is_floating_point() else value
            return value.requires_grad_(leaf.requires_grad)

        self._given = map_tensors_once(input, (call.args, call.kwargs))
        self._generator = generator
        self._tensors = [*self._block.parameters(), *self._block.buffers()]
        held = [value for module in self._block.modules() for value in vars(module).items()]
        self._configs = {
            id(value): value for key, value in held if key == "config" and not isinstance(value, nn.Module)
        }
        # Those that a forward may write. Copies share the others.
        self._written = {id(tensor) for tensor in self._tensors if tensor.numel() <= _LARGEST_GRADIENT}

    @property
    def expected(self) -> BlockRun:
        """What the block computes on one device, in evaluation."""
        return self._expected.run

    @property
    def cotangents(self) -> list[torch.Tensor]:
        """What its outputs were multiplied by before the backward."""
        return self._expected.cotangents

    @property
    def draws(self) -> bool:
        """Whether its run made random numbers on the host."""
        return self._draws

    def _full_run(self) -> Expected:
        """What the full block computes: in evaluation, or, if it does not run backward there, in training.

        A copy runs, since some modules keep values of a run (LeViT its biases), which split copies must not have.
        """
        try:
            return self._run_noting_writes()
        except Exception as error:  # reversible blocks keep what their backward needs in training alone
            if not raised_by_model(error):
                raise
            first = error
        train_without_dropout(self._block)
        try:
            return self._run_noting_writes()
        except Exception as error:
            if not raised_by_model(error):
                raise
            raise first from None

    def _run_noting_writes(self) -> Expected:
        copied = self.make_copy()
        before = host_random_states()
        with self._noting_writes(copied) as written, host_random_restored():
            expected = run_full(copied, self._given, self._generator)
            self._draws = host_random_states() != before and draws_on_host(copied)
        self._written = written
        return expected

    @contextmanager
    def _noting_writes(self, copied: nn.Module) -> Iterator[set[int]]:
        """Yields a set; at the end it has the ids of those of the block's tensors whose copies were written inside."""
        written: set[int] = set()
        copies = [*copied.parameters(), *copied.buffers()]
        versions = [tensor_version(tensor) for tensor in copies]
        yield written
        pairs = zip(self._tensors, copies, versions, strict=True)
        written.update(id(own) for own, copy, version in pairs if tensor_version(copy) != version)

    def make_copy(self) -> nn.Module:
        """A copy of the block, with its values, to change and run. Its configs are shared: they are only read."""
        return self._copy(self._written)

    def _copy_to_train(self) -> nn.Module:
        named = (*self._block.named_parameters(), *self._block.named_buffers())
        small = {id(tensor) for tensor in self._tensors if tensor.numel() <= _LARGEST_GRADIENT}
        copied = self._copy(small | {id(tensor) for name, tensor in named if name in self.training.written})
        train_without_dropout(copied)
        for name, parameter in copied.named_parameters():  # code may write into those that are not trained
            parameter.requires_grad_(parameter.requires_grad and name not in self._frozen)
        return copied

    def _copy(self, written: Container[int]) -> nn.Module:
        """A copy with memory of its own for the tensors whose ids are among `written`."""
        made: dict[int, Any] = dict(self._configs)
        for tensor in self._tensors:
            own = tensor.detach().clone() if id(tensor) in written else tensor.detach()
            made[id(tensor)] = nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
        return copy_module(self._block, made)

    def make_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of its arguments, which a run may write into."""
        args, kwargs = map_tensors_once(lambda leaf: leaf.clone(), self._given)
        return args, kwargs

    @property
    def num_elements(self) -> int:
        """The number of elements of its parameters."""
        return sum(parameter.numel() for parameter in self._block.parameters())

    @property
    def is_compact(self) -> bool:
        """Whether any of its matrices takes less memory than its elements would."""
        return any(not parameter.is_contiguous() for parameter in self._block.parameters())

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors among the block's inputs, in order."""
        return tensor_leaves(self._given)

    def computes_like(self, other: "BlockCheck") -> bool:
        """Whether its block, given the inputs of `other`, returns the same as `other`'s block, bit by bit.

        The two have the same weights if names and shapes are the same.
        """
        args, kwargs = other.make_inputs()
        try:
            outputs = tensor_leaves(self.make_copy()(*args, **kwargs))
        except Exception as error:  # any error of the model on another block's inputs
            if not raised_by_model(error):
                raise
            return False
        expected = other.expected.outputs
        return len(outputs) == len(expected) and all(map(torch.equal, outputs, expected))

    def check(
        self,
        styles: Mapping[str, Style],
        sliced_inputs: Mapping[int, int] | None = None,
        shared_inputs: Iterable[Sequence[str]] = (),
        sequence: Mapping[str, SequenceSplit] | None = None,
    ) -> Agreement:
        """Compares the block, split as `styles` say, with the full block.

        Args:
            styles: of modules and parameters of the block, by their names in it.
            sliced_inputs: tensor inputs of which each rank gets only its shard, each with its dimension.
            shared_inputs: as for :func:`apply_tensor_parallel`.
            sequence: as for :func:`apply_sequence_parallel`; "" is the block itself.

        Raises:
            MismatchError: they differ, or the split block does not run. The message says what was seen. Errors of the
                run count if :func:`tensorshard.model.model_errors.raised_by_model` says so; others are raised.
        """
        sliced = {index: Layout(dim, (self.inputs[index].shape[dim],)) for index, dim in (sliced_inputs or {}).items()}
        split, counter = _Split(styles, list(shared_inputs), sequence or {}), OperationCounter()
        if self._expected.statistics.attends_to_one and not all(style.always_right for style in styles.values()):
            raise MismatchError(
                "its attention has a single key on these inputs, which gets all weight whatever is split, so that "
                "nothing can be compared; give larger sample_inputs"
            )
        try:
            layouts, runs = self._split_runs_of_views(split, sliced, counter)
            agreement = compare_outputs(runs, self.expected)
            compare_gradients(runs, self.expected, layouts, sliced)
            if self._in_training is not None:
                self._in_training.check(
                    self.size,
                    lambda copied, group: self._split(copied, group, split, layouts, sliced),
                    layouts,
                    sliced,
                )
        except MismatchError as error:
            error.operations = counter.operations
            raise
        return agreement

    def _split_runs_of_views(
        self, split: _Split, sliced: Mapping[int, Layout], counter: OperationCounter
    ) -> tuple[dict[str, Layout], list[BlockRun]]:
        """As :meth:`_split_runs`. If an operation refuses views with longer rows, copies are made from then on."""
        try:
            return self._split_runs(split, sliced, counter)
        except MismatchError as error:
            if not (self._views and error.in_operation) or error.of_sizes:
                raise
            refused = str(error)
        self._views = False
        try:
            return self._split_runs(split, sliced, counter)
        except MismatchError as error:
            self._views = str(error) == refused  # then it was not because of the views
            raise

    def _split_runs(
        self, split: _Split, sliced: Mapping[int, Layout], counter: OperationCounter
    ) -> tuple[dict[str, Layout], list[BlockRun]]:
        """The layouts of the parameters, and what each rank computed."""
        try:
            layouts = find_layouts(self._block, split.styles, self.size)
            self._check_whole(layouts)
            if self._draws:
                raise MismatchError(
                    "it draws from Python's or numpy's global random numbers in evaluation, so that no two runs of it "
                    "can be compared; draw from torch's"
                )
            self._check_channels(split.styles)
            self._check_own_forwards(split.styles)
            runs = run_as_ranks(self.size, lambda group: self._split_run(group, split, layouts, sliced, counter))
        except MismatchError:
            raise
        except Exception as error:  # any error of a model's forward on shards that do not fit
            if not raised_by_model(error):
                raise
            raise not_running(error) from error
        return layouts, runs

    def relates_positions(self, index: int, dim: int) -> bool:
        """Whether the block's output at one position depends on other positions of its input `index`, along `dim`."""
        length = self.inputs[index].shape[dim]
        early = torch.arange(length // 2)
        given = map_tensors_once(lambda leaf: leaf.detach().clone(), self._given)
        tensor_leaves(given)[index].narrow(dim, length // 2, length - length // 2).neg_()
        args, kwargs = given
        with torch.no_grad():
            outputs = tensor_leaves(self.make_copy()(*args, **kwargs))
        pairs = zip(outputs, self.expected.outputs, strict=True)
        return any(
            one.ndim <= dim
            or one.shape[dim] != length
            or not torch.equal(one.index_select(dim, early), other.index_select(dim, early))
            for one, other in pairs
        )

    def _check_whole(self, layouts: Mapping[str, Layout]) -> None:
        """Refuses a split of parameters that each rank needs whole."""
        parameters = {name for name, _ in self._block.named_parameters()}
        written: set[str] = set()
        if self._in_training is None or not self._in_training.compares:
            written |= self.training.written & parameters
        for names, why in (
            (written, "the forward writes {} in place"),
            (self._read_outside, "code outside of the block reads {}"),
        ):
            for name in sorted(names):
                if name in layouts and layouts[name].dim is not None:
                    raise MismatchError(f"{why.format(name)}, so each rank needs it whole")

    @cached_property
    def _in_training(self) -> TrainingCheck | None:
        """What the full block computes in training; None if that is what it computes in evaluation."""
        if not self.training.differs:
            return None
        return TrainingCheck(self._copy_to_train, self._given, self._generator, self.training.written)

    def _check_channels(self, styles: Mapping[str, Style]) -> None:
        for name, style in styles.items():
            if isinstance(style, Channels):
                key = name, style.parts
                if key not in self._by_channel:
                    module = self._block.get_submodule(name)
                    self._by_channel[key] = computes_by_channel(module, self.size, style.parts)
                if not self._by_channel[key]:
                    raise MismatchError(f"{name} does not compute channel by channel in training")

    def _check_own_forwards(self, styles: Mapping[str, Style]) -> None:
        for name, style in styles.items():
            if not isinstance(style, LayerStyle):
                continue
            module = self._block.get_submodule(name)
            layer = as_splittable(module)
            if layer is None or layer.kind != "linear" or not layer.own_forward:
                continue
            key = name, style.splits_inputs
            if key not in self._as_linear:
                self._as_linear[key] = computes_as_linear(module, key[1], self.size)
            if not self._as_linear[key]:
                raise MismatchError(f"{name} has a forward of its own, which on a shard of its weight computes another")

    def _split_run(
        self,
        group: dist.ProcessGroup,
        split: _Split,
        layouts: Mapping[str, Layout],
        sliced: Mapping[int, Layout],
        counter: OperationCounter,
    ) -> BlockRun:
        split_block = self.make_copy()
        given = self._split(split_block, group, split, layouts, sliced)
        return run_split(split_block, given, group, self._expected, counter if group.rank() == 0 else None)

    def _split(
        self,
        copied: nn.Module,
        group: dist.ProcessGroup,
        split: _Split,
        layouts: Mapping[str, Layout],
        sliced: Mapping[int, Layout],
    ) -> Any:
        """Makes `copied`, a full copy of the block, a rank's part of it; returns the arguments of that rank."""
        rank, size = group.rank(), group.size()
        apply_tensor_parallel(copied, TensorTable(dict(split.styles)), group, shared_inputs=split.shared_inputs)
        apply_sequence_parallel(copied, split.sequence, group, shared_inputs=split.shared_inputs)
        with torch.no_grad():
            for name, parameter in copied.named_parameters():
                parameter.data = shard_view(
                    parameter.data, layouts[name], rank, size, apart=self._views and is_large_matrix(parameter)
                )
            shard_buffers(copied, layouts, rank, size)
        indices = count()

        def own(leaf: torch.Tensor) -> torch.Tensor:
            index = next(indices)
            if index not in sliced:
                return leaf
            return local_shard(leaf.detach(), sliced[index], rank, size).requires_grad_(leaf.requires_grad)

        return map_tensors(own, self._given)
