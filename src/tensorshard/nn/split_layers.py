"""Layers whose weights are split over a group, a mark for activations between them, and their conversion in a model."""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.groups import Group, resolve_mesh
from tensorshard.comm.marks import register_parallel_dim
from tensorshard.common.words import kind_of
from tensorshard.distributed.ddp import register_ddp_parameters_to_ignore
from tensorshard.layers.arguments import check_dim, check_sizes
from tensorshard.layers.parallel_module import ParallelModule
from tensorshard.layers.split_embedding import parallel_embedding, split_embedding
from tensorshard.layers.split_linear import parallel_linear, split_linear
from tensorshard.torch_private.modules import own_parameters

Marked = TypeVar("Marked", torch.Tensor, tuple, list)


class ParallelLinear(ParallelModule):
    """``nn.Linear`` with its weight split over a group.

    | `dim` | what is split | input | output |
    |---|---|---|---|
    | None | nothing | full | full |
    | 0 | input features (a row layer) | full, or this rank's shard | full |
    | 1 or -1 | output features (a column layer) | full | this rank's shard |

    Shards of inputs and outputs are cut along the last dimension. A column layer marks its output as a shard, for the
    layer or loss that takes it next. The sizes need not be multiples of the number of ranks.

    Initial weights are those that ``nn.Linear`` gets from the same random seed. All ranks of the group need the same
    seed. Each holds the full weight while the layer is built.

    Args:
        in_features, out_features: of the full layer.
        bias: whether the layer has one. It is split with `dim` 1. With `dim` 0 every rank holds all of it, and adds it
            to the sum over the ranks.
        dim: what is split, as in the table.
        group: a process group or a one-dimensional mesh; by default the model-parallel group.
        device, dtype: as in ``nn.Linear``. Split parameters live on the device type of the group.

    Attributes:
        weight: this rank's shard of [out_features, in_features], marked as a shard; all of it with ``dim=None``.
        bias: [out_features] or None. With `dim` 1 this rank's shard of it.

    Raises:
        TypeError: a size is not an integer.
        ValueError: `dim` is none of these, or a size is negative.
        RuntimeError: there is no model-parallel group, and none was given.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> column, row = ts.nn.ParallelLinear(16, 64, dim=1), ts.nn.ParallelLinear(64, 16, dim=0)
        >>> column.weight.shape, row.weight.shape
        (torch.Size([32, 16]), torch.Size([16, 32]))
        >>> hidden = column(torch.randn(8, 16))
        >>> hidden.shape, row(hidden).shape
        (torch.Size([8, 32]), torch.Size([8, 16]))
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dim: int | None = None,
        group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_dim(dim, "ParallelLinear")
        check_sizes(in_features=in_features, out_features=out_features)
        super().__init__(dim, group)
        self.in_features = in_features
        self.out_features = out_features
        self._adopt(nn.Linear(in_features, out_features, bias, device, dtype))

    @classmethod
    def from_linear(cls, linear: Any, dim: int | None = None, group: Group | None = None) -> "ParallelLinear":
        """Makes a parallel layer with the weights of `linear`, which must be the same on every rank of the group.

        Args:
            linear: an ``nn.Linear``, or a module with its attributes.
            dim, group: as in the constructor.

        Raises:
            ValueError: `dim` is none of the constructor's.
            RuntimeError: there is no model-parallel group, and none was given.
        """
        check_dim(dim, "ParallelLinear")
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, dim, group, device="meta")
        layer._adopt(linear)
        return layer.train(linear.training)

    @classmethod
    def convert_parallel_linear(
        cls,
        module: nn.Module,
        dim: int | None = None,
        names: Iterable[str] | None = None,
        group: Group | None = None,
    ) -> nn.Module:
        """Replaces ``nn.Linear`` layers inside `module` by parallel ones with the same weights.

        Subclasses of ``nn.Linear`` may compute something else, so they are converted only if `names` names them. If
        the group is the whole world, ``DistributedDataParallel`` then leaves the split parameters alone. If it is
        smaller, call :func:`tensorshard.register_ddp_parameters_to_ignore`.

        Args:
            module: changed in place. Its weights must be the same on every rank of the group.
            dim: of all converted layers.
            names: the layers to convert, relative to `module`; ``*`` and ``?`` are wildcards. None: all.
            group: as in the constructor.

        Returns:
            `module`; or, if that is itself an ``nn.Linear``, the layer that replaces it.

        Raises:
            TypeError: `module` is not a module.
            ValueError: `dim` is none of the constructor's; a layer is parallel already; a name matches no
                ``nn.Linear``; a weight is tied to a module that is not converted. Nothing was changed then.

        Examples:
            >>> ts.distributed.init_process_group()  # on two ranks
            >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1000))
            >>> model = ts.nn.ParallelLinear.convert_parallel_linear(model, dim=1, names=["2"])
            >>> model[2].weight.shape
            torch.Size([500, 32])
        """
        check_dim(dim, "convert_parallel_linear")
        return convert(module, nn.Linear, cls, names, lambda linear: cls.from_linear(linear, dim, group))

    def _adopt(self, linear: Any) -> None:
        """Takes over `linear`'s parameters: splits them, or keeps them with ``dim=None``."""
        weight, bias = linear.weight, linear.bias
        if self.dim is not None:
            row = self.dim == 0
            weight = self.split(weight, 1 if row else 0)
            if bias is not None:
                bias = self.replicate(bias) if row else self.split(bias, 0)
        self.weight = weight
        self.register_parameter("bias", bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Computes :func:`tensorshard.nn.functional.parallel_linear` with this layer's weight and bias.

        Args:
            input: [*, in_features]; with `dim` 0 also this rank's shard of it.

        Returns:
            [*, out_features]; with `dim` 1 this rank's shard of it.

        Raises:
            ValueError: `input` has another number of features, or is a shard where a full one is needed.
        """
        if self.dim is None:
            return parallel_linear(input, self.weight, self.bias)
        size = self.in_features if self.dim == 0 else self.out_features
        return split_linear(input, self.weight, self.bias, self.dim, self.group, size)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, dim={self.dim}"
        )


class ParallelEmbedding(ParallelModule):
    """``nn.Embedding`` with its table split over a group: by vocabulary (`dim` 0) or by feature (`dim` 1 or
    -1).

    Every rank gets the full output in both cases. The sizes need not be multiples of the number of ranks. Initial
    weights are those that ``nn.Embedding`` gets from the same random seed. All ranks of the group need the same seed.

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse: as in
            ``nn.Embedding``. `sparse` needs ``dim=None``.
        _weight: [num_embeddings, embedding_dim]: initial values, the same on every rank.
        dim: 0, 1, -1, or None for ``nn.Embedding``.
        group: a process group or a one-dimensional mesh; by default the model-parallel group.
        device, dtype: as in ``nn.Embedding``. Split parameters live on the device type of the group.

    Attributes:
        weight: this rank's shard of [num_embeddings, embedding_dim], marked as a shard; all of it with ``dim=None``.

    Raises:
        TypeError: a size is not an integer.
        ValueError: `dim` is none of these; a size is negative; `sparse` with a split table.
        RuntimeError: there is no model-parallel group, and none was given.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> embedding = ts.nn.ParallelEmbedding(1000, 16, dim=0)
        >>> embedding.weight.shape
        torch.Size([500, 16])
        >>> embedding(torch.tensor([[1, 2, 999]])).shape
        torch.Size([1, 3, 16])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        dim: int | None = None,
        group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_dim(dim, "ParallelEmbedding")
        check_sizes(num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        if sparse and dim is not None:
            raise ValueError("sparse=True was given for a split embedding, whose gradients are dense: leave it out")
        super().__init__(dim, group)
        self._adopt(
            nn.Embedding(
                num_embeddings,
                embedding_dim,
                padding_idx,
                max_norm,
                norm_type,
                scale_grad_by_freq,
                sparse,
                _weight,
                device=device,
                dtype=dtype,
            )
        )

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, dim: int | None = None, group: Group | None = None
    ) -> "ParallelEmbedding":
        """Makes a parallel layer with the table of `embedding`, which must be the same on every rank of the group.

        Args:
            embedding: the layer whose table and settings are taken.
            dim, group: as in the constructor.

        Raises:
            ValueError: `dim` is none of the constructor's; `embedding` is sparse, and its table is to be split.
            RuntimeError: there is no model-parallel group, and none was given.
        """
        layer = cls(1, 1, sparse=embedding.sparse, dim=dim, group=group, device="meta")
        layer._adopt(embedding)
        return layer.train(embedding.training)

    @classmethod
    def convert_parallel_embedding(
        cls,
        module: nn.Module,
        dim: int | None = None,
        names: Iterable[str] | None = None,
        group: Group | None = None,
    ) -> nn.Module:
        """Replaces ``nn.Embedding`` layers inside `module` by parallel ones with the same tables.

        Args:
            module: changed in place. Its weights must be the same on every rank of the group.
            dim: of all converted layers.
            names: the layers to convert, relative to `module`; ``*`` and ``?`` are wildcards. None: all.
            group: as in the constructor.

        Returns:
            `module`; or, if that is itself an ``nn.Embedding``, the layer that replaces it.

        Raises:
            TypeError: `module` is not a module.
            ValueError: `dim` is none of the constructor's; a layer is parallel already; a name matches no
                ``nn.Embedding``; a table is tied to a module that is not converted. Nothing was changed then.
        """
        check_dim(dim, "convert_parallel_embedding")
        return convert(module, nn.Embedding, cls, names, lambda embedding: cls.from_embedding(embedding, dim, group))

    def _adopt(self, embedding: nn.Embedding) -> None:
        """Takes over `embedding`'s settings and its table: splits it, or keeps it with ``dim=None``."""
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.max_norm = embedding.max_norm
        self.norm_type = embedding.norm_type
        self.scale_grad_by_freq = embedding.scale_grad_by_freq
        self.sparse = embedding.sparse
        self.weight = embedding.weight if self.dim is None else self.split(embedding.weight, self.dim)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Computes :func:`tensorshard.nn.functional.parallel_embedding` with this layer's table.

        Args:
            input: indices of any shape, the same on every rank of the group.

        Returns:
            [*input.shape, embedding_dim], full on every rank.

        Raises:
            IndexError: an index is outside the vocabulary.
        """
        options = (self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq)
        if self.dim is None:
            return parallel_embedding(input, self.weight, *options, self.sparse)
        shape = (self.num_embeddings, self.embedding_dim)
        return split_embedding(input, self.weight, *options, self.dim, self.group, shape)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, dim={self.dim}"


class RegisterParallelDim(nn.Module):
    """Marks the tensors that pass through as split along `dim`; with None, as full. Their values do not change.

    The result of an operation carries no mark. So this module follows the operations between a layer that splits its
    output features and a layer that takes split input features.

    Args:
        dim: the dimension of the tensors that is split; None for full tensors.
        group: the ranks that hold the shards, if they are not the model-parallel group.

    Raises:
        TypeError: `group` is neither a process group nor a mesh.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> column, row = ts.nn.ParallelLinear(16, 64, dim=1), ts.nn.ParallelLinear(64, 16, dim=0)
        >>> mlp = torch.nn.Sequential(column, torch.nn.GELU(), ts.nn.RegisterParallelDim(-1), row)
        >>> mlp(torch.randn(8, 16)).shape
        torch.Size([8, 16])
    """

    def __init__(self, dim: int | None = None, group: Group | None = None) -> None:
        super().__init__()
        self.dim = dim
        self._mesh = None if group is None else resolve_mesh(group)

    def forward(self, input: Marked) -> Marked:
        """Marks a tensor, or each tensor of a tuple or list, and returns what it was given.

        Raises:
            TypeError: `input` is none of these.
            IndexError: a tensor has no dimension `dim`.
        """
        tensors = [input] if isinstance(input, torch.Tensor) else input
        if not isinstance(tensors, (tuple, list)) or not all(isinstance(t, torch.Tensor) for t in tensors):
            raise TypeError(f"RegisterParallelDim was given {kind_of(input)}: it marks tensors")
        group = None if self._mesh is None else self._mesh.get_group()
        for tensor in tensors:
            register_parallel_dim(tensor, self.dim, group=group)
        return input

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


def convert(
    module: nn.Module,
    plain: type[nn.Module],
    parallel: type[ParallelModule],
    names: Iterable[str] | None,
    build: Callable[[Any], ParallelModule],
) -> nn.Module:
    """Replaces the layers of class `plain` inside `module`.

    Args:
        module: changed in place, unless it is itself such a layer.
        parallel: the class of the layers that `build` makes.
        names: the layers to replace; ``*`` matches any characters, ``?`` one. None: all that are exactly of class
            `plain`.
        build: makes the replacement of one layer.

    Returns:
        `module`, or what replaces it.

    Raises:
        TypeError: `module` is not a module.
        ValueError: a name matches no such layer; a layer is parallel already; a parameter is tied to a module that is
            not converted. Nothing was changed then.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"{kind_of(module)} was given where a model was expected, whose layers are to be replaced: give an "
            "nn.Module"
        )
    chosen = _choose(module, plain, parallel, names)
    _refuse_broken_ties(module, set(chosen))
    replacements: dict[int, ParallelModule] = {}
    shared: dict[int, nn.Parameter] = {}
    for name, layer in chosen.items():
        if id(layer) not in replacements:  # one layer may be used under several names
            replacements[id(layer)] = _build_tied(layer, build, shared)
        if name == "":
            return replacements[id(layer)]
        module.set_submodule(name, replacements[id(layer)])
    split = [layer for layer in replacements.values() if layer.dim is not None]
    if split and split[0].mesh.size() == dist.get_world_size():
        register_ddp_parameters_to_ignore(module)
    return module


