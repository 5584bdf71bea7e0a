"""What went wrong first, where, and what kind of fault that is: a guess from what a run on ranks has recorded.

Each kind leaves a mark. A gradient that was reduced twice is the right one times a factor; one that was not reduced is
another on each rank, and their sum or mean is right; labels show in the gradient of the logits, whose rows point to
them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from tensorshard.verify.compare import Comparison, Difference, allowed, distance
from tensorshard.verify.record import Call, Record, Step

SCALED, NOT_REDUCED, OTHER_SAMPLES, OTHER_RANDOM = "scaled", "not reduced", "other samples", "other random numbers"
STALE, LABELS, COUNTS, MASK, NORM = "stale weights", "labels", "counts", "mask", "norm"
FORWARD, GRADIENT, UPDATE, PRECISION = "forward", "gradient", "update", "precision"

_ATTENTION = re.compile(r"att(entio)?n|rotary|rope|pos(ition)?(al)?_?(emb|enc)?|\bwpe\b|mixer", re.IGNORECASE)
_DROPOUT = re.compile(r"drop", re.IGNORECASE)
_CLOSE = 1e-3  # of a vector's length: how far two may be apart to count as one direction, or as one row
_ROUNDED = 3e-2  # of a tensor's largest number: what 16 bits make of it
_MOST_COMPARED = 1 << 30  # numbers, where each token is compared with each


@dataclass(frozen=True)
class Culprit:
    """The first thing that went wrong.

    Attributes:
        kind: "scaled", "not reduced", "other samples", "other random numbers", "stale weights", "labels", "counts",
            "mask", "norm", "forward", "gradient", "update" or "precision".
        module: where it begins: the first module in the order of the forward whose output differs, or in that of the
            backward whose gradient does. None if it is no module's.
        rank: where it is largest.
        size: the error there by the size of what it should be.
        explanation: a sentence.
        axis: the smallest part of the plan that fails, such as ``tp=2``; "" where that was not looked for.
    """

    kind: str
    module: str | None
    rank: int
    size: float
    explanation: str
    axis: str = ""


def find_culprit(
    reference: Record, disturbed: Record | None, ranks: Sequence[Record], comparison: Comparison, relative: float | None
) -> Culprit | None:
    """The first thing that went wrong; None if nothing differs."""
    if not comparison.differences:
        return None
    first = comparison.differences[0]
    if first.step < 0:
        return _initial(first, comparison)
    if first.step >= len(reference.steps):
        return Culprit(
            FORWARD, None, first.rank, _share(first), f"training agrees, and {first.name} differs afterwards"
        )
    case = _Case(reference, disturbed, ranks, comparison, relative, first.step)
    return case.culprit()


def _share(one: Difference) -> float:
    return one.error / one.scale if one.scale else float("inf")


def _initial(first: Difference, comparison: Comparison) -> Culprit:
    wrong = {one.rank for one in comparison.differences if one.step < 0}
    where = f"rank {min(wrong)}" if len(wrong) == 1 else f"{len(wrong)} ranks"
    said = f"{first.name!r} differs on {where} before the first step: it starts from other initial weights"
    return Culprit(OTHER_RANDOM, first.name.rpartition(".")[0], first.rank, _share(first), said)


class _Case:
    """The first step in which something differs.

    What it asks, in this order: did the modules get the same samples and compute the same? Does the loss want the same
    of the logits? Are the gradients the right ones? The norm? The update?
    """

    def __init__(
        self,
        reference: Record,
        disturbed: Record | None,
        ranks: Sequence[Record],
        comparison: Comparison,
        relative: float | None,
        number: int,
    ) -> None:
        self.number = number
        self.expected = reference.steps[number]
        self.twin = None if disturbed is None else disturbed.steps[number]
        self.steps = [record.steps[number] for record in ranks]
        self.before = [record.steps[number - 1].weights if number else record.initial for record in ranks]
        self.start = reference.steps[number - 1].weights if number else reference.initial
        self.differences = [one for one in comparison.differences if one.step == number]
        self.relative = relative
        self.wrong = self._worst("gradient")

    def culprit(self) -> Culprit:
        kinds = {one.kind for one in self.differences}
        if "gradient" in kinds or "loss" in kinds:
            return self._of_forward() or self._of_loss() or self._of_gradients()
        if "norm" in kinds:
            return self._of_norm()
        return self._of_update()

    # -- what differs --

    def _worst(self, kind: str) -> dict[str, Difference]:
        """By name, the largest difference of any rank."""
        worst: dict[str, Difference] = {}
        for one in self.differences:
            if one.kind == kind and (one.name not in worst or one.error > worst[one.name].error):
                worst[one.name] = one
        return worst

    def _limit(self, value: torch.Tensor) -> float:
        scale = float(value.abs().max()) if value.numel() else 0.0
        return 8 * allowed(value, scale, 0.0, self.relative)

    # -- the forward --

    def _of_forward(self) -> Culprit | None:
        samples = self._of_samples()
        if samples is not None:
            return samples
        calls = _by_module(self.expected.calls)
        for rank, step in enumerate(self.steps):
            for call in step.calls:
                if call.output is None or call.module not in calls or not call.module:
                    continue
                size = self._apart(call.module, call.output, [one.output for one in calls[call.module]])
                if size is not None and not self._is_partial_sum(call, rank, calls[call.module]):
                    return self._differing(call, calls[call.module], rank, size)
        return None

    def _apart(self, module: str, tensor: torch.Tensor, expected: Sequence[torch.Tensor | None]) -> float | None:
        """How far `tensor` is from each part of the reference's; None if it is one of them, or cannot be."""
        sizes = []
        for one in expected:
            apart = None if one is None else nearest(tensor, one)
            if one is None or apart is None:
                continue
            if apart <= self._bound(module, one):
                return None
            sizes.append(apart / max(float(one.abs().max()), 1e-30))
        return min(sizes, default=None)

    def _bound(self, module: str, tensor: torch.Tensor) -> float:
        """How far what passes through `module` may be from `tensor`, which is the reference's."""
        noise = 30 * self._noise(module) if self.twin is not None else 0.0
        return max(self._limit(tensor), 1e-7) + noise

    def _is_partial_sum(self, call: Call, rank: int, expected: list[Call]) -> bool:
        """Whether each rank has another output, and their sum is right: a layer whose outputs are reduced elsewhere."""
        same = [[one for one in step.calls if one.module == call.module] for step in self.steps]
        place = next(index for index, one in enumerate(same[rank]) if one is call)
        parts = [one[place].output for one in same if place < len(one)]
        outputs = [one for one in parts if one is not None]
        if len(outputs) < len(self.steps) or len({one.shape for one in outputs}) > 1 or len(outputs) < 2:
            return False
        if all(torch.equal(one, outputs[0]) for one in outputs[1:]):
            return False
        total = torch.stack(outputs).sum(0)
        return self._apart(call.module, total, [one.output for one in expected]) is None

    def _is_wrong_everywhere(self, module: str, expected: Sequence[torch.Tensor]) -> bool:
        """Whether no token of the module's outputs on any rank is right."""
        for call in (call for step in self.steps for call in step.calls if call.module == module):
            for one in expected:
                if call.output is None or min(call.output.ndim, one.ndim) < 2:
                    continue
                apart = _tokens_apart(call.output, one)
                if apart is None or bool((apart <= self._bound(module, one)).any()):
                    return False
        return True

    def _has_wrong_inputs(self, call: Call, expected: list[Call]) -> bool:
        """Whether what the module got is wrong, too: by what its parent computes between its modules."""
        if not call.inputs:
            return False
        given = max(call.inputs, key=lambda one: one.numel())
        wanted = [max(one.inputs, key=lambda tensor: tensor.numel()) for one in expected if one.inputs]
        return bool(wanted) and self._apart(call.module, given, wanted) is not None

    def _noise(self, module: str) -> float:
        assert self.twin is not None
        ours, twins = _by_module(self.expected.calls)[module], _by_module(self.twin.calls).get(module, [])
        pairs = [(a.output, b.output) for a, b in zip(ours, twins, strict=False)]
        distances = [distance(a, b) for a, b in pairs if a is not None and b is not None]
        return max((one for one in distances if one != float("inf")), default=0.0)

    def _differing(self, call: Call, expected: list[Call], rank: int, size: float) -> Culprit:
        where = f"the output of {call.module!r} ({call.kind}) is the first that differs, by {size:.1e}, on rank {rank}"
        assert call.output is not None
        outputs = [one.output for one in expected if one.output is not None]
        module = call.module
        if self._has_wrong_inputs(call, expected):
            module = module.rpartition(".")[0] or module
            where += ", and its input does"
        if _DROPOUT.search(call.kind) or any(_other_zeros(call.output, one) for one in outputs):
            return Culprit(OTHER_RANDOM, module, rank, size, f"{where}: other elements of it are dropped")
        if self.number and self._was_right(call.module, rank):
            said = f"{where}, though it was right in the step before and its weights read so: it computes with others"
            return Culprit(STALE, module, rank, size, said)
        if size < _ROUNDED and _is_rounded(call.output, outputs):
            return Culprit(PRECISION, module, rank, size, f"{where}: it is computed in a narrower type")
        is_attention = _ATTENTION.search(call.module) or _ATTENTION.search(call.kind)
        if is_attention and not self._is_wrong_everywhere(call.module, outputs):
            said = f"{where}: a mask or positions are not those of the whole sequence"
            return Culprit(MASK, module, rank, size, said)
        ratio = _factor([(call.output, one) for one in outputs if one.shape == call.output.shape])
        if ratio is not None and abs(ratio - 1) > 10 * _CLOSE:
            return Culprit(SCALED, module, rank, size, f"{where}: it is {ratio:.4g} times the right one")
        return Culprit(FORWARD, module, rank, size, where)

    def _was_right(self, module: str, rank: int) -> bool:
        names = [name for name in self.start if name.startswith(f"{module}.")]
        held = self.before[rank]
        same = all(
            distance(self.start[name], held[name]) <= self._limit(self.start[name]) for name in names if name in held
        )
        return bool(names) and same

    # -- samples --

    def _of_samples(self) -> Culprit | None:
        """Whether the ranks were given the samples of the reference, each as often."""
        called = [{call.module for call in step.calls} for step in self.steps]
        first = next((call.module for call in self.expected.calls if any(call.module in one for one in called)), None)
        if all("" in one for one in called):
            first = ""
        if first is None:
            return None
        expected = _inputs(self.expected, first)
        given = [_inputs(step, first) for step, names in zip(self.steps, called, strict=True) if first in names]
        if expected is None or any(one is None for one in given):
            return None
        counts = []
        for rows in given:
            assert rows is not None
            occurrences = _occurrences(rows, expected)
            if occurrences is None:
                return None
            counts.append(occurrences)
        strangers = [int(occurrences[1].sum()) for occurrences in counts]
        if any(strangers) and not all(strangers):  # a part of a sequence, say, has no row in common with the whole
            rank = next(rank for rank, number in enumerate(strangers) if number)
            return Culprit(
                OTHER_SAMPLES, None, rank, 1.0, f"rank {rank} got {strangers[rank]} samples that are not in the batch"
            )
        if all(strangers):
            if any(rows is not None and rows.shape[1] != expected.shape[1] for rows in given):
                return None
            return Culprit(OTHER_SAMPLES, None, 0, 1.0, "the ranks got samples that are not in the batch")
        seen = torch.stack([occurrences[0] for occurrences in counts])
        total = seen.sum(0)
        whole = bool((seen == 1).all())  # each rank has the whole batch: tensor parallelism, say
        if whole or (bool((total == total[0]).all()) and int(total.min()) > 0):
            return None
        missing, often = int((total == 0).sum()), int(total.max())
        said = (
            f"of {expected.shape[0]} samples {missing} reached no rank"
            if missing
            else "some samples reached more ranks"
        )
        return Culprit(OTHER_SAMPLES, None, 0, missing / expected.shape[0] or 1.0, f"{said}, and some {often} of them")

    # -- the loss --

    def _of_loss(self) -> Culprit | None:
        """What the gradients of the logits say of labels, counts and ignored positions."""
        expected = _logits(self.expected)
        if expected is None:
            return None
        rows, gradients = expected
        length = gradients.norm(dim=1)
        if not float(length.max()):
            return None
        ratios: list[torch.Tensor] = []
        every_rank = [_logits(step) for step in self.steps]
        joined = _joined(every_rank, rows.shape[1])
        for rank, actual in enumerate(every_rank if joined is None else [joined]):
            if actual is None:
                continue
            matched = _matched_rows(actual, expected)
            if matched is None:
                continue
            index, columns = matched
            wanted, got = gradients[index][:, columns], actual[1]
            size, other = wanted.norm(dim=1), got.norm(dim=1)
            floor = 1e-6 * float(length.max())
            ignored = (size <= floor) & (other > 1e-3 * float(other.max()))
            lost = (size > 1e-3 * float(length.max())) & (other <= 1e-6 * max(float(other.max()), 1e-30))
            both = (size > floor) & (other > floor * 1e-3)
            if bool(ignored.any()):
                said = f"{int(ignored.sum())} positions that the reference ignores count in the loss of rank {rank}"
                return Culprit(LABELS, _last(self.expected), rank, float(ignored.float().mean()), said)
            if bool(lost.any()) and bool(both.any()):
                said = (
                    f"{int(lost.sum())} positions that count in the reference have no part in the loss of rank {rank}"
                )
                return Culprit(LABELS, _last(self.expected), rank, float(lost.float().mean()), said)
            if not bool(both.any()):
                continue
            cosine = (wanted * got).sum(1)[both] / (size * other)[both]
            if bool((cosine < 1 - 1e-3).any()):
                share = float((cosine < 1 - 1e-3).float().mean())
                said = (
                    f"the gradient of {share:.0%} of the outputs of rank {rank} points elsewhere: the loss has other "
                    f"labels or another formula there"
                )
                return Culprit(LABELS, _last(self.expected), rank, share, said)
            ratios.append((other / size.clamp_min(1e-30))[both])
        if not ratios:
            return None
        every = torch.cat(ratios)
        spread = float(every.max() / every.min()) - 1
        if spread > 1e-3:
            said = (
                f"samples or tokens count up to {spread + 1:.4g} times as much as others: a mean of means, of parts "
                f"that have different numbers of them"
            )
            return Culprit(COUNTS, _last(self.expected), 0, spread, said)
        return None

    # -- gradients --

    def _of_gradients(self) -> Culprit:
        names = [name for name in self._backward_order() if name in self.wrong]
        if not names:
            loss = next(one for one in self.differences if one.kind == "loss")
            return Culprit(
                COUNTS, None, loss.rank, _share(loss), "all gradients are right, and the loss that was returned is not"
            )
        name = names[0]
        worst = self.wrong[name]
        module = name.rpartition(".")[0]
        every = len(self.wrong) == len(self.expected.gradients)
        where = "all gradients are" if every else f"the gradient of {name!r} is the first of {len(names)} that is"
        expected = self.expected.gradients[name]
        parts = [step.gradients.get(name) for step in self.steps]
        present = [one for one in parts if one is not None]

        def said(kind: str, what: str) -> Culprit:
            return Culprit(kind, module, worst.rank, _share(worst), f"{where} wrong on rank {worst.rank}{what}")

        if len(present) > 1 and any(distance(one, present[0]) > self._limit(expected) for one in present[1:]):
            total = torch.stack(present).sum(0)
            for reduced, way in ((total, "sum"), (total / len(present), "mean")):
                if distance(reduced, expected) <= len(present) * self._limit(expected):
                    return said(NOT_REDUCED, f": each rank has its own, whose {way} is right; it was not reduced")
            return said(NOT_REDUCED, ": each rank has another one; it was not reduced")
        gradient = self._one(name)
        ratio = _factor([(gradient, expected)])
        if ratio is not None:
            if abs(ratio) < _CLOSE:
                return said(GRADIENT, ": it is zero")
            if abs(ratio - 1) > 10 * _CLOSE:
                return said(SCALED, f": {ratio:.4g} times the right one")
        if not float(gradient.abs().max()):
            return said(GRADIENT, ": it is zero")
        if _share(worst) < _ROUNDED and all(_share(one) < _ROUNDED for one in self.wrong.values()):
            return said(PRECISION, " by as much as sums in 16 bits are")
        return said(GRADIENT, "")

    def _one(self, name: str) -> torch.Tensor:
        """The gradient of one rank that has it, the one that is furthest from the right one."""
        gradient = self.steps[self.wrong[name].rank].gradients.get(name)
        return torch.zeros_like(self.expected.gradients[name]) if gradient is None else gradient

    def _backward_order(self) -> list[str]:
        """The parameters in the order in which a backward reaches their modules."""
        position = {call.module: index for index, call in enumerate(self.expected.calls)}
        names = list(self.expected.gradients)
        return sorted(names, key=lambda name: (-position.get(name.rpartition(".")[0], -1), -names.index(name)))

    # -- norm and update --

    def _of_norm(self) -> Culprit:
        first = next(one for one in self.differences if one.kind == "norm")
        actual = self.steps[first.rank].norm or 0.0
        expected = self.expected.norm or 0.0
        smaller = actual < expected
        what = "misses a part of the gradients, or is one rank's own" if smaller else "counts a part more than once"
        return Culprit(
            NORM, None, first.rank, _share(first),
            f"all gradients are right; their norm is {actual:.4g} on rank {first.rank}, not {expected:.4g}: it {what}",
        )  # fmt: skip

    def _of_update(self) -> Culprit:
        clipped = [step.clipped for step in self.steps]
        expected = self.expected.clipped
        for rank, left in enumerate(clipped):
            if (left is None) != (expected is None) or (
                left is not None and abs(left / (expected or 1.0) - 1) > _CLOSE
            ):
                said = (
                    f"all gradients are right; clipping leaves {1.0 if left is None else left:.4g} of their length on "
                    f"rank {rank}, and {1.0 if expected is None else expected:.4g} in the reference"
                )
                return Culprit(NORM, None, rank, abs((left or 1.0) / (expected or 1.0) - 1), said)
        worst = self._worst("weight")
        if not worst:
            first = self.differences[0]
            what = {"buffer": "the buffer", "state": "the optimizer's state"}.get(first.kind, first.kind)
            kind = NOT_REDUCED if first.kind == "buffer" else UPDATE
            said = f"{what} {first.name!r} is the first that differs, on rank {first.rank}; the weights agree so far"
            return Culprit(kind, first.name.rpartition(".")[0], first.rank, _share(first), said)
        for name, one in worst.items():
            step, before = self.steps[one.rank], self.before[one.rank]
            if name in before and torch.equal(step.weights[name], before[name]):
                said = f"{name!r} has the right gradient, and is not updated on rank {one.rank}"
                return Culprit(STALE, name.rpartition(".")[0], one.rank, _share(one), said)
        name, one = next(iter(worst.items()))
        rows = self._rows_that_stay(name, one.rank)
        if rows:
            said = f"{name!r} has the right gradient, and {rows} of its rows are not updated on rank {one.rank}"
            return Culprit(STALE, name.rpartition(".")[0], one.rank, _share(one), said)
        said = f"{name!r} has the right gradient, and is updated otherwise on rank {one.rank}"
        moved = [
            (self.steps[each.rank].weights[each_name].double() - self.before[each.rank][each_name].double(),
             self.expected.weights[each_name].double() - self.start[each_name].double())
            for each_name, each in worst.items() if each_name in self.before[each.rank]
        ]  # fmt: skip
        ratio = _factor(moved[:1])
        if ratio is not None and abs(ratio - 1) > 10 * _CLOSE:
            said += f": {ratio:.4g} times as far"
        return Culprit(UPDATE, name.rpartition(".")[0], one.rank, _share(one), said)

    def _rows_that_stay(self, name: str, rank: int) -> int:
        after, before = self.steps[rank].weights[name], self.before[rank].get(name)
        if before is None or after.ndim < 1 or after.shape[0] < 2:
            return 0
        stays = (after == before).flatten(1).all(1) if after.ndim > 1 else after == before
        wanted = self.expected.weights[name] != self.start[name]
        moves = wanted.flatten(1).any(1) if after.ndim > 1 else wanted
        return int((stays & moves).sum())


