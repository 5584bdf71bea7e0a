"""The one place where a module's forward is changed, on the instance and in a stated order.

Transforms leave names, classes, parameters and hooks as they are. They put code around a module's forward, or replace
it. Each says which :class:`Role` its code has. The order of the roles decides what runs around what, whatever the order
of the calls: with recomputation and compilation, the recomputing forward is always what is compiled. The result is
built when code is added, so that a call of the module costs no more than a few nested ``functools.partial`` do.

A module's own forward is its class's, or one that the user has set on the instance. The latter is never replaced.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import partial
from typing import Any

from torch import nn

Forward = Callable[..., Any]

_RECORD = "_tensorshard_forwards"  # the key in a module's __dict__


class Role(IntEnum):
    """What code around a module's forward is for, from the innermost to the outermost."""

    FAKE_EXPERTS = auto()
    """On fake tensors: experts whose routing depends on values pretend to compute."""
    REPEATED_NOISE = auto()
    """An activation that draws does so in an operation of its own, so that a repetition can compare what it saves."""
    LOCAL_STATISTICS = auto()
    """A ``SyncBatchNorm`` computes as a plain batch normalization, which the next role synchronizes."""
    SYNCHRONIZED_STATISTICS = auto()
    """Batch statistics are those of all data ranks."""
    FP32 = auto()
    """A norm or a parametrization computes from fp32 parameters."""
    ONE_TYPE = auto()
    """Functions that want one type get it, where the module mixes 16-bit parameters with fp32 buffers."""
    ROUTED_EXPERTS = auto()
    """Experts compute the tokens of all ranks that chose them; this rank has some of the experts."""
    OWN_POSITIONS = auto()
    """Experts are given the tokens of this rank's positions of sequences, and not those of whole ones."""
    INNER_COMPILATION = auto()
    """The code that roles of tensor parallelism run inside of themselves is compiled; the roles are not."""
    SPLIT_LAYER = auto()
    """A linear layer, an embedding or an attention computes this tensor-parallel rank's part."""
    SHARED_INPUT = auto()
    """Split layers of one input are computed together, not one by one."""
    SEQUENCE_LAYER = auto()
    """A split layer takes or returns this rank's part of the sequence."""
    GATHERED_OUTPUT = auto()
    """The output of a split layer is gathered."""
    SEQUENCE_SHAPES = auto()
    """Reshapes that ask for the length of a part of the sequence get the full length."""
    LOCAL_SHAPES = auto()
    """Reshapes that ask for all ranks' features get this rank's features."""
    DIVIDED_INPUTS = auto()
    """A module gets only this rank's heads of inputs that have an entry for each head."""
    SUMMED_OUTPUT = auto()
    """The output is this rank's part of a sum over the tensor-parallel ranks."""
    GATHERED_PARAMETERS = auto()
    """A module's own parameters are gathered; this tensor-parallel rank keeps parts of them."""
    SUMMED_GRADIENTS = auto()
    """The gradients of a module's own parameters are summed over the tensor-parallel ranks."""
    GUARDED_ROWS = auto()
    """A module that reads its layers' weights directly is checked to call the split ones."""
    RANDOM_STREAM = auto()
    """Tensor-parallel ranks draw different random numbers where their activations differ."""
    SEQUENCE_INPUTS = auto()
    """A module gets full sequences, though its rank has a part."""
    SEQUENCE_WHOLE = auto()
    """A module computes full sequences. Its inputs are gathered, and its outputs cut."""
    SEQUENCE_GRADIENTS = auto()
    """The gradients of parameters that are applied to a part of the sequence are summed."""
    SEQUENCE_LENGTH = auto()
    """A block gets the length of the full sequence."""
    UNCOMPILED = auto()
    """The roles of tensor parallelism run uncompiled, between compiled code."""
    UNCOMPUTED_LOGITS = auto()
    """A model's last layer returns what its logits are computed from, not the logits."""
    TILES = auto()
    """A layer that acts on each position by itself computes a sequence in parts, and again in backward."""
    RECOMPUTATION = auto()
    """Activations are computed again in backward."""
    COMPILATION = auto()
    """Everything further in is compiled."""
    OFFLOADED_ACTIVATIONS = auto()
    """What everything further in keeps for backward goes to another tier."""
    PIPELINE_STAGE = auto()
    """A module that another stage computes is not computed here."""
    TRACE = auto()
    """Calls are noted, on a fake copy."""


TENSOR_PARALLEL_ROLES = frozenset(role for role in Role if Role.SPLIT_LAYER <= role <= Role.SEQUENCE_LENGTH)


def wrap_forward(module: nn.Module, role: Role, around: Forward) -> None:
    """Puts code around what runs further in.

    Args:
        around: called as ``around(forward, *args, **kwargs)`` with the arguments of the module's call. `forward` is
            what runs further in. It should be a positional-only parameter (``/``), since a module may have an argument
            of the same name.

    Raises:
        ValueError: the module already has code of this role, or code further out that does not call what is further in.
        RuntimeError: the module's forward was set by other code since tensorshard changed it.
    """
    _add(module, role, _Layer(partial(partial, around)))


