"""Layers that act on each position by itself, such as MLPs and norms, compute a sequence a tile at a time, and again in
backward. So only a tile's intermediate results are in memory (Bekman et al., Arctic Long Sequence Training, 2025)."""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tensorshard.context_parallel.sequence_tensor import SequenceTensor
from tensorshard.model.blocks import is_transposed
from tensorshard.model.forwards import Forward, Role, runs_forward_of, wrap_forward
from tensorshard.model.reachable_state import is_foreign
from tensorshard.torch_private.autograd import is_function_transformed
from tensorshard.torch_private.fake_tensors import fake_device
from tensorshard.torch_private.modules import buffer_names, forward_hooks, has_functional_weights, registrations

logger = logging.getLogger("tensorshard")

_PROBE = 8  # positions
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def apply_tiles(blocks: Sequence[nn.Module], tiles: int, names: Mapping[nn.Module, str]) -> None:
    """Makes MLPs inside of `blocks`, and norms anywhere, compute in so many tiles.

    Each is tried at its first call: with random weights, it must compute the same of a few positions together and of
    two parts of them. One that does not is left as it is; the log says so at the level of information.

    Raises:
        ValueError: there are none.
    """
    if tiles == 1:
        return
    inside = {module for block in blocks for module in block.modules()}
    modules = [module for block in blocks for module in _candidates(block)]
    modules += [module for module in names if module not in inside and _is_norm(module)]
    if not modules:
        raise ValueError(
            f"tiles={tiles} was given, but no block of the model has a norm, or a module of linear layers, of its own; "
            f"put the MLP into a module that takes and returns one tensor [samples, positions, features], or leave "
            f"tiles at 1"
        )
    for module in dict.fromkeys(modules):
        name = f"{names.get(module, '?')!r} ({type(module).__name__})"
        wrap_forward(module, Role.TILES, partial(_in_tiles, _Tiled(module, name, tiles)))


def _candidates(module: nn.Module) -> Iterable[nn.Module]:
    """The outermost modules that may act on each position by itself."""
    inner = list(module.modules())
    linear = [each for each in inner if runs_forward_of(each, nn.Linear) or is_transposed(each)]
    weights = list(module.parameters())
    flat = weights and all(weight.ndim <= 2 for weight in weights)
    lists = any(isinstance(each, nn.ModuleList | nn.ModuleDict) or buffer_names(each) for each in inner)
    if flat and not lists and (_is_norm(module) or (len(linear) > 1 and module not in linear)):
        # Attention has such layers, too: its parts are tried apart when it turns out to relate positions.
        yield module
    for child in module.children():
        yield from _candidates(child)


def _is_norm(module: nn.Module) -> bool:
    return not any(module.children()) and "norm" in type(module).__name__.lower() and not buffer_names(module)


class _Tiled:
    """What is known of one module.

    Args:
        name: for messages.
        tiles: how many there are.
    """

    def __init__(self, module: nn.Module, name: str, tiles: int) -> None:
        self.module, self.name, self.tiles = module, name, tiles
        self._fits: bool | None = None
        self._modules = list(module.modules())
        self._tables = [table for table in registrations(module.modules())[::2] if table]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Tiled, (self.module, self.name, self.tiles)

    def takes(self, x: Any) -> bool:
        """Whether this call is computed in tiles."""
        if type(x) is not torch.Tensor and fake_device(x) is None:
            return False
        if self._fits is False or x.ndim != 3 or not x.is_floating_point() or x.shape[1] < 2 or _inside.depth:
            return False
        if is_function_transformed() or torch.compiler.is_compiling() or any(map(_is_watched, self._modules)):
            return False
        if any("Dropout" in type(each).__name__ and each.training and getattr(each, "p", 0) for each in self._modules):
            return False
        if has_functional_weights(self._tables):
            return False
        if self._fits is None and fake_device(x) is None and not x.is_meta:
            self._fits = self._acts_on_positions(x)
        return self._fits is not False

    def parameters(self) -> list[nn.Parameter]:
        """Those that get gradients, as they are now."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def _acts_on_positions(self, x: torch.Tensor) -> bool:
        why = self._why_not(x[:, :_PROBE])
        logger.info("tiles=%d: %s %s", self.tiles, self.name, f"is computed at once: {why}" if why else "is tiled")
        return not why

    def _why_not(self, some: torch.Tensor) -> str:
        generator = torch.Generator(some.device).manual_seed(0)
        weights = {
            name: torch.randn(weight.shape, generator=generator, device=weight.device).to(weight.dtype)
            / max(1, weight.shape[-1]) ** 0.5
            for name, weight in self.module.named_parameters()
        }  # an output layer of zeros would hide what it is given
        kept = [dict(vars(each)) for each in self.module.modules()]
        parts = (some, *some.tensor_split(2, 1))
        try:
            with torch.random.fork_rng([some.device] if some.device.type == "cuda" else []), _inside:
                outs = [torch.func.functional_call(self.module, weights, (part.contiguous(),)) for part in parts]
        except Exception as error:
            return f"it takes no part of the positions: {error}"
        for out, part in zip(outs, parts, strict=True):
            if not isinstance(out, torch.Tensor) or out.shape[:2] != part.shape[:2]:
                return "it does not return one tensor of the positions that it gets"
        whole, joined = outs[0].double(), torch.cat(outs[1:], 1).double()
        scale = float(whole.abs().max())
        if not torch.allclose(whole, joined, rtol=0.0, atol=_TOLERANCE.get(some.dtype, 1e-4) * scale):
            return "what it computes of a position depends on others, or is random"
        now = [dict(vars(each)) for each in self.module.modules()]
        if any(new.keys() != old.keys() or any(new[key] is not old[key] for key in old)
               for new, old in zip(now, kept, strict=True)):  # fmt: skip
            return "it keeps something of a call"
        return ""


def _is_watched(module: nn.Module) -> bool:
    """Whether the user's hooks see calls of `module`."""
    hooks = (hook.func if isinstance(hook, partial) else hook for hook in forward_hooks(module))
    return not all(is_foreign(getattr(hook, "__module__", None)) for hook in hooks)


