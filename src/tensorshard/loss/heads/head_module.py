"""The parts of a head besides its loss: its rows of the weight, its inputs from other ranks, its update, and a plan."""

import logging
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function

from tensorshard.comm import primitives
from tensorshard.comm.differentiable import gather, gather_for_sum
from tensorshard.comm.groups import Group, is_initialized, resolve_group
from tensorshard.comm.marks import ParallelMark, set_mark
from tensorshard.comm.sharding import shard_range, to_local
from tensorshard.layers.parallel_module import ParallelModule
from tensorshard.loss.heads.head_sgd import HeadSGD
from tensorshard.loss.loss_arguments import ClassShard
from tensorshard.loss.tiles import autocast_dtype
from tensorshard.model.trains_itself import TrainsItself
from tensorshard.passes.precision import master_dtype
from tensorshard.torch_private.modules import own_parameters

# Heads with ``update=`` under a plan: their backward leaves gradients, and SGD trains them.
# Between backward and update, a plan sums gradients over ranks, clips them, or skips a step. So it needs a gradient.
# The update inside backward is switched off, and its rule becomes a parameter group of the optimizer.

logger = logging.getLogger("tensorshard")


@dataclass(frozen=True)
class HeadRule:
    """The SGD that a head would do by itself.

    Args:
        head: name of the module.
        parameters: the names of its parameters.
        options: of its optimizer's group, with what the optimizer notes there.
        tied: names of other modules' parameters that are the same as the head's.
    """

    head: str
    parameters: tuple[str, ...]
    options: dict[str, Any]
    tied: tuple[str, ...]

    def check(self, model: nn.Module) -> None:
        """Refuses what a plan could not do exactly.

        Raises:
            ValueError: a weight is tied; a weight or momentum is narrower than fp32; classes are sampled with a
                momentum; a step is half done; a scheduler is on the head's own optimizer.
        """
        head: Any = model.get_submodule(self.head)
        problem = self._problem(head.weight.dtype, head.sample_rate)
        if problem:
            raise ValueError(
                f"module {self.head!r} is a ParallelLinearCrossEntropy built with update=, whose parameters a plan "
                f"trains from gradients, by SGD on fp32 masters; {problem}"
            )

    def add_group(self, optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter]) -> None:
        """Adds the head's group to `optimizer`, with the head's own options.

        Every rank of a pipeline has the group, so that schedulers and checkpoints see the same groups on all. On ranks
        without the head it trains nothing.

        Raises:
            ValueError: the optimizer is not a ``torch.optim.SGD``.
        """
        if type(optimizer) is not torch.optim.SGD:
            raise ValueError(
                f"module {self.head!r} is a ParallelLinearCrossEntropy built with update=, which is SGD with "
                f"{self._described()}. Under a plan the optimizer does that in a parameter group of its own, but "
                f"optimizer(parameters) made {_with_article(type(optimizer).__name__)}: use "
                f"optimizer=functools.partial(torch.optim.SGD, lr=...) for the rest, or build the head without "
                f"update=, so that it is trained like the rest"
            )
        given = [(name, masters[name]) for name in self.parameters if name in masters]
        given = given or [(f"none of {self.head}", nn.Parameter(torch.empty(0)))]
        named = "param_names" in optimizer.param_groups[0]  # torch needs names for all groups or for none
        optimizer.add_param_group(
            {
                "params": given if named else [parameter for _, parameter in given],
                **self._sgd(),
                "dampening": 0,
                "nesterov": False,
                "maximize": False,
                "head": self.head,
            }
        )

    def log(self) -> None:
        """Logs how the update is done now."""
        steps = self.options["step"]
        logger.warning(
            "module %r was built with update=, but a plan needs its gradients, which take the memory of its weight "
            "once more; engine.optimizer trains it in a parameter group of its own: SGD with %s%s",
            self.head,
            self._described(),
            f", whose momentum begins anew after the {steps} steps of head.optimizer" if steps else "",
        )

    def _sgd(self) -> dict[str, float]:
        return {name: float(self.options[name]) for name in ("lr", "momentum", "weight_decay")}

    def _described(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._sgd().items())

    def _problem(self, dtype: torch.dtype, sample_rate: float) -> str | None:
        options = self.options
        if self.tied:
            return (
                f"its weight is also {', '.join(map(repr, self.tied))}, whose part of the gradient update= leaves out: "
                f"build the head without update=, or do not tie it"
            )
        if master_dtype(dtype) != dtype:
            return (
                f"its weight is of {str(dtype).removeprefix('torch.')}, which would not stay so narrow: build it with "
                f"dtype=torch.float32 (Plan(precision='bf16') computes in bf16), or train without a Plan"
            )
        if options["momentum_dtype"] != "fp32":
            return (
                f"its momentum of momentum_dtype={options['momentum_dtype']!r} would be as wide as the weight: leave "
                f"momentum_dtype out (zero=1 to 3 split the momentum over dp_shard), or train without a Plan"
            )
        if sample_rate < 1 and (options["momentum"] or options["weight_decay"]):
            return (
                f"with sample_rate={sample_rate} that would move the classes outside of a step's sample as well, by "
                f"momentum={options['momentum']} and weight_decay={options['weight_decay']}: build it with both at 0, "
                f"with sample_rate=1, or without update="
            )
        if options["pending"]:
            return (
                "micro-batches are in its momentum whose step was not ended, and a plan begins with a momentum of its "
                "own: call head.optimizer.step() first"
            )
        if "initial_lr" in options:
            return (
                "a learning-rate scheduler was built on head.optimizer, which does nothing then: build it on "
                "engine.optimizer, which has a parameter group of the head"
            )
        return None


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIO' else 'a'} {name}"