def convert_forward(module: nn.Module, role: Role, convert: Callable[[Forward], Forward]) -> None:
    """Replaces `forward`, all that runs further in, by ``convert(forward)``, as ``torch.compile`` does.

    Args:
        convert: may be called several times, each time with a new `forward`.

    Raises:
        ValueError, RuntimeError: as :func:`wrap_forward`.
    """
    _add(module, role, _Layer(convert))


def replace_forward(module: nn.Module, role: Role, forward: Forward) -> None:
    """Runs `forward` in place of the module's own forward and of replacements further in.

    Raises:
        ValueError: the module has code of this role already; or code further in, or a forward that the user set on the
            instance, would no longer run.
        RuntimeError: as :func:`wrap_forward`.
    """
    _add(module, role, _Layer(partial(_second, forward), replaces=True))


def unwrap_forward(module: nn.Module, role: Role) -> None:
    """Takes away the code of `role` around `module`'s forward; with the last one, the module is as it was.

    Raises:
        KeyError: it has none.
        RuntimeError: as :func:`wrap_forward`.
    """
    record = _record_of(module)
    if record is None:
        raise KeyError(role.name)
    _check_is_ours(module, record)
    del record.layers[role]
    if record.layers:
        record.composed = vars(module)["forward"] = record.compose()
        return
    del vars(module)[_RECORD], vars(module)["forward"]
    if record.own_is_the_users:
        vars(module)["forward"] = record.own


def own_forward(module: nn.Module) -> Forward:
    """The forward of `module`'s class, or the one that the user set on the instance, without anything around it."""
    record = _record_of(module)
    return module.forward if record is None else record.own


def forward_within(module: nn.Module, role: Role) -> Forward:
    """What runs inside of `module`'s code of `role`."""
    record = _record_of(module)
    return module.forward if record is None else record.compose(below=role)


def roles_of(module: nn.Module) -> frozenset[Role]:
    """The roles of all code around `module`'s forward, or in its place."""
    record = _record_of(module)
    return frozenset() if record is None else frozenset(record.layers)


def replaces_forward(module: nn.Module) -> bool:
    """Whether other code runs in place of `module`'s own forward."""
    record = _record_of(module)
    return record is not None and any(layer.replaces for layer in record.layers.values())


def has_users_forward(module: nn.Module) -> bool:
    """Whether the user set a forward on the instance, which runs in place of the class's."""
    record = _record_of(module)
    return "forward" in vars(module) if record is None else record.own_is_the_users


def runs_forward_of(module: nn.Module, *classes: type[nn.Module]) -> bool:
    """Whether `module` computes what one of `classes` does: neither a subclass nor the user gave it another forward."""
    return any(type(module).forward is cls.forward for cls in classes) and not has_users_forward(module)


# -- the record of one module --


@dataclass(frozen=True)
class _Layer:
    convert: Callable[[Forward], Forward]
    replaces: bool = False


@dataclass
class _Record:
    """The parts of a module's forward.

    Args:
        own: the module's own forward.
        own_is_the_users: whether the user set it on the instance.
        composed: the forward that was last put on the instance.
    """

    own: Forward
    own_is_the_users: bool
    layers: dict[Role, _Layer] = field(default_factory=dict)
    composed: Forward | None = None

    def compose(self, below: Role | None = None) -> Forward:
        """All layers around each other; only those further in than `below`, if that is given."""
        forward = self.own
        for role in sorted(self.layers):
            if below is None or role < below:
                forward = self.layers[role].convert(forward)
        return forward


def _add(module: nn.Module, role: Role, layer: _Layer) -> None:
    record = _record_of(module)
    if record is None:
        record = _Record(module.forward, "forward" in vars(module))
    else:
        _check_is_ours(module, record)
    if role in record.layers:
        raise ValueError(f"this {_name(module)} has a forward for {role.name} already, and can have one")
    layers = {**record.layers, role: layer}
    outermost = max((r for r, other in layers.items() if other.replaces), default=None)
    if outermost is not None:
        lost = [r.name for r, other in layers.items() if r < outermost and not other.replaces]
        if record.own_is_the_users:
            lost.insert(0, "a forward that was set on the instance")
        if lost:
            raise ValueError(
                f"the forward for {outermost.name} replaces that of this {_name(module)}, which would lose "
                f"{', '.join(lost)}"
            )
    record.layers = layers
    record.composed = record.compose()
    # Not by Module.__setattr__: a wrapper such as torch.compile's OptimizedModule would pass it on to its module.
    vars(module)[_RECORD] = record
    vars(module)["forward"] = record.composed


def _check_is_ours(module: nn.Module, record: _Record) -> None:
    if vars(module).get("forward") is not record.composed:
        raise RuntimeError(
            f"the forward of this {_name(module)} was set after tensorshard had changed it; set forwards before "
            f"parallelize, around which the rest is then put"
        )


def _record_of(module: nn.Module) -> _Record | None:
    return vars(module).get(_RECORD)


def _second(forward: Forward, _: Forward) -> Forward:
    return forward


def _name(module: nn.Module) -> str:
    return type(module).__name__
