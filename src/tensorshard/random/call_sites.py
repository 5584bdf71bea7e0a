"""Which call of which module draws, so that every rank, and recomputation, finds the same numbers for it.

The innermost module that draws says that it runs. Its path is its name and the number of its call, within the modules
around it that say so, too. At each call it takes a number from torch's CPU generator, a *ticket*, and so does each
draw. All ways of recomputation restore that generator. So a call or a draw that gets a known ticket repeats an earlier
one, of whatever micro-batch, and draws what that one drew: also where a function is recomputed, without the module
around it.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tensorshard.common.never_compiled import never_compiled
from tensorshard.common.words import is_inside
from tensorshard.model.forwards import Forward, Role, roles_of, unwrap_forward, wrap_forward
from tensorshard.model.state_places import host_random_restored
from tensorshard.random.axes import Axes, Box, Site, box_of
from tensorshard.random.kernels import current_source, drawing_from, repeats_in_backward, repeats_no_more
from tensorshard.random.philox import key_of, words_of_box
from tensorshard.random.routed_rows import Routed, Rows, find_rows, rows_of
from tensorshard.random.trial_runs import AGAIN, LOSS, HostDraws, Run, TrialModel, call_part, samples_of, signature_of
from tensorshard.torch_private.dispatch import without_dispatch_modes
from tensorshard.torch_private.fake_tensors import unset_fake_temporarily

Kinds = tuple[Axes | None, ...]
_EVALUATION = " in evaluation"  # no module is called so


class DrawRefusedError(RuntimeError):
    """Numbers were asked for that would not be the same at every layout."""


class _Place(NamedTuple):
    """What numbers depend on, besides seed and step.

    Args:
        path: (name, number of the call) of the call, and of those around it.
        first, samples: the samples that the forward has, of this rank's batch.
    """

    path: tuple[tuple[str, int], ...]
    first: int
    samples: int


@dataclass
class _Call:
    place: _Place
    draws: int = 0
    calls: Counter[str] = field(default_factory=Counter)


class ModelRandomness:
    """The random numbers of one model on this rank.

    Args:
        seed: says the seed of all numbers.
        trial: the model as it was before a plan was applied; or why there is none.
        named_modules: the modules that compute on this rank, by their names in the model. A name may occur twice.
        remedy: what to do where numbers cannot be drawn, for errors.
        part: this rank's place among those that share its samples, and their number.
        compiled: names of blocks whose code ``torch.compile`` replaces.
        undivided, sequences: as for :func:`tensorshard.random.axes.box_of`.
    """

    def __init__(
        self,
        seed: Callable[[], int],
        trial: TrialModel | Exception,
        named_modules: Iterable[tuple[str, nn.Module]],
        *,
        remedy: str,
        part: tuple[int, int] = (0, 1),
        compiled: Collection[str] = (),
        undivided: Collection[tuple[int, int]] = (),
        sequences: Collection[int] = (),
    ) -> None:
        self._compiled, self._undivided, self._sequences = compiled, undivided, sequences
        self._seed, self._trial, self._part, self._remedy = seed, trial, part, remedy
        self._modules: dict[str, list[nn.Module]] = {}
        for name, module in named_modules:
            self._modules.setdefault(name, []).append(module)
        self.step = 0
        self._stack: list[_Call] = []
        self._rehearses = False
        self._outer = _Call(_Place((), 0, 0))
        self._by_loop: Counter[str] = Counter()  # calls in this step that a loop made itself
        self._tickets: dict[tuple[str, int], _Place] = {}
        self._drawn: dict[int, tuple[Any, int, torch.Tensor | None, Box]] = {}  # by tickets: what was drawn
        self._sites: dict[Any, dict[Site, Kinds]] = {}  # by the signature of the inputs
        self._alike: dict[Site, Kinds] = {}  # of the same place in another block
        self._tried: list[tuple[str, Any, dict[str, bool]]] = []  # parts, signatures, which modules were in training
        self._tried_modes: set[tuple[bool, bool]] = set()
        self._routed: dict[Any, dict[Site, Routed]] = {}  # by the signature of the inputs
        self._rows: list[Rows] = []  # of the modules that run, and have or get chosen rows
        self._chosen: dict[tuple[str, int], Rows] = {}  # that modules got, by the tickets of their calls
        self.row_modules: dict[str, bool] = {}  # names of such modules, and whether they get chosen ones
        self._draws_of: Counter[Site] = Counter()  # in this forward, so far
        self._watched: set[str] = set()
        self.drawing: set[str] = set()  # names of modules that draw
        self._loss: tuple[Run, Any] | None = None  # that is running
        self._host_draws = HostDraws.NONE
        self.note_host_draws: Callable[[], None] | None = None
        self.next_first: int | None = None
        self.first_of_rank: Callable[[], int] = int  # the number of its first sample in the whole batch
        self.inputs: Any = None
        self._alone = ""  # the part of the model that runs by itself
        self._alone_draws: dict[Any, bool] = {}  # by the name of a part and what is in training
        self._not_tried: dict[str, Exception] = {}  # parts, and why a trial of them failed
        self.quiet: set[str] = set()  # names of modules that ran in a trial, and within which nothing draws
        self._undo: list[Callable[[], None]] = []
        repeats_in_backward(self)
        self._undo.append(partial(repeats_no_more, self))
        self._watch("")  # now, since its forward runs already when the first trial does

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelRandomness":
        return self

    def end(self) -> None:
        """Leaves the modules as they were. Nothing is drawn afterwards."""
        while self._undo:
            self._undo.pop()()

    # -- what runs --

    def begin_step(self, step: int) -> None:
        """Called before forwards; nothing happens if the step is that of the last call."""
        if step != self.step:
            self._by_loop.clear()
            self.begin_again()
        self.step = step

    def begin_again(self) -> None:
        """Called before a step that may be made again: its forwards are counted from those that a loop made itself."""
        self._tickets.clear()
        self._drawn.clear()
        self._chosen.clear()
        self._outer = _Call(_Place((), 0, 0))

    def begin_samples(self, first: int, samples: int) -> None:
        """Called before the forwards of some samples, of which the first is number `first` of this rank's batch."""
        self._outer = _Call(_Place((), first, samples), calls=self._by_loop.copy())

    def at(self, first: int) -> None:
        """In a plain loop with micro-batches: the next forward has those from sample `first` of the batch on."""
        self.next_first = first

    @property
    def may_draw(self) -> bool:
        """Whether the model was seen to draw, or was not tried yet."""
        return not self._sites or self._host_draws > HostDraws.NONE or any(self._sites.values())

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around each forward of the whole model, or of a stage, for the samples that were begun.

        Those in evaluation are counted by themselves, downwards: a script may have some between its steps.
        """
        place = self._outer.place
        trains = self._modes_of_root()[1]
        kind = "" if trains else _EVALUATION
        self._outer.calls[kind] += 1
        number = self._outer.calls[kind] - 1 if trains else -self._outer.calls[kind]
        self._stack.append(_Call(_Place((("", number),), place.first, place.samples)))
        self._draws_of.clear()
        depth = len(self._stack)
        try:
            with drawing_from(self), self._host_seeded(number, place.first) if self._host_draws else nullcontext():
                yield
        finally:
            del self._stack[depth - 1 :]

    @property
    def is_running(self) -> bool:
        """Whether a forward runs, of the model or of a part of it, or the loss function."""
        return bool(self._stack) and not self._stack[-1].place.path[0][0].startswith(AGAIN)

    @contextmanager
    def part(self, name: str, given: Any, first: int) -> Iterator[None]:
        """Around a call, in training, of a module in the model or of one of its methods, that a loop makes itself.

        Args:
            given: (args, kwargs).
            first: the number of their first sample in the whole batch.
        """
        modes = self._modes_of_root()
        before = self.inputs, self._alone
        self.inputs, self._alone = given, name
        try:
            if not modes[1] or isinstance(self._trial, Exception) or not self._draws_alone(name, modes):
                yield
                return
            self.continue_with(first, samples_of(given))
            number = self._outer.calls[name]
            self._outer.calls[name] += 1
            self._stack.append(_Call(_Place(((name, number),), first, self._outer.place.samples)))
            try:
                with (
                    drawing_from(self),
                    self._host_seeded((name, number), first) if self._host_draws else nullcontext(),
                ):
                    yield
            finally:
                self._stack.clear()
        finally:
            self.inputs, self._alone = before

    def _draws_alone(self, name: str, modes: tuple[bool, bool]) -> bool:
        """Whether a part draws that gets the present inputs. One that cannot be tried may, where it trains."""
        if (name, modes) not in self._alone_draws:
            self._try_out(self.inputs)
        return self._alone_draws.get((name, modes), False) or (name in self._not_tried and torch.is_grad_enabled())

    @contextmanager
    def _host_seeded(self, number: Any, first: int) -> Iterator[None]:
        """Seeds Python's and numpy's generators: for each forward of a whole batch, or of some samples."""
        of_samples = self._host_draws is HostDraws.OF_SAMPLES
        key = key_of(self._seed(), self.step, "host", number, self.first_of_rank() + first if of_samples else 0)
        with host_random_restored():
            random.seed(key)
            np.random.seed(key % 2**32)
            yield

    @contextmanager
    def loss(self, run: Run, given: Any) -> Iterator[None]:
        """Around a call of the loss function.

        Args:
            run: calls it for a trial run, as ``run(model, given)``.
        """
        self._loss = run, given
        outer = self._outer
        self._stack.append(_Call(_Place(((LOSS, outer.calls[LOSS]),), outer.place.first, outer.place.samples)))
        outer.calls[LOSS] += 1
        depth = len(self._stack)
        try:
            with drawing_from(self):
                yield
        finally:
            del self._stack[depth - 1 :]
            self._loss = None

    @contextmanager
    def rehearsal(self, inputs: Any) -> Iterator[None]:
        """Around a run on other tensors that draws what the forward of these inputs will draw in this step."""
        before = self._outer, self._tickets, self._drawn, self._chosen, self._stack, self.inputs
        self._outer, self._stack = _Call(_Place((), 0, samples_of(inputs)), calls=self._by_loop.copy()), []
        self._tickets, self._drawn, self._chosen = {}, {}, {}
        self._rehearses = True
        try:
            self.note_inputs(inputs)
            with self.forward():
                yield
        finally:
            self._outer, self._tickets, self._drawn, self._chosen, self._stack, self.inputs = before
            self._rehearses = False

    def add_modules(self, named_modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Takes further modules that stand for those of the same names."""
        for name, module in named_modules:
            self._modules.setdefault(name, []).append(module)
            if name in self._watched:
                self._wrap(name, module)

    def continue_with(self, first: int, samples: int) -> None:
        """As :meth:`begin_samples`, for one more forward of a step in which forwards are counted."""
        self._outer = _Call(_Place((), first, samples), calls=self._by_loop)

    def note_inputs(self, inputs: Any) -> None:
        """Called before each forward with its inputs; they are tried out if nothing is known of the model yet."""
        self.inputs = inputs
        modes = self._modes_of_root()
        if modes not in self._tried_modes and not isinstance(self._trial, Exception):
            self._tried_modes.add(modes)
            if modes[1]:
                self._try_out(inputs)

    def _modes_of_root(self) -> tuple[bool, bool]:
        """Whether the model is in training, and whether some module in it is."""
        roots = self._modules.get("", ())
        trains = roots[0].training if roots else True
        return trains, trains or any(modules[0].training for modules in self._modules.values())

    def _modes(self) -> dict[str, bool]:
        return {name: modules[0].training for name, modules in self._modules.items()}

    # -- sites --

    def _try_out(self, inputs: Any) -> None:
        """Finds out what the model draws for inputs like these, and lets modules that draw say that they run."""
        assert isinstance(self._trial, TrialModel)
        modes, alone = self._modes(), self._alone
        self._tried.append((alone, signature_of(inputs), modes))
        run = partial(call_part, alone) if alone else None
        try:
            with unset_fake_temporarily():
                found, again, host_draws, routed, ran = self._trial.sites(inputs, modes, run, alone or LOSS)
        except Exception as error:
            if alone:
                self._not_tried[alone] = error
            else:
                self._trial = error
            return
        self._alone_draws[alone, self._modes_of_root()] = bool(found) or host_draws > HostDraws.NONE
        found = {site: () if site in routed else kinds for site, kinds in found.items()}
        for site in found:
            if any(is_inside(site.module, [block]) for block in self._compiled):
                raise DrawRefusedError(
                    f"{self._described(site)} draws random numbers in a block that compile=True compiles, and compiled "
                    f"code draws by itself; set compile=False, or {self._remedy.removeprefix('set ')}"
                )
        self._note_host_draws(host_draws)
        here = self._sites.setdefault(signature_of(inputs), {})
        for site, kinds in found.items():
            known = here.get(site, ())
            here[site] = (*known, *(each for each in kinds if each not in known)) if known else kinds
            self._alike.setdefault(_alike(site), kinds)
        self._routed.setdefault(signature_of(inputs), {}).update(routed)
        for each in routed.values():
            self.row_modules |= {each.source: False, each.chosen: True}
            self._watch(each.source)
            self._watch(each.chosen)
        for name, modules in self._modules.items():  # where ranks compute each other's rows
            shares = any(Role.ROUTED_EXPERTS in roles_of(module) for module in modules)
            if shares and any(is_inside(site.module, [name]) for site in found):
                self.row_modules.setdefault(name, False)
                self._watch(name)
        alike = {_pattern(site.module) for site in found}
        for name in self._modules:  # of blocks that were left out at random, too
            if _pattern(name) in alike:
                self.drawing.add(name)
                self._watch(name)
        around = {name[: dot.start()] for name in self.drawing for dot in re.finditer(r"\.|$", name)}
        self.quiet = (self.quiet | set(ran)) - around
        for name in again:
            if AGAIN + name not in self._watched:
                self._watched.add(AGAIN + name)
                for module in self._modules.get(name, ()):
                    enter, leave = partial(_enter_again, self, AGAIN + name), partial(_leave_again, self)
                    self._undo.append(module.register_forward_pre_hook(enter, prepend=True).remove)
                    self._undo.append(module.register_forward_hook(leave, always_call=True).remove)

    def _try_out_loss(self) -> None:
        assert self._loss is not None and isinstance(self._trial, TrialModel)
        run, given = self._loss
        with unset_fake_temporarily():
            found, _, host_draws, *_ = self._trial.sites(given, self._modes(), run)
        self._note_host_draws(host_draws)
        here = self._sites.setdefault(signature_of(self.inputs), {})
        here.update({site: kinds for site, kinds in found.items() if site.module == LOSS})

    def _note_host_draws(self, drawn: HostDraws) -> None:
        if drawn is HostDraws.OF_SAMPLES and self._host_draws < drawn and self.note_host_draws is not None:
            self.note_host_draws()
        self._host_draws = max(self._host_draws, drawn)

    def _watch(self, name: str) -> None:
        if name not in self._watched:
            self._watched.add(name)
            for module in self._modules.get(name, ()):
                self._wrap(name, module)

    def _wrap(self, name: str, module: nn.Module) -> None:
        wrap_forward(module, Role.RANDOM_STREAM, partial(_around, self, name))
        self._undo.append(partial(unwrap_forward, module, Role.RANDOM_STREAM))

    @never_compiled
    def enter(self, name: str, *, in_path: bool = True) -> tuple[str, int]:
        """Called when the module of this name begins to run. Returns the ticket.

        Args:
            in_path: whether it is in the paths of what draws inside.
        """
        with without_dispatch_modes() if self._rehearses else unset_fake_temporarily():  # the latter is quicker
            ticket = (name, _take_ticket())
        place = self._tickets.get(ticket)
        around = self._stack[-1] if self._stack else self._outer
        if not in_path:
            place = self._tickets.setdefault(ticket, around.place)
            self._stack.append(_Call(place, around.draws, around.calls))
            return ticket
        if place is None:
            path = (*around.place.path, (name, around.calls[name]))
            place = _Place(path, around.place.first, around.place.samples)
            around.calls[name] += 1
            self._tickets[ticket] = place
        self._stack.append(_Call(place))
        return ticket

    def leave(self) -> None:
        """Called when it ends."""
        if self._stack:
            self._stack.pop()

    # -- draws --

    def words(self, shape: tuple[int, ...], device: torch.device) -> Callable[[int], torch.Tensor]:
        """As :class:`tensorshard.random.kernels.Source` says."""
        ticket = _take_ticket()
        if ticket not in self._drawn:
            call = self._stack[-1]
            site, path = Site(_name(call.place.path), call.draws), call.place.path
            call.draws += 1
            rows, box = self._rows_drawn_for(site, shape) or (None, None)
            self._drawn[ticket] = path, site.draw, rows, box or self._box(site, shape, call.place)
            self._draws_of[site] += 1
        path, draw, rows, box = self._drawn[ticket]

        def drawn(again: int) -> torch.Tensor:
            words = words_of_box(key_of(self._seed(), self.step, path, draw, again), *box[:3], device)
            if rows is not None:
                words = words[rows]
            elif box.samples is not None:
                words = words.movedim(0, box.samples)
            return words.reshape(shape)

        return drawn

    def repeats(self) -> bool:
        """As :class:`tensorshard.random.kernels.Source` says."""
        state = torch.get_rng_state()
        ticket = _take_ticket()
        torch.set_rng_state(state)
        return ticket in self._drawn

    def pass_over(self) -> None:
        """As :class:`tensorshard.random.kernels.Source` says."""
        self._stack[-1].draws += 1

    def _rows_drawn_for(self, site: Site, shape: tuple[int, ...]) -> tuple[torch.Tensor, Box] | None:
        """The rows to take of the words of a box, where rows are numbered; None for any other draw."""
        signature = signature_of(self.inputs)
        is_routed = any(site in sites for sites in self._routed.values())
        if is_routed and signature not in self._routed and isinstance(self._trial, TrialModel):
            self._try_out(self.inputs)
        routed = self._routed.get(signature, {}).get(site)
        rows = self._rows[-1] if self._rows else None
        if routed is not None:
            per_sample, size, module = routed.rows, routed.size, routed.chosen
        elif rows is not None and rows.module is None:
            axes = next(iter(self._sites.get(signature, {}).get(site, ())), None)
            if axes is None or axes.samples is None:
                return None
            per_sample, size, module = math.prod(axes.sizes[:-1]), axes.sizes[-1], None
        else:
            return None
        if rows is not None and rows.module == module and rows.per_sample == per_sample:
            if not len(rows.numbers):
                return rows.numbers, Box((0, size), (0, 0), (0, size), None)
            if math.prod(shape[:-1]) == len(rows.numbers):
                first, last = int(rows.numbers.min()), int(rows.numbers.max())
                one = (last - first + 1, shape[-1])
                box = box_of(one, Axes((1, size), 0), first=first, samples=one[0], part=self._part)
                if box is not None:
                    return rows.numbers - first, box
        raise DrawRefusedError(
            f"{self._described(site)} draws random numbers of shape {list(shape)} for rows that values choose, and "
            f"which rows of the batch they are is not known; {self._remedy}"
        )

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Around code that runs once more afterwards, and has to draw the same numbers."""
        call = self._stack[-1] if self._stack else self._outer
        draws, calls = call.draws, call.calls.copy()
        try:
            yield
        finally:
            call.draws, call.calls = draws, calls

    def rows_of_samples(self, tensor: torch.Tensor, module: str | None = None) -> Rows:
        """The rows of a tensor [..., features] that has all rows of the samples of this forward."""
        place = (self._stack[-1] if self._stack else self._outer).place
        rows = math.prod(tensor.shape[:-1])
        per_sample = rows // max(1, place.samples)
        first = (self.first_of_rank() + place.first) * per_sample
        numbers = torch.arange(first, first + rows, device=tensor.device)
        return Rows(tensor.detach().reshape(rows, -1), numbers, per_sample, module)

    def rows_are(self, tensor: torch.Tensor, numbers: torch.Tensor, per_sample: int) -> AbstractContextManager[None]:
        """Around code that computes rows of several ranks, or a part of them.

        Args:
            tensor: [..., features]. numbers: of its rows in the whole batch.
            per_sample: how many rows each sample has in all.
        """
        return self._with_rows(Rows(tensor.detach().flatten(0, -2), numbers, per_sample))

    @contextmanager
    def _with_rows(self, rows: Rows) -> Iterator[None]:
        self._rows.append(rows)
        depth = len(self._rows)
        try:
            yield
        finally:
            del self._rows[depth - 1 :]

    @property
    def rows(self) -> Rows | None:
        """What :meth:`rows_are` was told, inside of it."""
        return self._rows[-1] if self._rows and self._rows[-1].module is None else None

    def rows_given(self, name: str, ticket: tuple[str, int], inputs: Any) -> AbstractContextManager[None]:
        """Around the forward of the module called `name`, which has rows that are chosen, or gets chosen ones."""
        rows = rows_of(inputs)
        if rows is None:
            return nullcontext()
        if not self.row_modules[name]:
            return self._with_rows(self.rows_of_samples(rows, name))
        around = self._rows[-1] if self._rows else None
        if ticket not in self._chosen and around is not None and around.tensor is not None:
            places = find_rows(rows, around.tensor)
            if places is not None:
                self._chosen[ticket] = Rows(None, around.numbers[places], around.per_sample, name)
        return self._with_rows(self._chosen[ticket]) if ticket in self._chosen else nullcontext()

    def _box(self, site: Site, shape: tuple[int, ...], place: _Place) -> Box:
        signature = signature_of(self.inputs)
        found = self._found(signature, site, shape, place)
        if found is None and site.module == LOSS and isinstance(self._trial, TrialModel):
            try:
                self._try_out_loss()
            except Exception as error:
                raise DrawRefusedError(
                    f"the loss function draws random numbers of shape {list(shape)}, and a trial run of it, which has "
                    f"to show what of that belongs to which sample, failed with {type(error).__name__}: {error}; draw "
                    f"within `with engine.random.of_samples():`, where the first dimension is the samples, or "
                    f"{self._remedy}"
                ) from error
            found = self._found(signature, site, shape, place)
        tried = self._alone, signature, self._modes()
        if found is None and isinstance(self._trial, TrialModel) and tried not in self._tried:
            self._try_out(self.inputs)
            found = self._found(signature, site, shape, place)
        if found is not None:
            return found
        what = f"{self._described(site)} draws random numbers of shape {list(shape)}"
        raise DrawRefusedError(f"{what}, {self._why(site)}")

    def _found(self, signature: Any, site: Site, shape: tuple[int, ...], place: _Place) -> Box | None:
        exact = self._sites.get(signature, {}).get(site)
        kinds = exact or next((s[site] for s in self._sites.values() if site in s), self._alike.get(_alike(site), ()))
        if self._part[1] > 1 and exact is None:  # a shorter sequence of another batch would be taken for a part of one
            here = self._sites.get(signature, {})
            kinds = next((known for other, known in here.items() if _alike(other) == _alike(site)), ())
        # A module may be called several times, and draw other shapes each time. One may look like a part of another.
        number = self._draws_of[site]
        kinds = (*kinds[number : number + 1], *kinds)
        for axes in kinds:
            if axes is None:
                continue
            # One element of each sample, and all of its features on this rank: other lengths need no other trial.
            adapts = exact is None and self._part[1] == 1
            box = box_of(
                shape,
                axes.of_sizes(shape) if adapts else axes,
                first=self.first_of_rank() + place.first,
                samples=place.samples,
                part=self._part,
                undivided=self._undivided,
                sequences=self._sequences,
            )
            if box is not None:
                return box
        return None

    def _described(self, site: Site) -> str:
        if site.module == LOSS:
            return LOSS
        if site.module and site.module not in self._modules:
            return f"the model's method {site.module!r}"
        return f"module {site.module!r}" if site.module else "the model's own forward"

    def _why(self, site: Site) -> str:
        error = self._trial if isinstance(self._trial, Exception) else self._not_tried.get(self._alone)
        if error is not None:
            first_line = str(error).partition("\n")[0]
            return (
                f"and a trial run, which has to show what of that belongs to which sample, failed with "
                f"{type(error).__name__}: {first_line}; {self._remedy}"
            )
        kinds = [k for sites in self._sites.values() for k in sites.get(site, ())]
        if not kinds:
            return (
                f"which it did not in a trial run, so which of them belong to which sample is not known; {self._remedy}"
            )
        known = " or ".join(str(list(axes.sizes)) for axes in kinds if axes is not None)
        if not known:
            return f"of which no dimension follows the number of samples or the model alone; {self._remedy}"
        return (
            f"and in a trial run {known} for each sample, of which this is neither the whole nor this rank's part; "
            f"{self._remedy}"
        )

    def refuse(self, operator: str) -> Exception:
        """As :class:`tensorshard.random.kernels.Source` says."""
        name = _name(self._stack[-1].place.path) if self._stack else ""
        return DrawRefusedError(
            f"{self._described(Site(name, 0))} calls torch's {operator}, whose random numbers cannot be computed "
            f"element by element; {self._remedy}"
        )


def current_randomness() -> ModelRandomness | None:
    """What the model that runs draws from, if that is the same at every layout."""
    source = current_source()
    return source if isinstance(source, ModelRandomness) else None


_ticket = torch.empty((), dtype=torch.int64)


def _take_ticket() -> int:
    return int(_ticket.random_(generator=torch.default_generator))


def _name(path: tuple[tuple[str, int], ...]) -> str:
    return path[-1][0].removeprefix(AGAIN) if path else ""


def _pattern(name: str) -> str:
    """The same for modules at one place in all blocks."""
    return re.sub(r"\d+", "*", name)


def _alike(site: Site) -> Site:
    """A name for the same place in all blocks."""
    return Site(_pattern(site.module), site.draw)


def _around(randomness: ModelRandomness, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    if name not in randomness.row_modules:
        return _around_draws(randomness, name, forward, *args, **kwargs)
    ticket = randomness.enter(name, in_path=False)
    try:
        with randomness.rows_given(name, ticket, (args, kwargs)):
            return _around_draws(randomness, name, forward, *args, **kwargs)
    finally:
        randomness.leave()


def _around_draws(randomness: ModelRandomness, name: str, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    if name not in randomness.drawing:  # a ticket is a random number, which others look for
        return forward(*args, **kwargs)
    randomness.enter(name)
    try:
        with drawing_from(randomness):
            return forward(*args, **kwargs)
    finally:  # recomputation stops a forward by an exception once it has what it needs
        randomness.leave()


def _enter_again(randomness: ModelRandomness, name: str, *_: Any) -> None:
    randomness.enter(name)


def _leave_again(randomness: ModelRandomness, *_: Any) -> None:
    randomness.leave()