class HeadModule(ParallelModule, TrainsItself):
    """The parameters of a head, and the ranks that hold them.

    The arguments are those of :class:`tensorshard.nn.ParallelLinearCrossEntropy`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    methods_with_parameters = ("topk", "logits")  # others call these

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool,
        *,
        gather_inputs: bool | Group,
        grad_scale: float,
        update: dict[str, Any] | None,
        group: Group | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        split = group is not None or is_initialized()
        super().__init__(0 if split else None, group if split else None)
        self._ranks: dist.ProcessGroup | None = None  # the ranks over which a Plan has split the classes
        self.in_features, self.num_classes, self.grad_scale = in_features, num_classes, grad_scale
        self._data_group = self._resolve_data_group(gather_inputs)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype={dtype} was given: a head's weight is of a floating-point type, such as float32")
        weight, biases = initial_rows(in_features, num_classes, *self._range(), bias, device, dtype)
        self.weight = self._parameter(weight, (num_classes, in_features))
        self.register_parameter("bias", None if biases is None else self._parameter(biases, (num_classes,)))
        self.optimizer: HeadSGD | None = None
        if update is not None:
            self._update_in_backward(update)

    def reset_parameters(self) -> None:
        """Draws the parameters anew, as the constructor does: those that ``nn.Linear`` gets from the same random
        seed."""
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                fill_rows(to_local(parameter.detach()), self.num_classes, self._range()[0], self.in_features)

    def check_under_plan(self, name: str, *, takes_rules: bool = True) -> None:
        """Refuses ``gather_inputs=``, ``grad_scale=``, and ``update=`` if nothing takes over its rule. The message
        names the field of the plan that contradicts it."""
        what = f"module {name!r} is a ParallelLinearCrossEntropy built with"
        if self.gathers_inputs:
            raise ValueError(
                f"{what} gather_inputs=, but under a plan each data rank has a loss of its own, which the Engine "
                f"averages. Leave gather_inputs= out: tp splits the classes over ranks that see the same batch, and "
                f"zero=3 splits what is left over dp_shard"
            )
        if self.grad_scale != 1.0:
            raise ValueError(
                f"{what} grad_scale={self.grad_scale}, which undoes an average over ranks whose batches were gathered; "
                f"under a plan none are, and the Engine weighs the gradients. Leave grad_scale= out"
            )
        if self.optimizer is not None and not takes_rules:
            raise ValueError(
                f"{what} update=, which changes its weight during backward, before the ranks' gradients are averaged. "
                f"Build it without update= and give its parameters to the optimizer; or use tensorshard.parallelize, "
                f"which makes an SGD train it so"
            )

    def own_rule(self, name: str, model: nn.Module) -> HeadRule | None:
        if self.optimizer is None:
            return None
        options = {key: value for key, value in self.optimizer.group.items() if key != "params"}
        own = dict(self.named_parameters(recurse=False))
        others = {
            f"{prefix}.{key}" if prefix else key: parameter
            for prefix, module in model.named_modules()
            if module is not self
            for key, parameter in own_parameters(module).items()
        }
        tied = tuple(other for other, parameter in others.items() if any(parameter is mine for mine in own.values()))
        return HeadRule(name, tuple(f"{name}.{key}" if name else key for key in own), options, tied)

    def leave_gradients(self) -> None:
        if self.optimizer is None:
            return
        self.optimizer = None
        for key, parameter in list(self.named_parameters(recurse=False)):
            vars(parameter).pop("_optimizer", None)  # it refers back to the parameter, and would keep both alive
            plain = nn.Parameter(parameter.detach())
            vars(plain).update(vars(parameter))
            setattr(self, key, plain)

    def linear_sizes(self) -> tuple[int, int] | None:
        return self.in_features, self.num_classes

    def split_outputs(self, group: dist.ProcessGroup) -> None:
        """Makes a head that holds all classes compute with a part of them, as under a Plan with tensor parallelism.

        The caller puts this rank's rows, cut as ``torch.chunk`` cuts, into the parameters.

        Raises:
            RuntimeError: the head is split already, or was built with ``update=`` or ``gather_inputs=``.
        """
        taken = [
            what
            for what, is_so in (
                ("a group of its own", self._process_group() is not None),
                ("update=", self.optimizer is not None),
                ("gather_inputs=", self._data_group is not None),
            )
            if is_so
        ]
        if taken:
            raise RuntimeError(f"a head with {taken[0]} cannot be split over other ranks: build it without")
        self._ranks = group

    def accumulate(self) -> AbstractContextManager[None]:
        """A context for the micro-batches of a step, except the last, on a head with ``update=``.

        Backward passes inside it accumulate gradients and leave the weight as it is. The first one outside it ends the
        step.

        Raises:
            RuntimeError: the head was built without ``update=``: gradients then accumulate by themselves.
        """
        if self.optimizer is None:
            raise RuntimeError("accumulate() is for heads built with update=: here gradients add up in .grad")
        return self.optimizer.accumulate()

    @property
    def gathers_inputs(self) -> bool:
        """Whether the head was built with ``gather_inputs=``."""
        return self._data_group is not None

    def _gathers_over_classes(self) -> bool:
        group = self._process_group()
        return self._data_group is not None and group is not None and same_ranks(self._data_group, group)

    def _gather(self, features: Any, targets: Any) -> tuple[Any, Any]:
        """The batch of all ranks, if inputs are gathered; else the arguments as they are."""
        if self._data_group is None:
            return features, targets
        if features is not None:
            features = gather_features(features, self._data_group, self.grad_scale, self._gathers_over_classes())
        if targets is not None:
            sizes = primitives.exchange_sizes(len(targets), self._data_group, targets.device)
            targets = primitives.gather_dim(targets, 0, sizes, self._data_group)
        return features, targets

    def _resolve_data_group(self, gather_inputs: bool | Group) -> dist.ProcessGroup | None:
        if gather_inputs is False:
            return None
        if gather_inputs is True:
            if self._mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
                raise ValueError(
                    "gather_inputs=True gathers over the ranks that hold the classes, but this head has no group: call "
                    "tensorshard.distributed.init_process_group(), or pass group="
                )
            return self._process_group()
        return resolve_group(gather_inputs)

    def _process_group(self) -> dist.ProcessGroup | None:
        return self._ranks if self._mesh is None else self.group

    def _size_and_rank(self) -> tuple[int, int]:
        group = self._process_group()
        return (1, 0) if group is None else (group.size(), group.rank())

    def _range(self) -> tuple[int, int]:
        """This rank's first class and how many it has."""
        return shard_range(self.num_classes, *self._size_and_rank())

    def _check_rows(self) -> None:
        """Refuses to compute with only a part of this rank's classes, since the result would look right and be wrong.

        Raises:
            RuntimeError: the weight is sharded over data ranks.
        """
        rows, expected = to_local(self.weight).size(0), self._range()[1]
        if rows != expected:
            raise RuntimeError(
                f"the head's weight has {rows} of this rank's {expected} classes here, as where fully_shard shards it "
                f"over data ranks outside of the model's forward: call the head in the forward of the model"
            )

    def _class_shard(self) -> ClassShard:
        return ClassShard(self._range()[0], self.num_classes, self._process_group())

    def _parameter(self, local: torch.Tensor, shape: tuple[int, ...]) -> nn.Parameter:
        if self._mesh is None:
            return nn.Parameter(local)
        if local.device.type not in (self._mesh.device_type, "meta"):
            local = local.to(self._mesh.device_type)
        parameter = nn.Parameter(local)
        set_mark(parameter, ParallelMark(0, shape[0], self.group, self.dim))
        return parameter

    def _check_replicas(self) -> None:
        size, world_size = self._size_and_rank()[0], dist.get_world_size() if dist.is_initialized() else 1
        if size < world_size and self._data_group is None:
            raise ValueError(
                f"update= was given to a head over {size} of {world_size} processes whose inputs are not gathered: its "
                "copies elsewhere would see other batches and drift apart. Pass gather_inputs= (the data axis), spread "
                "the classes over all processes, or leave update= out"
            )

    def _check_update(self, features: torch.Tensor) -> None:
        if self.optimizer is None:
            return
        self._check_replicas()  # checked only now, since a Plan may switch the update off before
        if not self.optimizer.holds(self.weight):
            raise RuntimeError(
                "the weight of a head built with update= was replaced (by load_state_dict(assign=True), fully_shard or "
                "the like), and its optimizer still has the old one: build the head without update="
            )
        if torch.float16 in (features.dtype, autocast_dtype(features)):
            raise RuntimeError(
                "a head built with update= was called in fp16, whose losses a GradScaler scales, skipping steps that "
                "overflow: backward would have updated the weight already. Use bf16, or build the head without update="
            )

    def _update_in_backward(self, options: dict[str, Any]) -> None:
        self._renew_parameters()
        self.optimizer = HeadSGD.from_options(self.weight, self.bias, dict(options))
        self._guard()

    def _renew_parameters(self) -> None:
        self.weight = without_grad(self.weight)
        if self.bias is not None:
            self.bias = without_grad(self.bias)

    def _guard(self) -> None:
        assert self.optimizer is not None
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                refuse_grad_when(parameter, self.optimizer)

    def before_conversion(self) -> None:
        super().before_conversion()
        if self.optimizer is None:
            return
        # torch converts only parameters of its own classes.
        for name, parameter in list(self.named_parameters(recurse=False)):
            setattr(self, name, as_torch_parameter(parameter))

    def after_conversion(self) -> None:
        super().after_conversion()
        if self.optimizer is None:
            return
        self._renew_parameters()
        self.optimizer.rebind(self.weight, self.bias)
        self._guard()


