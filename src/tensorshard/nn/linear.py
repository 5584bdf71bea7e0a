"""A linear layer whose weight is split over a group."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tensorshard.comm.groups import Group
from tensorshard.layers.arguments import check_dim, check_sizes
from tensorshard.layers.parallel_module import ParallelModule
from tensorshard.layers.split_linear import parallel_linear, split_linear
from tensorshard.nn.conversion import convert


class ParallelLinear(ParallelModule):
    """``nn.Linear`` with its weight split over a group. Sizes need not divide.

    ======  =========================  ===============================  ====================
    `dim`   what is split              input                            output
    ======  =========================  ===============================  ====================
    None    nothing                    full                            full
    0       input features (row)       full, or this rank's shard       full
    1, -1   output features (column)   full                            this rank's shard
    ======  =========================  ===============================  ====================

    A part is of the last dimension; that of a column layer is marked as such.

    Initial weights are those that ``nn.Linear`` gets from the same random seed, which must be the same on the
    ranks of the group. The full weight exists for that long on every rank.

    Args:
        in_features, out_features: of the full layer.
        bias: whether there is one. It is split with `dim` 1, and added once, on every rank alike, with `dim`
            0.
        dim: see above.
        group: a process group or a one-dimensional mesh; by default the model-parallel group.
        device, dtype: as in ``nn.Linear``. Split parameters live on the device type of the group.

    Attributes:
        weight: [out_features, in_features]: this rank's shard of it, marked as such; all of it with ``dim=None``.
        bias: [out_features] or None: a part with `dim` 1, all of it with `dim` 0 and None.

    Raises:
        ValueError: `dim` is none of these.
        RuntimeError: there is no model-parallel group, and none was given.
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
        """A parallel layer with the weights of `linear`, which must be the same on every rank of the group.

        Args:
            linear: an ``nn.Linear``, or what has its attributes.
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

        Subclasses of ``nn.Linear`` compute in their own way and are left as they are, unless named.
        Afterwards ``DistributedDataParallel`` leaves the split parameters alone if the group is the whole
        world; if it is smaller, call :func:`tensorshard.register_ddp_parameters_to_ignore`.

        Args:
            module: changed in place. Its weights must be the same on every rank of the group.
            dim: of all converted layers.
            names: of the layers to convert, relative to `module`, ``*`` and ``?`` allowed; None for all.
            group: as in the constructor.

        Returns:
            `module`; or, if that is itself an ``nn.Linear``, the layer that replaces it.

        Raises:
            ValueError: `dim` is none of the constructor's; a layer is parallel already; a name matches no
                ``nn.Linear``; a weight is tied to a module that is not converted. Nothing was changed then.
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
        """Computes :func:`tensorshard.nn.functional.parallel_linear` with this layer's weight and bias."""
        if self.dim is None:
            return parallel_linear(input, self.weight, self.bias)
        size = self.in_features if self.dim == 0 else self.out_features
        return split_linear(input, self.weight, self.bias, self.dim, self.group, size)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, dim={self.dim}"
        )