class _Inside(threading.local):
    """Whether this thread computes a tile. Modules inside of it compute that at once."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1


_inside = _Inside()


def _in_tiles(tiled: _Tiled, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs:
        return forward(*args, **kwargs)
    (x,) = args
    if isinstance(x, SequenceTensor):
        if x.split_dim != 1 or not tiled.takes(x.local):
            return forward(x)
        return x.like(_tiles_of(tiled, forward, x.local))
    return _tiles_of(tiled, forward, x) if tiled.takes(x) else forward(x)


def _tiles_of(tiled: _Tiled, forward: Forward, x: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        with _inside:
            return _compute(tiled, forward, x)
    out: torch.Tensor = _Tiles.apply(tiled, forward, x, *tiled.parameters())
    return out


def _compute(tiled: _Tiled, forward: Forward, x: torch.Tensor) -> torch.Tensor:
    """The whole output. Its memory is taken once, before the second tile is computed."""
    whole, at = None, 0
    for part in x.tensor_split(min(tiled.tiles, x.shape[1]), 1):
        out = forward(part.contiguous())
        if whole is None:
            whole = out.new_empty(*x.shape[:2], *out.shape[2:])
        whole[:, at : at + part.shape[1]] = out
        at += part.shape[1]
    assert whole is not None
    return whole


class _Tiles(torch.autograd.Function):
    """All tiles. Backward computes each again, and adds the gradients of weights in fp32."""

    @staticmethod
    def forward(ctx: Any, tiled: _Tiled, forward: Forward, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        kind = x.device.type
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # Without its cache, whose casts of now would have no gradients later.
        autocast = partial(torch.autocast, kind, dtype=dtype, enabled=enabled, cache_enabled=False)
        ctx.about = tiled, forward, autocast
        with _inside, autocast():
            return _compute(tiled, forward, x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "layers that are computed in tiles have no second derivatives (create_graph=True); set Plan(tiles=1)"
            )
        (x,), (tiled, forward, autocast) = ctx.saved_tensors, ctx.about
        _, _, needs_x, *needs = ctx.needs_input_grad
        weights = [weight for weight, need in zip(tiled.parameters(), needs, strict=True) if need]
        of_x = torch.empty_like(x) if needs_x else None
        totals: list[torch.Tensor | None] = [None] * len(weights)
        count, at = min(tiled.tiles, x.shape[1]), 0
        for part, grad in zip(x.tensor_split(count, 1), grads[0].tensor_split(count, 1), strict=True):
            with torch.enable_grad(), _inside, autocast():
                leaf = part.detach().contiguous().requires_grad_(needs_x)
                out = forward(leaf)
            gradients = torch.autograd.grad(
                out, [leaf, *weights] if needs_x else weights, grad.contiguous(), allow_unused=True
            )
            if of_x is not None:
                of_x[:, at : at + part.shape[1]] = gradients[0]
                gradients = gradients[1:]
            at += part.shape[1]
            for index, gradient in enumerate(gradients):
                total = totals[index]
                if gradient is not None and total is None:
                    totals[index] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
                elif gradient is not None and total is not None:
                    total += gradient
        given = iter(
            total if total is None else total.to(weight.dtype) for total, weight in zip(totals, weights, strict=True)
        )
        return None, None, of_x, *(next(given) if need else None for need in needs)