_REFUSAL = (
    "a head built with update= changes its weight during backward: there is no .grad, so what needs one "
    "(clip_grad_norm_, a GradScaler, another optimizer, gradient hooks) would leave the head out. Build the head "
    "without update= to use it; or pass it the other parameters, and call head.optimizer.step() at the end of each "
    "step"
)


class UpdatedParameter(nn.Parameter):
    """A parameter whose ``.grad`` raises an error after a backward pass, until the head's optimizer has made its
    step."""

    _optimizer: HeadSGD | None = None

    @property
    def grad(self) -> None:  # type: ignore[override]
        if self._optimizer is not None and self._optimizer.gradient_went_by:
            raise RuntimeError(_REFUSAL)

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            raise RuntimeError(_REFUSAL)


def without_grad(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter that shares the memory of `parameter` and requires no gradient, for a head that updates it."""
    return UpdatedParameter(parameter.detach(), requires_grad=False)


def as_torch_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """The reverse of `without_grad`, except that the result does not require a gradient either."""
    return nn.Parameter(parameter.detach(), requires_grad=False)


def refuse_grad_when(parameter: nn.Parameter, optimizer: HeadSGD) -> None:
    """Makes reading ``parameter.grad`` an error between a backward pass and the optimizer's step."""
    parameter._optimizer = optimizer  # type: ignore[attr-defined]


class _ScaleGrad(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.scale, None


def gather_features(tensor: torch.Tensor, group: dist.ProcessGroup, grad_scale: float, sums: bool) -> torch.Tensor:
    """The ranks' tensors, concatenated along their first dimension.

    Args:
        grad_scale: multiplies the gradient of `tensor`.
        sums: whether each rank's gradient of the result is only a part of the sum. Then backward is a reduce-scatter.
            Else each rank has the full gradient, and takes that of its own samples.
    """
    if grad_scale != 1.0:
        tensor = _ScaleGrad.apply(tensor, grad_scale)
    return gather_for_sum(tensor, 0, group) if sums else gather(tensor, 0, group)


def same_ranks(one: dist.ProcessGroup, other: dist.ProcessGroup) -> bool:
    """Whether two groups are of the same processes, in the same order."""
    return dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)


_CHUNK = 1 << 22  # numbers drawn at a time


def initial_rows(
    features: int,
    classes: int,
    start: int,
    count: int,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [start, start + count) of what ``nn.Linear(features, classes, bias)`` gets from the same random seed.

    All rows are drawn in order from the default generator of the CPU, for any device, and those of other ranks are
    dropped. So a head's initial values do not depend on how it is split, nor on its device.

    Returns:
        The weight [count, features], and the bias [count] or None.
    """
    weight = torch.empty((count, features), device=device, dtype=dtype)
    fill_rows(weight, classes, start, features)
    if not bias:
        return weight, None
    biases = torch.empty(count, device=device, dtype=dtype)
    fill_rows(biases, classes, start, features)
    return weight, biases


@torch.no_grad()
def fill_rows(rows: torch.Tensor, classes: int, start: int, features: int) -> None:
    """Fills `rows`, a weight's or a bias's, with rows [start, ...) of what a layer of all `classes` gets."""
    if rows.is_meta:
        return
    limit = 1 / math.sqrt(features) if features else 0.0
    if rows.is_cpu and len(rows) == classes:  # one operation for a recorded constructor to log
        rows.uniform_(-limit, limit)
        return
    width = 1 if rows.ndim == 1 else rows.size(1)
    flat = rows.view(len(rows), width)
    step = max(1, _CHUNK // max(1, width))
    for begin in range(0, classes, step):
        end = min(classes, begin + step)
        drawn = torch.empty((end - begin, width), dtype=rows.dtype, device="cpu").uniform_(-limit, limit)
        first, last = max(begin, start), min(end, start + len(rows))
        if first < last:
            flat[first - start : last - start] = drawn[first - begin : last - begin]
