"""The optimizer that a head runs inside its own backward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tensorshard.comm.marks import get_mark
from tensorshard.comm.sharded_tensors import own_group, own_shard, refuse_foreign_shard
from tensorshard.loss.heads.update_rule import ParameterShard, Rule, Update, finish_step
from tensorshard.loss.kernels import Noise, block_size, dequantize, quantize
from tensorshard.loss.tiles import Tiles, tile_width

MOMENTUM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
_OPTIONS = ("lr", "momentum", "weight_decay", "momentum_dtype", "seed")
_MOMENTUM, _SCALES = "momentum_buffer", "momentum_scales"


class HeadSGD(torch.optim.Optimizer):
    """``torch.optim.SGD`` with momentum, run tile by tile in a head's backward pass: no gradient tensor exists.

    Learning-rate schedulers take it. Its state is that of ``torch.optim.SGD`` (``momentum_buffer``), so a run may
    change between the two. Backward makes the update. :meth:`step` makes an update that :meth:`accumulate` has put off,
    and marks the end of the step. Call it where you call the other optimizer's.

    Args:
        weight, bias: of the head.
        lr: learning rate.
        momentum: its factor.
        weight_decay: added to the gradient times the weight, of weight and bias alike.
        momentum_dtype: of the weight's momentum: "fp32" (fp64 for fp64 weights), "bf16", rounded stochastically, or
            "int8", in blocks with one scale each. The bias has the first.
        seed: of stochastic rounding.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        momentum_dtype: str = "fp32",
        seed: int = 0,
    ) -> None:
        _check(weight, lr, momentum, weight_decay, momentum_dtype)
        defaults = dict(
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            momentum_dtype=momentum_dtype,
            seed=seed,
            step=0,  # steps so far, with a complete one that is not ended yet; for the seeds of rounding
            pending=False,  # whether the momentum has micro-batches of a step that is not complete
        )
        super().__init__([weight] if bias is None else [weight, bias], defaults)

    row_states = (_SCALES,)
    """States with a row for each row of a parameter, though not of its shape."""

    # The state within one step. A copy of the optimizer begins with these values: it copies only the groups.
    _accumulating = False
    _gradient_went_by = False  # whether backward has run since the last call of `step`
    _passes = 0  # backward passes since then

    @classmethod
    def from_options(cls, weight: torch.Tensor, bias: torch.Tensor | None, options: dict[str, Any]) -> "HeadSGD":
        """Makes the optimizer from a head's ``update=``.

        Raises:
            ValueError: an option is unknown or out of its range, or `lr` is missing.
        """
        unknown = [name for name in options if name not in _OPTIONS]
        if unknown or "lr" not in options:
            what = f"the unknown {', '.join(map(repr, unknown))}" if unknown else "no 'lr'"
            raise ValueError(
                f"update= was given {what}: it runs SGD with momentum and takes {', '.join(_OPTIONS)}. For another "
                "rule leave update= out and give the head's parameters to an optimizer"
            )
        return cls(weight, bias, **options)

    @property
    def group(self) -> dict[str, Any]:
        """The one parameter group: ``lr`` and the other options, to be read and changed."""
        return self.param_groups[0]

    def options(self) -> dict[str, Any]:
        """The options of ``update=`` with their present values."""
        return {name: self.group[name] for name in _OPTIONS}

    def rebind(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Takes new objects as the head's parameters, as after a move to another device, and moves its state."""
        parameters = [weight] if bias is None else [weight, bias]
        for old, new in zip(self.group["params"], parameters, strict=True):
            state = self.state.pop(old, {})
            moved = {k: v.to(new.device) for k, v in state.items()}
            if moved:
                self.state[new] = moved
        self.group["params"] = parameters

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether this optimizer updates `weight`."""
        return self.group["params"][0] is weight

    @property
    def gradient_went_by(self) -> bool:
        """Whether backward has run since the last :meth:`step`. Its gradient can no longer be read."""
        return self._gradient_went_by

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """A context in which backward passes accumulate gradients. The first one outside it, or :meth:`step`, ends the
        step."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def check_unchanged(self, step: int) -> None:
        """Refuses the backward pass of a forward that ran at another step: ``group["step"]`` was `step` then.

        Raises:
            RuntimeError: the weight has been updated since.
        """
        if step != self.group["step"]:
            raise RuntimeError(
                "the head's weight was updated between this loss's forward and its backward, by another backward: with "
                "update= every backward outside head.accumulate() is a step. Run all but the last backward of a step "
                "under `with head.accumulate():`, or all of them and then head.optimizer.step()"
            )

    def begin(self, tiles: Tiles) -> Update:
        """The sink that takes the gradients of a backward pass."""
        group = self.group
        weight, bias = self._parameter_shards()
        rule = Rule(
            keep=1.0 if group["pending"] else float(group["momentum"]),
            complete=not self._accumulating,
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
        )
        return Update(tiles, weight, bias, rule, self._seed())

    def end(self) -> None:
        """Called when the backward pass of the last `begin` is over."""
        group = self.group
        self._passes += 1
        group["pending"] = self._accumulating
        group["step"] += int(not self._accumulating)
        self._gradient_went_by = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Ends the step. If micro-batches were accumulated, and the weight was not updated yet, this updates it.

        Args:
            closure: as in any optimizer; called first.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group = self.group
        if group["pending"]:
            weight, bias = self._parameter_shards()
            rule = Rule(1.0, True, float(group["lr"]), float(group["weight_decay"]))
            features = weight.weight.size(1)
            finish_step(weight, bias, rule, self._seed(), tile_width(features, features, weight.weight.device))
            group["pending"] = False
            group["step"] += 1
        self._passes = 0
        self._gradient_went_by = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: there is no gradient.

        Raises:
            RuntimeError: micro-batches were accumulated. They are in the momentum, and cannot be removed from it.
        """
        if self.group["pending"]:
            raise RuntimeError(
                "zero_grad() was called on a head's optimizer in the middle of a step: the gradients accumulated so "
                "far are in its momentum and cannot be dropped. Call step() first"
            )

    def state_bytes(self) -> int:
        """Bytes of this rank's momentum."""
        tensors = (value for state in self.state.values() for value in state.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def state_dict(self) -> dict[str, Any]:
        """The state dict, in the form of ``torch.optim.SGD``, which can load it."""
        state = super().state_dict()
        plain = torch.optim.SGD([torch.empty(0)], lr=1.0).defaults
        state["param_groups"] = [{**plain, **group} for group in state["param_groups"]]
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes its own state or that of a ``torch.optim.SGD`` of the same parameters, full or in shards.

        A momentum of another type is converted.

        Raises:
            ValueError: the state is of other parameters, or of an SGD with options that this one does not have.
        """
        groups = state_dict["param_groups"]
        names = [name for group in groups for name in group["params"]]
        if len(groups) != 1 or len(names) != len(self.group["params"]):
            raise ValueError(
                f"the state of {len(names)} parameters in {len(groups)} groups was given to a head's optimizer of "
                f"{len(self.group['params'])} in one group"
            )
        refused = {k: groups[0].get(k) for k in ("dampening", "nesterov", "maximize") if groups[0].get(k)}
        if refused or groups[0].get("pending"):
            raise ValueError(
                f"the state of an SGD with {refused} was given: a head's optimizer has none of these"
                if refused
                else "the state was taken in the middle of a step: take it after step()"
            )
        for name, parameter in zip(names, self.group["params"], strict=True):
            given = state_dict["state"].get(name, {})
            if given.get(_MOMENTUM) is None:
                self.state.pop(parameter, None)
            else:
                self._load(parameter, given[_MOMENTUM], given.get(_SCALES))
        for option in ("lr", "momentum", "weight_decay", "seed", "step"):
            if option in groups[0]:
                self.group[option] = groups[0][option]
        if "initial_lr" in groups[0]:  # set by a scheduler
            self.group["initial_lr"] = groups[0]["initial_lr"]

    def _load(self, parameter: torch.Tensor, momentum: torch.Tensor, scales: torch.Tensor | None) -> None:
        given, own = _rows_like(momentum, parameter), self._parameter_shard(parameter)
        if scales is not None:
            own_scales = _rows_like(scales, parameter)
            if own.scales is not None:
                own.momentum.copy_(given)
                own.scales.copy_(own_scales)
                return
            given = dequantize(given, own_scales, out=torch.empty_like(given, dtype=torch.float32))
        if own.scales is None:
            own.momentum.copy_(given)
            return
        values = given.to(own.scales.device, torch.float32, copy=True).contiguous()
        noise = Noise(values.numel(), 0, values.device)
        quantize(values, noise.bits(values.shape), torch.empty_like(values), own.momentum, own.scales)

    def _seed(self) -> int:
        """The seed of the rounding in the next pass; never the same twice."""
        return hash((self.group["seed"], self.group["step"], self._passes)) & 0x7FFF_FFFF_FFFF_FFFF

    def _parameter_shards(self) -> tuple[ParameterShard, ParameterShard | None]:
        shards = [self._parameter_shard(parameter) for parameter in self.group["params"]]
        return shards[0], shards[1] if len(shards) > 1 else None

    def _parameter_shard(self, parameter: torch.Tensor) -> ParameterShard:
        """A parameter's shard and its momentum, made at first use."""
        state, local = self.state[parameter], parameter.detach()
        if _MOMENTUM not in state:
            wide = torch.float64 if local.dtype == torch.float64 else torch.float32
            kind = MOMENTUM_DTYPES[self.group["momentum_dtype"]]
            narrow = kind != torch.float32 and local.ndim == 2
            state[_MOMENTUM] = torch.zeros_like(local, dtype=kind if narrow else wide)
            if narrow and kind == torch.int8:
                blocks = local.size(1) // block_size(local.size(1))
                state[_SCALES] = local.new_zeros((len(local), blocks), dtype=torch.float32)
        return ParameterShard(local, state[_MOMENTUM], state.get(_SCALES))


def _check(weight: torch.Tensor, lr: float, momentum: float, weight_decay: float, momentum_dtype: str) -> None:
    if weight.dtype == torch.float16:
        raise ValueError(
            "update= was given for a weight in fp16, whose losses have to be scaled and whose steps are skipped when "
            "they overflow: an update in backward cannot be taken back. Use bf16 or fp32, or leave update= out"
        )
    limits = (("lr", lr, 0, None), ("momentum", momentum, 0, 1), ("weight_decay", weight_decay, 0, None))
    for name, value, low, high in limits:
        if not value >= low or (high is not None and value >= high):
            raise ValueError(f"update= was given {name}={value}: use {low} or more" + (", below 1" if high else ""))
    if momentum_dtype not in MOMENTUM_DTYPES:
        raise ValueError(f"update= was given momentum_dtype={momentum_dtype!r}: use one of {list(MOMENTUM_DTYPES)}")
    if weight.dtype == torch.float64 and momentum_dtype != "fp32":
        raise ValueError(f"momentum_dtype={momentum_dtype!r} was given for a weight in fp64: leave it out there")


def _rows_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a parameter's state, which is given in full or as a shard.

    Raises:
        ValueError: it has another number of rows, or those of another rank.
    """
    mark, rows = get_mark(parameter), len(parameter)
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if mark is not None:
        refuse_foreign_shard(value, own_group(parameter), "a momentum")
        if len(value) != rows and len(value) == mark.size:
            value = own_shard(value, mark)
    if len(value) != rows:
        shape = list(parameter.shape)
        if mark is not None and mark.size is not None:
            shape[0] = mark.size
        raise ValueError(
            f"a momentum of {len(value)} rows was given for a parameter of {shape}, of which this rank holds {rows} "
            "rows"
        )
    return value.to(parameter.device)