def _choose(
    module: nn.Module, plain: type[nn.Module], parallel: type[ParallelModule], names: Iterable[str] | None
) -> dict[str, nn.Module]:
    """The layers to be replaced, by name."""
    modules = dict(module.named_modules(remove_duplicate=False))
    done = {name for name, m in modules.items() if isinstance(m, parallel) and m.dim is not None}
    if names is None:
        chosen = {name: m for name, m in modules.items() if type(m) is plain or _is_unsplit(m, parallel)}
        twice = done
    else:
        chosen, twice = {}, set()
        for pattern in [names] if isinstance(names, str) else names:
            matches = {name: m for name, m in modules.items() if fnmatchcase(name, pattern)}
            layers = {n: m for n, m in matches.items() if isinstance(m, plain) or _is_unsplit(m, parallel)}
            if not layers and not done & matches.keys():
                there = [n or "the module itself" for n, m in modules.items() if isinstance(m, plain)]
                raise ValueError(
                    f"{pattern!r} names no nn.{plain.__name__} of the model; it has: {', '.join(there) or 'none'}"
                )
            twice |= done & matches.keys()
            chosen |= layers
    if twice:
        raise ValueError(
            f"already converted: {', '.join(name or 'the module itself' for name in sorted(twice))}. A layer is "
            "converted once; to convert others of this model, give their names="
        )
    return chosen


