"""An embedding whose table is split over a group."""

from collections.abc import Iterable

import torch
from torch import nn

from tensorshard.comm.groups import Group
from tensorshard.layers.arguments import check_dim, check_sizes
from tensorshard.layers.parallel_module import ParallelModule
from tensorshard.layers.split_embedding import parallel_embedding, split_embedding
from tensorshard.nn.conversion import convert


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
