"""Kernels behind torch's random operators: torch's own, unless this thread is inside of :func:`drawing_from`."""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

import torch

from tensorshard.random.distributions import DRAWN, REFUSED, REFUSED_ON_CUDA
from tensorshard.random.rank_stream import RankStream
from tensorshard.torch_private.autograd import is_in_backward
from tensorshard.torch_private.random_operators import Kernel, put_kernels_behind

_GENERATOR_BY_POSITION = ("bernoulli.out", "randperm.generator_out")


class Source(Protocol):
    """Where random words come from."""

    def words(self, shape: tuple[int, ...], device: torch.device) -> Callable[[int], torch.Tensor]:
        """The words of the next draw: ``words(0)``, and further ones for the same elements."""

    def repeats(self) -> bool:
        """Whether the draw that follows, in a backward, repeats one of a forward."""

    def pass_over(self) -> None:
        """Called instead for a draw whose words nobody needs."""

    def refuse(self, operator: str) -> Exception:
        """What to raise where `operator` is called, which cannot be drawn element by element."""


class _Current(threading.local):
    source: Source | RankStream | None = None
    is_within = False  # a draw of a rank's stream


_current = _Current()


@contextmanager
def drawing_from(source: Source | RankStream | None) -> Iterator[None]:
    """Inside, random operators of this thread draw from `source`, or from torch's generators if it is None."""
    if source is not None:
        _install()
    before, _current.source = _current.source, source
    try:
        yield
    finally:
        _current.source = before


def current_source() -> Source | RankStream | None:
    """What random operators of this thread draw from, if that is not torch's generators."""
    return _current.source


_REPEATING: weakref.WeakSet[Any] = weakref.WeakSet()  # sources of forwards that a backward may recompute


def repeats_in_backward(source: Source | RankStream) -> None:
    """From now on, what is recomputed in a backward draws what `source` drew in the forward, wherever the code is."""
    _install()
    _REPEATING.add(source)


def repeats_no_more(source: Source | RankStream) -> None:
    """Undoes :func:`repeats_in_backward`."""
    _REPEATING.discard(source)


def pass_over_draw() -> None:
    """Counts a draw that no kernel sees, of fake tensors."""
    source = _current.source
    if source is not None and not isinstance(source, RankStream):
        source.pass_over()


@cache
def _install() -> None:
    for device in ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",):
        refused = (*REFUSED, *(REFUSED_ON_CUDA if device == "CUDA" else ()))
        kernels: dict[str, Kernel] = {name: partial(_instead, _draw, name) for name in DRAWN}
        put_kernels_behind(kernels | {name: partial(_instead, _refuse, name) for name in refused}, device)


def _instead(
    answer: Callable[..., Any], name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    is_users = any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))
    if is_users or _current.is_within or not _has_dropout(name, args, kwargs):
        return own(*args, **kwargs)
    source = _current.source
    if source is None and _REPEATING and is_in_backward():
        source = next((each for each in list(_REPEATING) if each.repeats()), None)
    if source is None:
        return own(*args, **kwargs)
    if isinstance(source, RankStream):
        _current.is_within = True
        try:
            with source.draw():
                return own(*args, **kwargs)
        finally:
            _current.is_within = False
    return answer(source, name, args, kwargs)


def _draw(source: Source, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in _GENERATOR_BY_POSITION:
        args = tuple(arg for arg in args if arg is not None)
    return DRAWN[name](_Draw(source), *args, **{key: v for key, v in kwargs.items() if key != "generator"})


def _refuse(source: Source, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise source.refuse(name)


class _Draw:
    """The words of one call of an operator, all of them for the same elements."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._words: Callable[[int], torch.Tensor] | None = None

    def __call__(self, tensor: torch.Tensor, again: int = 0) -> torch.Tensor:
        if self._words is None:
            self._words = self._source.words(tuple(tensor.shape), tensor.device)
        return self._words(again)


def _has_dropout(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `name` draws. Fused attention and recurrent layers do so only with dropout."""
    if name.startswith("_scaled_dot_product") or name == "_cudnn_rnn":
        places = {"_cudnn_rnn": 11, "_scaled_dot_product_flash_attention": 3}
        place = places.get(name, 5)
        given = kwargs.get("dropout_p", kwargs.get("dropout", args[place] if len(args) > place else 0.0))
        trains = bool(args[12]) if name == "_cudnn_rnn" and len(args) > 12 else True
        return trains and float(given) > 0
    return True