def _is_unsplit(module: nn.Module, parallel: type[ParallelModule]) -> bool:
    return isinstance(module, parallel) and module.dim is None


def _refuse_broken_ties(module: nn.Module, chosen: set[str]) -> None:
    """Raises if a parameter of a chosen layer is also used by a module that stays as it is."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for module_name, owner in module.named_modules(remove_duplicate=False):
        for name, parameter in own_parameters(owner).items():
            owners.setdefault(id(parameter), []).append((module_name, name))
    for users in owners.values():
        inside = [f"{m}.{p}" for m, p in users if m in chosen]
        outside = [f"{m}.{p}" for m, p in users if m not in chosen]
        if inside and outside:
            raise ValueError(
                f"{inside[0]} is tied to {outside[0]}, which is not converted: they would no longer be one "
                f"parameter. Leave {inside[0].rpartition('.')[0]} out by giving names=, or untie them first"
            )


def _build_tied(
    layer: nn.Module, build: Callable[[Any], ParallelModule], shared: dict[int, nn.Parameter]
) -> ParallelModule:
    """Builds the replacement of `layer`, with parameters that were tied before tied again."""
    replacement = build(layer)
    for name, parameter in layer.named_parameters(recurse=False):
        known = shared.setdefault(id(parameter), own_parameters(replacement)[name])
        setattr(replacement, name, known)
    return replacement
