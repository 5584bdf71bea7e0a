"""Mixtures whose experts are modules in a list, which the module around them calls with any of the tokens.

Nothing is known of that module but what it computes. So every rank gives it the tokens of all ranks, and it calls the
rank's own experts; the others return zeros. A second run, in which all experts return zeros, tells what the module
computes besides (shared experts, residual branches, a router's logits). With `o[r]` the result on rank `r` of `N`, and
`b` that of the second run, the sum over the ranks of `o[r] - b * (N - 1) / N` is what the whole module gives, and its
gradients are those of the whole module.

Where the module draws random numbers, both runs draw the same ones on all ranks of a group, from a seed that they
share. Each call of an expert, also of one that another rank has, takes a seed from these, from which it draws. The
global stream moves on by one number alone.

Also here: what checks by numbers share: values, gradients, and comparison.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from tensorshard.comm.collectives import broadcast_
from tensorshard.comm.primitives import exchange_sizes
from tensorshard.comm.world import world
from tensorshard.common.words import is_inside, join_names
from tensorshard.expert_parallel.exchange import exchange_rows
from tensorshard.model.blocks import find_blocks
from tensorshard.model.forwards import Forward, Role, wrap_forward
from tensorshard.random.call_sites import current_randomness
from tensorshard.random.rank_stream import seeded
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.pytree import tree_map, tree_tensors

_MANY_TOKENS, _SOME_TOKENS = 300, 11  # in checks; the first exceed what an expert may take at most, if it is limited
_DRAWS = {"bernoulli", "rand", "randn", "uniform", "normal", "exponential"}  # operators; also as "_" and "_like"
_LARGE = 1 << 26  # elements of a module outside of all blocks that is not tried, as it may be the model's main part
MODEL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError)
"""What code raises that is called in a way that it does not expect."""

_TOLERANCE = 1e-4
_LARGE_PARAMETER = 1 << 22  # elements; larger ones are checked with values that repeat, and without their own gradients


@dataclass(frozen=True)
class ListedExperts:
    """How a module calls the experts in its list.

    Args:
        members: the experts' names, relative to the module.
        features: how many an expert returns for a token.
        dims: how many dimensions the module's input has at least: 2 for [tokens, features], or 3.
        ranks: how many share the experts.
        draws: whether the module draws random numbers, as dropout does.
    """

    members: tuple[str, ...]
    features: int
    dims: int
    ranks: int
    draws: bool = False

    @property
    def experts(self) -> int:
        """How many there are."""
        return len(self.members)

    @property
    def token_repeats(self) -> int:
        """How often the module is given all tokens, one after the other."""
        return 1

    def owner(self, index: int) -> int:
        """The rank that has the expert at `index`."""
        return index * self.ranks // len(self.members)

    def owners(self, module: nn.Module) -> dict[torch.Tensor, int | None]:
        """Which rank has which of the experts' parameters in `module`."""
        return {
            p: self.owner(index)
            for index, name in enumerate(self.members)
            for p in module.get_submodule(name).parameters()
        }

    def split(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        """Makes `module` compute this rank's experts, for the tokens of all ranks of `group`."""
        switch = _Switch()
        for index, name in enumerate(self.members):
            is_own = self.owner(index) == group.rank()
            around = partial(_call_expert, switch, is_own, name, self)
            wrap_forward(module.get_submodule(name), Role.ROUTED_EXPERTS, around)
        wrap_forward(module, Role.ROUTED_EXPERTS, partial(_compute, module, self, switch, group))

    def describe(self, ranks: int) -> str:
        """A few words, for people."""
        count = len(self.members)
        return (
            f"{count} experts in a list, {count // ranks} on each of {ranks} ranks; each rank gives the module the "
            f"tokens of all, twice"
        )


class _Switch:
    """Which experts compute: None outside of their module's forward, else whether this rank's own do."""

    def __init__(self) -> None:
        self.own_compute: bool | None = None

    @contextmanager
    def set(self, own_compute: bool, seed: int | None, device: torch.device) -> Iterator[None]:
        """Within this, random numbers are drawn from `seed`, if it is given."""
        before, self.own_compute = self.own_compute, own_compute
        try:
            with drawing_from(seed, device):
                yield
        finally:
            self.own_compute = before


@contextmanager
def drawing_from(seed: int | None, device: torch.device) -> Iterator[None]:
    """Within this, the CPU and `device` draw from `seed`; afterwards they go on as before. Nothing changes for None."""
    if seed is None:
        yield
        return
    with seeded(seed, device):
        yield


def draw_seed(group: dist.ProcessGroup | None = None) -> int | None:
    """A seed from the stream; with `group`, all its ranks draw and take that of the first. None in an estimate.

    It travels on the CPU, where the group can: a read from a GPU would wait for it.
    """
    if world().is_simulated:
        return None
    seed = torch.randint(1 << 62, (1,), generator=torch.default_generator)
    if group is not None:
        broadcast_(seed, group)
    return int(seed.item())


def _call_expert(
    switch: _Switch, is_own: bool, name: str, experts: ListedExperts, forward: Forward, /, tokens: torch.Tensor
) -> torch.Tensor:
    seed = draw_seed() if experts.draws else None
    if is_own and switch.own_compute is not False:
        with drawing_from(seed, tokens.device):
            return forward(tokens)  # type: ignore[no-any-return]
    if switch.own_compute is None:
        raise RuntimeError(
            f"expert {name!r} was called from outside of the module that it belongs to, and ep={experts.ranks} gave it "
            f"to another rank: call the module, or set ep=1"
        )
    kind = tokens.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tokens.dtype
    return tokens.new_zeros((*tokens.shape[:-1], experts.features), dtype=dtype)


def _compute(
    module: nn.Module,
    experts: ListedExperts,
    switch: _Switch,
    group: dist.ProcessGroup,
    forward: Forward,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    given = [*args, *kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], torch.Tensor) or given[0].dim() < experts.dims:
        shown = [list(v.shape) if isinstance(v, torch.Tensor) else v for v in given]
        raise TypeError(
            f"{type(module).__name__} was called with {shown}, and ep splits its experts where it is called with "
            f"tokens alone, of {experts.dims} dimensions or more; set ep=1"
        )
    tokens: torch.Tensor = given[0]
    rows, ranks = tokens.reshape(-1, tokens.size(-1)), group.size()
    sent, received = [len(rows)] * ranks, exchange_sizes(len(rows), group, torch.device("cpu"))
    source = current_randomness()
    numbered = None if source is None else source.rows or source.rows_of_samples(tokens)
    outgoing = [rows.repeat(ranks, 1), *([] if numbered is None else [numbered.numbers.repeat(ranks)])]
    everyone, *numbers = exchange_rows(outgoing, sent, received, group)
    everyone = everyone.view(*(1 for _ in range(experts.dims - 2)), *everyone.shape)
    call = partial(forward, **{next(iter(kwargs)): everyone}) if kwargs else partial(forward, everyone)
    seed = draw_seed(group) if experts.draws else None
    of_tokens: AbstractContextManager[None] = nullcontext()
    if source is not None and numbered is not None:
        of_tokens = source.rows_are(everyone, numbers[0], numbered.per_sample)
    with of_tokens:
        with switch.set(True, seed, tokens.device), _drawn_again():
            result = call()
        with switch.set(False, seed, tokens.device):
            rest = iter(tree_tensors(call()))

    def finish(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        besides = next(rest)
        leading = experts.dims - 1 if leaf.dim() == everyone.dim() and leaf.shape[:-1] == everyone.shape[:-1] else 1
        shape = (*tokens.shape[:-1], *leaf.shape[leading:]) if leading > 1 else (len(rows), *leaf.shape[1:])
        flat = leaf.flatten(0, leading - 1)
        if not leaf.is_floating_point():
            return flat.split(received)[group.rank()].view(shape)
        part = flat - besides.flatten(0, leading - 1) * ((ranks - 1) / ranks)
        (back,) = exchange_rows([part], received, sent, group)
        return back.view(ranks, len(rows), *flat.shape[1:]).sum(0).view(shape)

    return tree_map(finish, result)


def _drawn_again() -> AbstractContextManager[None]:
    source = current_randomness()
    return nullcontext() if source is None else source.repeated()


# -- which modules have lists of experts --


def find_lists(model: nn.Module, ranks: int) -> tuple[dict[str, ListedExperts], str | None]:
    """The modules of `model` whose lists of experts can be split over `ranks`, by name; and why another cannot be.

    Args:
        model: on the meta device.

    Raises:
        ValueError: there are experts which are no equal parts.
    """
    blocks = list(find_blocks(model))
    names = {module: name for name, module in model.named_modules()}
    lists: dict[str, ListedExperts] = {}
    known: dict[object, ListedExperts | str] = {}
    reason: str | None = None
    for module, name in names.items():
        for key, child in module.named_children():
            if not _may_be_experts(child) or any(is_inside(name, [other]) for other in lists):
                continue
            large = sum(p.numel() for p in module.parameters()) > _LARGE
            if large and not is_inside(name, blocks):
                continue
            members = tuple(join_names(key, inner) for inner, each in child.named_children() if list(each.parameters()))
            kind = (type(module), members, tuple(tuple(p.shape) for p in module.parameters()), _settings(module))
            if kind not in known:
                known[kind] = _find_call(module, members, ranks)
            call = known[kind]
            if isinstance(call, ListedExperts):
                check_equal_parts(name, module, len(members), ranks)
                lists[name] = call
            elif call:
                reason = f"the list {join_names(name, key)!r} is no list of experts: {call}"
    return lists, reason


def _may_be_experts(child: nn.Module) -> bool:
    if not isinstance(child, nn.ModuleList | nn.ModuleDict):
        return False
    members = [member for member in child.children() if list(member.parameters())]
    shapes = [[tuple(p.shape) for p in member.parameters()] for member in members]
    own = {p for member in members for p in member.parameters()}
    return (
        len(members) > 1
        and len({type(member) for member in members}) == 1
        and all(each == shapes[0] for each in shapes)
        and len(own) == len(members) * len(shapes[0]) > 0
        and all(p.dim() > 0 for p in own)
    )


def _settings(module: nn.Module) -> tuple[tuple[str, object], ...]:
    return tuple((k, v) for k, v in vars(module).items() if isinstance(v, bool | int | float | str))


def _find_call(module: nn.Module, members: tuple[str, ...], ranks: int) -> ListedExperts | str:
    """How `module` calls its experts; or why they cannot be split, "" if it does not even run on tokens."""
    widths = dict.fromkeys(p.size(-1) for p in module.parameters() if p.dim() > 1)
    reason = ""
    for dims in (3, 2):
        for width in widths:
            run = _Run(module, members, width, dims)
            try:
                with torch.random.fork_rng(devices=[]):  # one rank searches; all draw the same afterwards
                    failed = run.why_not(min(ranks, len(members)))
            except MODEL_ERRORS:
                continue
            if failed is None:
                return ListedExperts(members, run.features, dims, ranks, run.draws)
            reason = failed
    return reason


class _Run:
    """Runs of a module on tokens of `width` features, with some of its experts.

    Attributes:
        features: how many an expert has returned for a token.
        draws: whether the module draws random numbers.
    """

    def __init__(self, module: nn.Module, members: Sequence[str], width: int, dims: int) -> None:
        self._module, self._members, self._width, self._dims = module, members, width, dims
        self._random = torch.Generator().manual_seed(0)
        self._values = {name: random_values(p, self._random) for name, p in module.named_parameters()}
        self._buffers = {name: torch.zeros(b.shape, dtype=b.dtype) for name, b in module.named_buffers()}
        self.features = 0
        self.draws = False

    def why_not(self, ranks: int) -> str | None:
        tokens = self._tokens(_SOME_TOKENS), self._tokens(1).expand(_MANY_TOKENS, -1), self._tokens(_SOME_TOKENS)
        self.draws = self._changes(tokens[0])
        if not self.features:
            return "it does not call them"
        if not self.draws:
            return self._why_not(ranks, *tokens)
        for value in (1.0, 0.0):
            with _EqualDraws(value):
                if self._changes(tokens[0]):
                    return (
                        "the module keeps something of a call, or draws random numbers that are no dropout or noise "
                        "of torch's"
                    )
                failed = self._why_not(ranks, *tokens)
                if failed is not None:
                    return failed
        return None

    def _changes(self, tokens: torch.Tensor) -> bool:
        """Whether a second call with other random numbers gives another result."""
        first = self._call(tokens)
        torch.manual_seed(torch.initial_seed() % (1 << 31) + 1)
        return first_difference(self._call(tokens), first) is not None

    def _why_not(self, ranks: int, some: torch.Tensor, many: torch.Tensor, other: torch.Tensor) -> str | None:
        first = self._call(some)
        both = zip(self._call(torch.cat([some, other])), first, self._call(other), strict=True)
        by_itself = [(one, torch.cat([a, b])) for one, a, b in both]
        one = self._call(many[:1])
        by_itself += [(each, alone.expand_as(each)) for each, alone in zip(self._call(many), one, strict=True)]
        if first_difference(*zip(*by_itself, strict=True)) is not None:
            return "what the module computes for a token depends on the others, as where experts take a limited number"
        for given_tokens in (some, many[:_SOME_TOKENS]):
            tokens = given_tokens.clone().requires_grad_()
            leaves = [tokens, *(v for v in self._values.values() if v.requires_grad)]
            expected = self._call(tokens)
            owners = [index * ranks // len(self._members) for index in range(len(self._members))]
            besides = self._call(tokens, ())
            parts = [self._call(tokens, [m for m, o in zip(self._members, owners, strict=True) if o == rank])
                     for rank in range(ranks)]  # fmt: skip
            sums = [
                sum((part - rest * ((ranks - 1) / ranks) for part in each), start=torch.zeros(()))
                for rest, *each in zip(besides, *parts, strict=True)
            ]
            if first_difference(sums, expected) is not None:
                return "the module's output is not the sum of what its experts make of tokens"
            given, wanted = (gradients_of(torch.cat([t.flatten() for t in r]), leaves) for r in (sums, expected))
            if first_difference(given, wanted) is not None:
                return "the module's gradients are not the sums of its experts'"
        return None

    def _tokens(self, count: int) -> torch.Tensor:
        return torch.randn(count, self._width, generator=self._random)

    def _call(self, tokens: torch.Tensor, active: Sequence[str] | None = None) -> list[torch.Tensor]:
        """The floating-point tensors of the output, each [tokens, features]."""
        hooks = []
        for name in self._members:
            counts = active is None or name in active
            hooks.append(self._module.get_submodule(name).register_forward_hook(partial(self._called, counts)))
        given = tokens.view(*(1 for _ in range(self._dims - 2)), *tokens.shape)
        buffers = {name: buffer.clone() for name, buffer in self._buffers.items()}
        was_training = self._module.training
        self._module.train()
        try:
            output = functional_call(self._module, {**self._values, **buffers}, (given,))
        finally:
            self._module.train(was_training)
            for hook in hooks:
                hook.remove()
        if any(not torch.equal(buffer, self._buffers[name]) for name, buffer in buffers.items()):
            raise ValueError("its forward changes buffers")
        results = [leaf for leaf in tree_tensors(output) if leaf.is_floating_point()]
        if not results or any(leaf.numel() % len(tokens) or leaf.dim() < 2 for leaf in results):
            raise ValueError("what it returns has no entry for each token")
        if results[0].shape != given.shape:
            raise ValueError("it does not return tokens as it got them")
        for leaf in tree_tensors(output):
            if len(tokens) not in leaf.shape[: self._dims - 1]:
                raise ValueError("what it returns has no entry for each token")
        return [leaf.reshape(len(tokens), -1) for leaf in results]

    def _called(self, counts: bool, expert: nn.Module, args: Any, output: Any) -> torch.Tensor:
        if len(args) != 1 or not isinstance(output, torch.Tensor) or output.shape[:-1] != args[0].shape[:-1]:
            raise ValueError("its experts do not take and return tokens alone")
        self.features = output.size(-1)
        return output if counts else torch.zeros_like(output)


class _EqualDraws(TorchDispatchMode):
    """Within this, the numbers that an operator draws are all equal, so that a check can compare calls.

    They are all 1 or all 0: dropout keeps everything, or nothing.
    """

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removesuffix("_like").rstrip("_")
        if name in _DRAWS and isinstance(result, torch.Tensor) and result.is_floating_point():
            result.fill_(self._value)
        return result


def check_equal_parts(name: str, module: nn.Module, experts: int, ranks: int) -> None:
    """Refuses experts of which ranks would have different numbers.

    Raises:
        ValueError: `experts` are no multiple of `ranks`.
    """
    if experts % ranks:
        ways = [str(n) for n in range(2, experts + 1) if experts % n == 0]
        raise ValueError(
            f"ep={ranks} was given, but the experts of {name!r} ({type(module).__name__}) cannot be split over {ranks} "
            f"ranks: there are {experts}, which are not equal parts; ep can be {', '.join(ways)}"
        )


def random_values(parameter: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Values of a parameter on the meta device; large ones repeat and take no memory."""
    fan_in = parameter.shape[-1] if parameter.dim() else 1
    if parameter.numel() <= _LARGE_PARAMETER:
        values = torch.randn(parameter.shape, generator=random) / math.sqrt(fan_in)
        return values.requires_grad_()
    kept = max(1, parameter.dim() - 1)
    rows = torch.randn(*parameter.shape[:kept], *(1 for _ in parameter.shape[kept:]), generator=random)
    return (rows / fan_in).expand(parameter.shape)


def gradients_of(output: torch.Tensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients by `leaves` of a sum of the elements of `output`, each with another weight."""
    upstream = torch.linspace(-1, 1, output.numel()).view(output.shape).cos()
    return list(torch.autograd.grad(output, list(leaves), upstream, allow_unused=True, materialize_grads=True))


def first_difference(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> int | None:
    """The index of the first of `results` that is not as `expected`; None if all are."""
    for index, (one, other) in enumerate(zip(results, expected, strict=True)):
        scale = max(1e-3, other.abs().max().item()) if other.numel() else 1.0
        if not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * scale):
            return index
    return None


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Within this, `module` is in evaluation mode."""
    modes = {inner: inner.training for inner in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for inner, training in modes.items():
            inner.training = training