# -- tensors and their parts --


def nearest(tensor: torch.Tensor, whole: torch.Tensor) -> float | None:
    """The largest distance of `tensor` from the nearest part of `whole`.

    A part is some of its rows, a slice of a dimension, or some of its tokens (vectors of the last dimension) in any
    order and shape, or the same columns of them. None if shapes say that it cannot be a part.
    """
    apart = _part_apart(tensor, whole)
    if apart == 0.0 or min(tensor.ndim, whole.ndim) < 2:
        return apart
    tokens = _tokens_apart(tensor, whole)
    return apart if tokens is None else float(tokens.max()) if apart is None else min(apart, float(tokens.max()))


def _tokens_apart(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor | None:
    """The distance of each token of `tensor` from the nearest of `whole`, by the columns that fit best.

    None if it cannot be one of them, or if tokens are so short that some are near by chance.
    """
    a, b = tensor.double().flatten(0, -2), whole.double().flatten(0, -2)
    width = a.shape[1]
    if not len(a) or width < 4 or width > b.shape[1] or len(a) * len(b) * width > _MOST_COMPARED:
        return None
    begins = range(0, b.shape[1] - width + 1, width)
    parts = (torch.cdist(a, b[:, begin : begin + width], p=float("inf")).amin(1) for begin in begins)
    return min(parts, key=lambda apart: float(apart.max().nan_to_num(float("inf")))).nan_to_num(float("inf"))


def _part_apart(tensor: torch.Tensor, whole: torch.Tensor) -> float | None:
    """`nearest` by rows and slices alone."""
    if tensor.shape == whole.shape:
        apart = distance(tensor, whole)
        if apart == 0.0 or tensor.ndim < 2:
            return apart
        return min(apart, _rows_apart(tensor, whole))
    if tensor.ndim != whole.ndim or not tensor.ndim:
        return None
    if tensor.shape[1:] == whole.shape[1:]:
        return _rows_apart(tensor, whole)
    candidates = []
    for dim, (size, full) in enumerate(zip(tensor.shape, whole.shape, strict=True)):
        others = [d for d in range(tensor.ndim) if d != dim and (d != 0 or dim == 0)]
        if size >= full or any(tensor.shape[d] != whole.shape[d] for d in others):
            continue
        for part in _slices(whole, dim, size):
            candidates.append(_rows_apart(tensor, part))
            if not candidates[-1]:
                return 0.0
    return min(candidates, default=None)


def _slices(whole: torch.Tensor, dim: int, size: int) -> Iterator[torch.Tensor]:
    full = whole.shape[dim]
    for begin in range(full - size + 1):
        yield whole.narrow(dim, begin, size)
    stride = full // size
    if stride > 1:
        for begin in range(stride):
            yield whole.index_select(dim, torch.arange(begin, full, stride)[:size])
        if size % 2 == 0 and full % (2 * stride) == 0:  # zig-zag: one chunk from the front, its mirror from the back
            for chunk in range(stride):
                half = size // 2
                front = torch.arange(chunk * half, (chunk + 1) * half)
                yield whole.index_select(
                    dim, torch.cat([front, torch.arange(full - (chunk + 1) * half, full - chunk * half)])
                )


def _rows_apart(tensor: torch.Tensor, whole: torch.Tensor) -> float:
    """The largest distance of a row of `tensor` from the row of `whole` that is nearest."""
    a, b = tensor.double().reshape(len(tensor), -1), whole.double().reshape(len(whole), -1)
    if a.shape[1] != b.shape[1]:
        return float("inf")
    apart = torch.stack([(b - row).abs().amax(1).min() for row in a]) if len(a) else torch.zeros(1)
    return float(apart.max().nan_to_num(float("inf")))


def _by_module(calls: Iterable[Call]) -> dict[str, list[Call]]:
    by_module: dict[str, list[Call]] = {}
    for call in calls:
        by_module.setdefault(call.module, []).append(call)
    return by_module


def _inputs(step: Step, module: str) -> torch.Tensor | None:
    """The samples that a module was called with, a row each, of all calls of a step."""
    rows = []
    for call in step.calls:
        if call.module != module or not call.inputs:
            continue
        main = max(call.inputs, key=lambda one: one.numel())
        if main.ndim:
            rows.append(main.double().flatten(1) if main.ndim > 1 else main.double().unsqueeze(1))
    if not rows or len({one.shape[1] for one in rows}) > 1:
        return None
    return torch.cat(rows)


def _occurrences(rows: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """How often each row of `expected` is in `rows`, and which of `rows` are not in `expected`."""
    if rows.shape[1] != expected.shape[1]:
        return None
    counts, strange = torch.zeros(len(expected)), torch.zeros(len(rows), dtype=torch.bool)
    for number, row in enumerate(rows):
        same = ((expected - row).abs().amax(1) <= 1e-3 * row.abs().max().clamp_min(1e-30)).nonzero().flatten()
        if len(same):
            counts[same] += 1.0 / len(same)
        else:
            strange[number] = True
    return counts.round(decimals=3), strange


def _logits(step: Step) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The rows of the last output that the loss depends on, and of its gradient."""
    calls = [
        call
        for call in step.calls
        if call.output is not None
        and call.gradient is not None
        and call.output.ndim > 1
        and call.gradient.shape[:-1] == call.output.shape[:-1]
    ]
    if not calls:
        return None
    last = calls[-1].module
    same = [call for call in calls if call.module == last]
    outputs = [call.output.flatten(0, -2).double() for call in same if call.output is not None]
    gradients = [call.gradient.flatten(0, -2).double() for call in same if call.gradient is not None]
    if len({one.shape[1] for one in outputs}) > 1:
        return None
    return torch.cat(outputs), torch.cat(gradients)


def _joined(
    ranks: Sequence[tuple[torch.Tensor, torch.Tensor] | None], width: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Logits and their gradients of which each rank has some columns, side by side; None if it has not."""
    parts = [one for one in ranks if one is not None]
    if len(parts) < max(len(ranks), 2) or len({len(rows) for rows, _ in parts}) > 1:
        return None
    if sum(rows.shape[1] for rows, _ in parts) != width:
        return None
    return torch.cat([rows for rows, _ in parts], 1), torch.cat([gradients for _, gradients in parts], 1)


def _matched_rows(
    actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, slice] | None:
    """Which row of `expected` each of `actual` is, and which columns of it its gradients have.

    Both are logits and their gradients; either may be a part of the columns, as those of a split vocabulary. Of rows
    whose logits are the same, such as those of one token in several places, it is the one whose gradient is most alike.
    """
    (logits, gradients), (all_logits, all_gradients) = actual, expected
    near, own = None, slice(None)
    for own in _columns(logits.shape[1], all_logits.shape[1]):
        part = all_logits[:, own]
        within = torch.cdist(logits, part) <= _CLOSE * part.norm(dim=1).max().clamp_min(1e-30)
        if bool(within.any(1).all()):
            near = within
            break
    if near is None:
        return None
    widths = [own] if gradients.shape == logits.shape else _columns(gradients.shape[1], all_logits.shape[1])
    best: tuple[float, torch.Tensor, slice] | None = None
    for columns in widths:
        alike = _alike(gradients, all_gradients[:, columns]).masked_fill(~near, -float("inf")).max(1)
        score = float(alike.values.mean())
        if best is None or score > best[0]:
            best = (score, alike.indices, columns)
    return None if best is None else best[1:]


def _columns(width: int, full: int) -> list[slice]:
    if not 0 < width <= full:
        return []
    return [slice(begin, begin + width) for begin in range(0, full - width + 1, width)]


def _alike(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The cosine of each row with each of `others`; for a row of zeros, the shorter the more alike."""
    alike = nn.functional.normalize(rows, dim=1) @ nn.functional.normalize(others, dim=1).T
    length, other = rows.norm(dim=1), others.norm(dim=1)
    silent = length <= 1e-6 * length.max()
    return torch.where(silent[:, None], -other / other.max().clamp_min(1e-30), alike)


def _last(step: Step) -> str | None:
    names = [call.module for call in step.calls if call.module and call.gradient is not None]
    return names[-1] if names else None


def _factor(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float | None:
    """The number by which each first tensor is its second one; None if there is none."""
    pairs = [(a.double().flatten(), b.double().flatten()) for a, b in pairs if a.shape == b.shape]
    if not pairs:
        return None
    actual, expected = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])
    square = float(expected @ expected)
    if not square:
        return None
    ratio = float(actual @ expected) / square
    rest = float((actual - ratio * expected).norm())
    return ratio if rest <= 2 * _CLOSE * max(float(actual.norm()), 1e-12 * square**0.5) else None


def _other_zeros(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether other elements are exactly zero, and many of them: what dropout does."""
    if actual.numel() < 8 or not expected.numel():
        return False
    zero, other = actual == 0, expected == 0
    if not 0.02 < float(zero.float().mean()) < 0.98:
        return False
    if float(other.float().mean()) < 1e-3:
        return True
    if actual.shape != expected.shape or bool((zero == other).all()):
        return False
    both = ~zero & ~other
    return bool(both.any()) and float((actual - expected).abs()[both].max()) <= _CLOSE * float(expected.abs().max())


def _is_rounded(output: torch.Tensor, outputs: Sequence[torch.Tensor]) -> bool:
    narrow = output.dtype in (torch.bfloat16, torch.float16) and all(one.dtype != output.dtype for one in outputs)
    return narrow or any(
        bool((output == output.to(kind).to(output.dtype)).all()) for kind in (torch.bfloat16, torch.float16)
    )


def with_axis(culprit: Culprit, axis: str) -> Culprit:
    """The same, with the smallest part of the plan that fails."""
    return replace(culprit, axis=axis)
