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

    The output is whole either way. Sizes need not divide. Initial weights are those that ``nn.Embedding``
    gets from the same random seed, which must be the same on the ranks of the group.

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse: as in
            ``nn.Embedding``. `sparse` needs ``dim=None``.
        _weight: [num_embeddings, embedding_dim]: initial values, the same on every rank.
        dim: 0, 1, -1, or None for ``nn.Embedding``.
        group: a process group or a one-dimensional mesh; by default the model-parallel group.
        device, dtype: as in ``nn.Embedding``. Split parameters live on the device type of the group.

    Attributes:
        weight: [num_embeddings, embedding_dim]: this rank's part of it, marked as such; all of it with ``dim=None``.

    Raises:
        ValueError: `dim` is none of these; `sparse` with a split table.
        RuntimeError: there is no model-parallel group, and none was given.
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
        """A parallel layer with the table of `embedding`, which must be the same on every rank of the group.

        Raises:
            ValueError: as the constructor.
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
        """Replaces ``nn.Embedding`` layers: see :meth:`ParallelLinear.convert_parallel_linear`."""
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
        """Computes :func:`tensorshard.nn.functional.parallel_embedding` with this layer's table."""
        options = (self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq)
        if self.dim is None:
            return parallel_embedding(input, self.weight, *options, self.sparse)
        shape = (self.num_embeddings, self.embedding_dim)
        return split_embedding(input, self.weight, *options, self.dim, self.group, shape)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, dim={self.dim}"
