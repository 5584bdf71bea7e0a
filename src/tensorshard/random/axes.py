"""Which dimension of what is drawn are the samples, read off the shapes of two runs with other numbers of samples."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Site(NamedTuple):
    """A place in a model that draws.

    Args:
        module: the innermost running module's name. draw: the number of the draw in a call of it.
    """

    module: str
    draw: int


@dataclass(frozen=True)
class Axes:
    """What the dimensions of a drawn tensor are.

    Args:
        sizes: of each dimension, for one sample.
        samples: the dimension that holds the samples; None if it has none, so that all samples share what is drawn.
            There may be several elements of each sample, as in (samples x heads).
    """

    sizes: tuple[int, ...]
    samples: int | None

    def of_sizes(self, shape: Sequence[int]) -> "Axes":
        """These axes for other sizes, if a tensor of them has one element of each sample."""
        if self.samples is None or len(shape) != len(self.sizes) or self.sizes[self.samples] != 1:
            return self
        return Axes((*shape[: self.samples], 1, *shape[self.samples + 1 :]), self.samples)


Draws = Mapping[Site, Sequence[tuple[int, ...]]]
"""The shapes that each site has drawn, in order."""


def axes_of(draws: Draws, wider: Draws, samples: tuple[int, int]) -> dict[Site, tuple[Axes | None, ...]]:
    """The axes of each site, for each of its draws in a forward, in their order; None for a draw that follows neither
    the samples nor the model.

    Args:
        draws, wider: of runs with ``samples[0]`` and ``samples[1]`` samples.
    """
    found: dict[Site, tuple[Axes | None, ...]] = {}
    for site, shapes in draws.items():
        if site not in wider:  # its module was left out at random there: another block like it tells
            continue
        others = (*wider[site], *[None] * len(shapes))
        found[site] = tuple(_axes(shape, other, samples) for shape, other in zip(shapes, others, strict=False))
    return found


def _axes(shape: tuple[int, ...], other: tuple[int, ...] | None, samples: tuple[int, int]) -> Axes | None:
    if other is None or len(other) != len(shape):
        return None
    grows = [place for place, (n, m) in enumerate(zip(shape, other, strict=True)) if n != m]
    if not grows:
        return Axes(shape, None)
    place = grows[0]
    each, rest = divmod(shape[place], samples[0])
    if len(grows) > 1 or rest or each * samples[1] != other[place]:
        return None
    return Axes((*shape[:place], each, *shape[place + 1 :]), place)


class Box(NamedTuple):
    """A part of a whole tensor, with the samples as its first dimension.

    Args:
        whole, offset, size: of the tensor, of the box in it, and of the box. The first of `whole` is not known.
        samples: the dimension at which a drawn tensor has the samples, which is divided in two if it has several
            elements of each; None for a tensor without samples.
    """

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    samples: int | None


def box_of(
    shape: Sequence[int],
    axes: Axes,
    *,
    first: int,
    samples: int,
    part: tuple[int, int] = (0, 1),
    undivided: Container[tuple[int, int]] = (),
    sequences: Container[int] = (),
) -> Box | None:
    """Where a tensor of `shape` is in the whole of `axes`; None if it is no part of it.

    Args:
        first, samples: the first sample that this forward has, and how many it has.
        part: this rank's place among those that share the samples, and their number. What is smaller than the whole is
            cut over them, as torch.chunk cuts.
        undivided: (number of dimensions, dimension) of what is cut in another way.
        sequences: dimensions of sequences that are cut. Where they are those of samples, too, no sample is cut.
    """
    if len(shape) != len(axes.sizes):
        return None
    whole: list[int] = []
    offset: list[int] = []
    size: list[int] = []
    for place, (n, every) in enumerate(zip(shape, axes.sizes, strict=True)):
        mine = n
        if (
            place == axes.samples and place in sequences and (every == 1 or n % samples)
        ):  # perhaps whole samples are cut
            begin, end = _chunk(samples * every, part)
            if n == end - begin and begin % every == n % every == 0:
                first, samples = first + begin // every, n // every
        if place == axes.samples:
            if not samples or n % samples:
                return None
            mine = n // samples
        if mine == every:
            begin = 0
        else:
            begin, end = _chunk(every, part)
            in_another_way = (len(shape), place) in undivided or (place == axes.samples and place in sequences)
            if part[1] == 1 or in_another_way or mine != end - begin:
                return None
        whole.append(every)
        offset.append(begin)
        size.append(mine)
    if axes.samples is None:
        return Box((1, *whole), (0, *offset), (1, *size), None)
    return Box((samples, *whole), (first, *offset), (samples, *size), axes.samples)


def _chunk(size: int, part: tuple[int, int]) -> tuple[int, int]:
    """Where the part of a rank begins and ends, of `size` elements that are cut over ranks."""
    rank, ranks = part
    step = -(-size // ranks)
    return min(size, step * rank), min(size, step * (rank + 1))
