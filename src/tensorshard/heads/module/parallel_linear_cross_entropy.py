"""The head of a classifier: its last linear layer and its loss, for any number of classes."""

from typing import Any

import torch
from torch import nn

from tensorshard.comm.groups import Group
from tensorshard.comm.marks import ParallelMark, set_mark
from tensorshard.comm.sharding import shard_range
from tensorshard.heads.loss.argument_checks import check_options, check_sampled
from tensorshard.heads.loss.head_logits import head_tiles, local_logits
from tensorshard.heads.loss.head_loss import Extras
from tensorshard.heads.loss.linear_cross_entropy import tiled_loss
from tensorshard.heads.loss.margins import Margin
from tensorshard.heads.loss.topk import largest_logits
from tensorshard.heads.module.class_sampling import sample_classes
from tensorshard.heads.module.head_module import HeadModule
from tensorshard.layers.softmax_cross_entropy import CrossEntropySpec

_DEFAULT_SCALE = 64.0  # of cosines, as in ArcFace and CosFace


class ParallelLinearCrossEntropy(HeadModule):
    """``nn.Linear`` and ``nn.CrossEntropyLoss`` in one, its classes split over a group, its logits never all there.

    Exact: see :func:`tensorshard.nn.functional.parallel_linear_cross_entropy`. Initial weights are ``nn.Linear``'s
    for the same random seed, which must be the same on the ranks of the group; no rank ever holds the whole weight. The
    state dict is that of ``nn.Linear``, and takes either whole tensors or parts.

    Args:
        in_features: of the input. num_classes: of all ranks; it need not divide. bias: whether there is one.
        ignore_index, label_smoothing, class_weight, z_loss, reduction, softcap: as in the functional form.
        use_token_scaling, return_lse, return_token_accuracy, keep_logits: likewise.
        margin: ``ArcFace(...)`` or ``CosFace(...)``, for the target's logit; without a bias.
        normalize: whether logits are cosines times `scale`; None: where there is a margin.
        scale: multiplies the logits; None: 64 for cosines, else 1.
        sample_rate: in training, the share of its classes that a rank computes with: those that are targets, the
            others at random (Partial FC: An et al. 2022). Below 1 this is not exact: softmax is over the sample, and
            only its rows are trained.
        gather_inputs: over which ranks inputs and targets are to be gathered first, so that ranks with batches of their
            own may hold parts of one head, as in TorchShard: a group or a one-dimensional mesh (the data axis), or
            True for the group of the classes. The loss is then that of the whole batch, on every rank, and each rank's
            input gets its own samples' gradient.
        grad_scale: multiplies the input's gradient. Where ``DistributedDataParallel`` averages the gradients of what
            comes before the head over n ranks whose batches were gathered, n makes their sum of it.
        update: ``dict(lr=..., momentum=0.0, weight_decay=0.0, momentum_dtype="fp32", seed=0)`` makes backward update
            the weight itself, tile by tile, so that no gradient tensor exists: exactly what ``torch.optim.SGD`` does.
            A weight in bf16 is rounded stochastically. See `optimizer` and :meth:`accumulate`. Under a Plan the
            weight gets a gradient, and an SGD in the Engine's optimizer does the same with it, in a group of its own.
        group: a process group or a one-dimensional mesh; by default the model-parallel group. Where there is none, the
            head holds all classes, as ``nn.Linear`` would, until ``parallelize(model, Plan(tp=...))`` splits them.
        device, dtype: as in ``nn.Linear``.

    Attributes:
        weight: [num_classes, in_features]: this rank's rows, marked as such; all of them where there is no group.
        bias: [num_classes] or None, likewise.
        optimizer: a ``HeadSGD``, with ``update=``, else None: its ``param_groups`` are for schedulers, its state
            saved as any optimizer's; call its ``step()`` where the other optimizer's is called. It is the only one
            that may have this head's parameters.

    Raises:
        ValueError: options that do not fit.
    """

    class_weight: torch.Tensor | None

    takes_targets = True  # its forward is called with the targets, so that the model's is, too

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
        check_options(loss, keep_logits, margin, scale, normalize, bias)
        _check_module(in_features, num_classes, class_weight, sample_rate)
        if sample_rate < 1:
            check_sampled(loss)
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
        """A head with the weights of `linear`, which must be the same on every rank of the group.

        Args:
            options: of the constructor, but for the sizes, `bias`, `device` and `dtype`.
        """
        given = dict(linear.named_parameters(recurse=False))
        update = options.pop("update", None)
        head = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **options)
        begin, held = head._range()
        for name, whole in given.items():
            part = whole.detach()[begin : begin + held].clone(memory_format=torch.contiguous_format)
            setattr(head, name, head._parameter(part, tuple(whole.shape)))
        if head.class_weight is not None:
            head.class_weight = head.class_weight.to(linear.weight.device)
        if update is not None:
            head._update_in_backward(update)
        return head.train(linear.training)

    def forward(self, features: torch.Tensor, targets: torch.Tensor) -> Any:
        """The loss, the same on every rank of the group; with any ``return_`` option a ``CrossEntropyOutput``.

        What that has for each token it has for those of all ranks whose inputs are gathered.

        Args:
            features: [*, in_features]: the same on every rank, unless inputs are gathered (along the first dimension).
            targets: [*]: classes, numbered over all ranks.

        Raises:
            ValueError, TypeError, IndexError: as :func:`tensorshard.nn.functional.parallel_linear_cross_entropy`.
            RuntimeError: with ``update=``: a loss in fp16; parameters that were replaced. As for :meth:`topk`.
        """
        self._check_rows()
        features, targets = self._gather(features, targets)
        self._check_update(features)
        sample = None
        if self.training and self.sample_rate < 1:
            start, held = self._range()
            most = shard_range(self.num_classes, self._size_and_rank()[0], 0)[1]
            sample = sample_classes(targets, start, held, self.sample_rate, most)
        return tiled_loss(
            features,
            self.weight,
            targets,
            self.bias,
            self._place(),
            self._loss(),
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

    def _loss(self) -> CrossEntropySpec:
        """As its attributes say now."""
        return CrossEntropySpec(
            self.num_classes,
            self.ignore_index,
            self.label_smoothing,
            self.z_loss,
            self.reduction,
            self.softcap,
            self.use_token_scaling,
            self.return_lse,
            self.return_token_accuracy,
        )

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """This rank's columns of the logits, all at once, without margins; marked as split along the last dimension.

        Args:
            features: [*, in_features], the same on every rank; it is not gathered.

        Raises:
            RuntimeError: with ``update=`` and where a gradient is wanted: the weight would not get its own; or as for
                :meth:`topk`.
        """
        if self.optimizer is not None and torch.is_grad_enabled() and features.requires_grad:
            raise RuntimeError(
                "logits() was called for a gradient on a head built with update=, whose weight is trained by forward() "
                "alone: call it under torch.no_grad(), or build the head without update="
            )
        self._check_rows()
        group = self._process_group()
        output = local_logits(features, self.weight, self.bias, self.normalize, self.scale, self.softcap, group)
        return output if group is None else set_mark(output, ParallelMark(-1, self.num_classes, group))

    @torch.no_grad()
    def topk(self, features: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `k` largest logits over the classes of all ranks, and these classes; equal logits come in any order.

        Args:
            features: [*, in_features]: as in :meth:`forward`; if inputs are gathered, so is the result.

        Returns:
            [*, k] logits, largest first, and [*, k] classes; the same on every rank.

        Raises:
            ValueError: there are no `k` classes.
            RuntimeError: a Plan has sharded the weight, outside of the model's forward.
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
        """The share of the targets, but for ignored ones, that are among the `k` largest logits. Of no targets: nan.

        Args:
            features, targets: as in :meth:`forward`.
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
