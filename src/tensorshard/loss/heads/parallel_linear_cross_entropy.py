"""The head of a classifier: its last linear layer and its loss, for any number of classes."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tensorshard.comm.groups import Group
from tensorshard.comm.marks import ParallelMark, set_mark
from tensorshard.comm.sharding import shard_range, to_local
from tensorshard.layers.arguments import autocast
from tensorshard.layers.split_linear import parallel_linear
from tensorshard.loss.formulas import CrossEntropySpec, Margin
from tensorshard.loss.heads.head_module import HeadModule
from tensorshard.loss.heads.linear_cross_entropy import tiled_loss
from tensorshard.loss.loss_arguments import check_options
from tensorshard.loss.tiled_loss import Extras
from tensorshard.loss.tiles import check_width, head_tiles, largest_logits

_DEFAULT_SCALE = 64.0  # of cosines, as in ArcFace and CosFace


class ParallelLinearCrossEntropy(HeadModule):
    """``nn.Linear`` and ``nn.CrossEntropyLoss`` in one: the classes are split over a group, and logits are never all
    held.

    It is exact, as :func:`tensorshard.nn.functional.parallel_linear_cross_entropy` is. Initial weights are those that
    ``nn.Linear`` gets from the same random seed. All ranks of the group need the same seed; no rank ever holds the full
    weight. The state dict has the names of ``nn.Linear``. Full tensors and this rank's parts can be loaded.

    Args:
        in_features: of the input.
        num_classes: of all ranks. The number of ranks need not divide it.
        bias: whether there is one.
        ignore_index, label_smoothing, class_weight, z_loss, reduction, softcap: as in the functional form.
        use_token_scaling, return_lse, return_token_accuracy, keep_logits: as in the functional form.
        margin: ``ArcFace(...)`` or ``CosFace(...)``, for the target's logit; without a bias.
        normalize: whether logits are cosines times `scale`; None: if there is a margin.
        scale: multiplies the logits; None: 64 for cosines, else 1.
        sample_rate: the share of its classes that a rank computes with in training: the targets' classes, and others at
            random (Partial FC: An et al. 2022). Below 1 this is not exact: the softmax is over these classes, and only
            their rows are trained.
        gather_inputs: the ranks over which inputs and targets are gathered first: a group or a one-dimensional mesh
            (the data axis), or True for the group of the classes. So ranks with different batches can hold parts of
            one head, as in TorchShard. The loss is that of all their samples, on every rank, and each rank's input
            gets the gradient of its own samples.
        grad_scale: multiplies the input's gradient. If ``DistributedDataParallel`` averages the gradients of the layers
            before the head over n ranks whose batches were gathered, use n: the average is then the sum.
        update: ``dict(lr=..., momentum=0.0, weight_decay=0.0, momentum_dtype="fp32", seed=0)`` makes backward update
            the weight itself, tile by tile, so that no gradient tensor exists. The update is that of
            ``torch.optim.SGD``. A weight in bf16 is rounded stochastically. See `optimizer` and :meth:`accumulate`.
            Under a Plan the weight gets a gradient, and the Engine's optimizer makes the same update.
        group: a process group or a one-dimensional mesh; by default the model-parallel group. If there is none, the
            head holds all classes, as ``nn.Linear`` would, until ``parallelize(model, Plan(tp=...))`` splits them.
        device, dtype: as in ``nn.Linear``.

    Attributes:
        weight: this rank's rows of [num_classes, in_features], marked as a shard; all rows if there is no group.
        bias: this rank's part of [num_classes], or None.
        optimizer: with ``update=``, a ``HeadSGD``; else None. Schedulers set its ``param_groups``, and its state is
            saved as any optimizer's. Call its ``step()`` beside the other optimizer's. No other optimizer may have
            this head's parameters.

    Raises:
        ValueError: options do not fit.

    Examples:
        >>> ts.distributed.init_process_group()  # on two ranks
        >>> head = ts.nn.ParallelLinearCrossEntropy(16, 1000)
        >>> head.weight.shape
        torch.Size([500, 16])
        >>> loss = head(torch.randn(8, 16), torch.arange(8))
        >>> loss.shape, head.topk(torch.randn(8, 16), k=5)[1].shape
        (torch.Size([]), torch.Size([8, 5]))
    """

    class_weight: torch.Tensor | None

    takes_targets = True  # its forward needs the targets, so the model's forward gets them

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        class_weight: torch.Tensor | None = None,
        z_loss: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        use_token_scaling: bool = False,
        return_lse: bool = False,
        return_token_accuracy: bool = False,
        keep_logits: bool | None = None,
        margin: Margin | None = None,
        normalize: bool | None = None,
        scale: float | None = None,
        sample_rate: float = 1.0,
        gather_inputs: bool | Group = False,
        grad_scale: float = 1.0,
        update: dict[str, Any] | None = None,
        group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        normalize = margin is not None if normalize is None else normalize
        scale = (_DEFAULT_SCALE if normalize else 1.0) if scale is None else scale
        loss = CrossEntropySpec(
            num_classes,
            ignore_index,
            label_smoothing,
            z_loss,
            reduction,
            softcap,
            use_token_scaling,
            return_lse,
            return_token_accuracy,
        )
        check_options(loss, keep_logits, margin, scale, normalize, bias, sample_rate < 1)
        _check_module(in_features, num_classes, class_weight, sample_rate)
        super().__init__(
            in_features,
            num_classes,
            bias,
            gather_inputs=gather_inputs,
            grad_scale=grad_scale,
            update=update,
            group=group,
            device=device,
            dtype=dtype,
        )
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss
        self.reduction, self.softcap, self.use_token_scaling = reduction, softcap, use_token_scaling
        self.return_lse, self.return_token_accuracy = return_lse, return_token_accuracy
        self.keep_logits = keep_logits
        self.margin, self.normalize, self.scale = margin, normalize, scale
        self.sample_rate = sample_rate
        self.register_buffer("class_weight", class_weight, persistent=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> "ParallelLinearCrossEntropy":
        """Makes a head with the weights of `linear`, which must be the same on every rank of the group.

        Args:
            linear: the layer whose weight and bias are taken.
            options: those of the constructor, without the sizes, `bias`, `device` and `dtype`.

        Raises:
            ValueError: options do not fit.
        """
        given = dict(linear.named_parameters(recurse=False))
        update = options.pop("update", None)
        head = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **options)
        begin, width = head._range()
        for name, full in given.items():
            part = full.detach()[begin : begin + width].clone(memory_format=torch.contiguous_format)
            setattr(head, name, head._parameter(part, tuple(full.shape)))
        if head.class_weight is not None:
            head.class_weight = head.class_weight.to(linear.weight.device)
        if update is not None:
            head._update_in_backward(update)
        return head.train(linear.training)

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> Any:
        """The loss, the same on every rank of the group; with any ``return_`` option a ``CrossEntropyOutput``.

        If inputs are gathered, the output's numbers for each token cover the tokens of all these ranks.

        Args:
            features: [*, in_features]: the same on every rank, unless inputs are gathered (along the first dimension).
            targets: [*]: class numbers, counted over all ranks.

        Raises:
            IndexError: a target is outside the classes.
            TypeError: targets are not integers.
            ValueError: shapes or types do not fit.
            RuntimeError: with ``update=``: the loss is in fp16, or parameters were replaced; or, as for :meth:`topk`, a
                Plan has sharded the weight.
        """
        self._check_rows()
        features, targets = self._gather(features, targets)
        self._check_update(features)
        sample = None
        if self.training and self.sample_rate < 1:
            start, width = self._range()
            most = shard_range(self.num_classes, self._size_and_rank()[0], 0)[1]
            sample = _sample_classes(targets, start, width, self.sample_rate, most)
        return tiled_loss(
            features,
            self.weight,
            targets,
            self.bias,
            self._class_shard(),
            CrossEntropySpec.of(self, self.num_classes),
            class_weight=self.class_weight,
            keep_logits=self.keep_logits,
            margin=self.margin,
            scale=self.scale,
            normalize=self.normalize,
            extras=Extras(
                sample=sample,
                optimizer=self.optimizer,
                sum_input_grad=not self._gathers_over_classes(),
                casts=self.optimizer is not None,
            ),
        )

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """This rank's columns of the logits, all at once, without margins.

        Args:
            features: [*, in_features], the same on every rank; it is not gathered.

        Returns:
            [*, this rank's classes], marked as split along the last dimension.

        Raises:
            RuntimeError: a gradient is needed on a head with ``update=``, whose weight would not get its own; or, as
                for :meth:`topk`, a Plan has sharded the weight.
        """
        if self.optimizer is not None and torch.is_grad_enabled() and features.requires_grad:
            raise RuntimeError(
                "logits() was called for a gradient on a head built with update=, whose weight is trained by forward() "
                "alone: call it under torch.no_grad(), or build the head without update="
            )
        self._check_rows()
        group = self._process_group()
        output = _local_logits(features, self.weight, self.bias, self.normalize, self.scale, self.softcap, group)
        return output if group is None else set_mark(output, ParallelMark(-1, self.num_classes, group))

    @torch.no_grad()
    def topk(self, features: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `k` largest logits over the classes of all ranks, and their classes; equal logits come in any order.

        Args:
            features: [*, in_features]: as in :meth:`forward`; if inputs are gathered, so is the result.

        Returns:
            [*, k] logits, largest first, and [*, k] classes; the same on every rank.

        Raises:
            ValueError: there are fewer than `k` classes, or `k` is below 1.
            RuntimeError: a Plan has sharded the weight, and this is called outside of the model's forward.
        """
        if not 1 <= k <= self.num_classes:
            raise ValueError(f"k={k} was given for {self.num_classes} classes: use 1 to {self.num_classes}")
        self._check_rows()
        features, _ = self._gather(features, None)
        tiles = head_tiles(features, self.weight, self.bias, self.normalize, self.scale)
        values, classes = largest_logits(tiles, k, self._range()[0], self._process_group(), self.softcap)
        return values.view(*features.shape[:-1], k), classes.view(*features.shape[:-1], k)

    @torch.no_grad()
    def accuracy(self, features: torch.Tensor, targets: torch.Tensor, k: int = 1) -> torch.Tensor:
        """The share of the targets whose logit is among the `k` largest. Ignored targets do not count.

        Args:
            features, targets: as in :meth:`forward`.
            k: how many of the largest logits count.

        Returns:
            A scalar from 0 to 1; nan if all targets are ignored.
        """
        _, targets = self._gather(None, targets)
        hit = (self.topk(features, k)[1] == targets[..., None]).any(-1)
        valid = targets != self.ignore_index
        return (hit & valid).sum() / valid.sum()

    def extra_repr(self) -> str:
        options = [f"{self.in_features}, {self.num_classes}, bias={self.bias is not None}"]
        options += [] if self.margin is None else [f"margin={self.margin}"]
        options += [f"scale={self.scale}"] if self.normalize else []
        options += [] if self.softcap is None else [f"softcap={self.softcap}"]
        options += [f"sample_rate={self.sample_rate}"] if self.sample_rate < 1 else []
        options += [] if self.optimizer is None else [f"update={self.optimizer.options()}"]
        return ", ".join(options)


def _check_module(in_features: int, num_classes: int, class_weight: torch.Tensor | None, sample_rate: float) -> None:
    if in_features < 1 or num_classes < 1:
        raise ValueError(f"in_features={in_features}, num_classes={num_classes} were given: use at least 1 of each")
    if class_weight is not None and list(class_weight.shape) != [num_classes]:
        raise ValueError(
            f"class_weight {list(class_weight.shape)} was given for {num_classes} classes: expected [{num_classes}]"
        )
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate={sample_rate} was given: use a share of the classes, above 0 and at most 1")


def _sample_classes(targets: torch.Tensor, start: int, width: int, rate: float, most: int) -> torch.Tensor:
    """Some of this rank's classes, ascending: those of targets, and others at random up to `rate` of all.

    It takes at least as many classes as there are targets. So it need not know how many of them are this rank's, which
    would mean waiting for the GPU. They are drawn from the device's default generator, so that recomputation draws the
    same.

    Args:
        targets: class numbers, counted over all ranks.
        start, width: this rank's first class, and how many it has.
        rate: in (0, 1].
        most: the most classes that a rank holds. Every rank draws so many numbers. So equal generators stay equal, and
            later dropout is the same on all ranks.
    """
    count = min(width, max(round(rate * width), targets.numel()))
    order = torch.rand(most + 1, device=targets.device)
    local = targets.flatten() - start
    order[local.where((local >= 0) & (local < width), most)] = 2.0  # targets of other ranks mark the last place
    return order[:width].topk(count).indices.sort().values


def _local_logits(
    features: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    normalize: bool,
    scale: float,
    softcap: float | None,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """This rank's columns of the logits of an input [*, D], differentiable.

    Raises:
        ValueError: the input has another width.
    """
    check_width(features, weight)
    local, local_bias = to_local(weight), None if bias is None else to_local(bias)
    features, local, local_bias = autocast(features, local, local_bias)  # type: ignore[assignment]
    if normalize:
        features = F.normalize(features, dim=-1)
    if group is None:
        logits = F.linear(features, local.to(features.dtype), local_bias)
    else:
        logits = parallel_linear(features, local.to(features.dtype), local_bias, 1, group)
    if normalize:
        logits = logits / torch.linalg.vector_norm(local, dim=1).clamp(min=1e-12)
    logits = logits * scale if scale != 1.0 else logits
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
