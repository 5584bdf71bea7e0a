"""The Engine's methods for a loop of your own."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.data import Dataset

from tensorshard.comm.call_watch import CallWatch
from tensorshard.common.words import kind_of
from tensorshard.data.sampler import Balance
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.engine_random import EngineRandom
from tensorshard.engine.gradients import FinalGradients, GradientHook, HookHandle
from tensorshard.engine.guards.own_collectives import explained
from tensorshard.engine.last_batch import BatchShares, check_last_batch
from tensorshard.engine.loader import EngineLoader, EngineLoaders, is_stream
from tensorshard.engine.manual_loop import ManualLoop
from tensorshard.engine.measures import gather, mean
from tensorshard.engine.penalties import Penalties, Penalty, PenaltyHandle
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan

# Names that people look for on an Engine, and where to find what they mean.
_ELSEWHERE = {
    "parameters": "engine.model.parameters(); they are trained by engine.optimizer",
    "named_parameters": "engine.model.named_parameters()",
    "state_dict": "engine.full_state_dict(), or engine.save(path) for a checkpoint",
    "load_state_dict": "engine.model.load_state_dict(full_state_dict), or engine.load(path) for a checkpoint",
    "param_groups": "engine.optimizer.param_groups",
    "zero_grad": "engine.optimizer.zero_grad()",
    "train": "engine.model.train()",
    "eval": "engine.model.eval(); engine.evaluate and engine.predict do so by themselves",
    "forward": "engine.model(x)",
    "clip_grad_norm": "Plan(clip_grad_norm=...), or engine.clip_grad_norm_(max_norm)",
    "to": "parallelize(device=...)",
    "cuda": "parallelize(device='cuda')",
    "cpu": "parallelize(device='cpu'), or engine.full_state_dict()",
}


def matching(pattern: str | Sequence[str], aliases: Mapping[str, str], call: str) -> list[str]:
    """The parameters that patterns of names match: their own names, or those of modules that hold them.

    Args:
        aliases: for every name of a parameter, the first one.
        call: for errors.

    Raises:
        TypeError: a pattern is no text.
        ValueError: one matches nothing.
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    parameters: dict[str, None] = {}
    for one in patterns:
        if not isinstance(one, str):
            raise TypeError(f"{call} was given {kind_of(one)}; it takes names of parameters or modules, as text")
        names = [name for name in aliases if fnmatchcase(name, one) or fnmatchcase(name, f"{one}.*")]
        if not names:
            known = list(dict.fromkeys([*aliases, *(name.rpartition(".")[0] for name in aliases)]))
            near = difflib.get_close_matches(one, known, n=3) or list(aliases)[:3]
            raise ValueError(
                f"{call} was given {one!r}, which no parameter's name matches; there are {', '.join(near)}"
            )
        parameters.update(dict.fromkeys(aliases[name] for name in names))
    return list(parameters)


class LoopMethods:
    """The methods of an Engine for a loop of your own, beside ``engine.model`` and ``engine.optimizer``."""

    plan: Plan
    mesh: Mesh
    sharded: ShardedModel
    device: torch.device
    loaders: EngineLoaders
    _gradients: FinalGradients
    _manual_loop: ManualLoop
    _penalties: Penalties
    _shares: BatchShares
    _watch: CallWatch
    random: EngineRandom

    def backward(self, loss: Any, *, last: bool | None = None) -> torch.Tensor:
        """The backward of one micro-batch's `loss`, in place of ``loss.backward()``.

        Gradients become those of the mean over the plan's micro-batches and the data ranks: after the last one,
        ``p.grad`` of ``engine.model.parameters()`` is the gradient, unscaled in fp16 too. With ``micro_batches=1``
        every call adds to the gradients, until ``engine.optimizer.zero_grad()``.

        Args:
            loss: a scalar, the mean over the micro-batch's samples; or ``(sum, count)`` if the numbers of samples or
                tokens vary. The gradient is then exactly that of the global sum over the global count. Of an epoch's
                last batch of :meth:`loader`, a mean counts by this rank's number of samples.
            last: whether the update comes after this micro-batch, although it may not be the plan's last, as at the end
                of an epoch. A mean still counts ``1 / micro_batches``, as if those that are left out had a loss of 0;
                a ``(sum, count)`` counts as it does always. By default the plan's last one is the last.

        Returns:
            The mean of this micro-batch's loss over the data ranks, without a gradient: a scalar, the same on every
            rank, which one process would print. For ``(sum, count)`` it is the global sum over the global count.

        Raises:
            TypeError: `loss` is neither.
            ValueError: `loss` does not depend on anything that is trained; it is a mean while an epoch's last batch of
                :meth:`loader` is at hand, of which the data ranks have different numbers of samples, and the model was
                called with other tensors than that batch's.
            RuntimeError: the plan has a pipeline; there are penalties of :meth:`add_penalty`.

        After any error, the gradients of this step are dropped.
        """
        weight = self._shares.weight(loss)
        if self._penalties:
            raise RuntimeError(
                "engine.backward(loss) was called after engine.add_penalty(function), which engine.step adds to its "
                "loss: in a loop of your own add function(engine.model) to the loss, and call the handle's remove()"
            )
        return self._manual_loop.backward(loss, weight, bool(last))

    def accumulate(self, *, last: bool | None = None) -> AbstractContextManager[None]:
        """A context for one micro-batch of a loop of your own: forward, :meth:`backward`, and perhaps the update.

        Inside it, ``engine.optimizer.step()`` and ``zero_grad()`` do nothing until the last of the step's
        ``plan.micro_batches``. So the same loop works for any number of micro-batches.

        Args:
            last: whether the step ends with this micro-batch, also if it has fewer: its gradient is then the mean over
                those that it had. None for whether it is the last batch of an epoch of :meth:`loader`. Batches of other
                loaders, and of streams, fill up the step in the next epoch.
        """
        ends = any(loader.is_at_end for loader in self.loaders.by_name.values()) if last is None else last
        return self._manual_loop.accumulate(ends)

    def gather(self, values: Any) -> Any:
        """What each data rank has of its own samples, put together: outputs, predictions, losses of single samples.

        Every rank calls it and gets the whole, on the Engine's device and without gradients. The order is that of the
        data ranks, which is the order of a batch of :meth:`loader`.

        Args:
            values: a tensor, or a tuple, list, dict or dataclass of tensors. The first dimension of each is the
                samples, of which ranks may have different numbers. A scalar counts as one sample.

        Returns:
            The same structure; tensors have the samples of all data ranks as their first dimension.

        Raises:
            TypeError: there is no tensor in `values`.
            ValueError: another dimension, or a type, differs between the ranks.
        """
        with explained("engine.gather", self._watch):
            return gather(values, self.mesh, self.device)

    def mean(self, values: Any) -> Any:
        """The mean over the data ranks, as one process would compute it. Every rank calls it.

        Args:
            values: a tensor whose first dimension is the samples (all elements count the same, ranks may have different
                numbers of them); a scalar or a number (all ranks count the same); ``(sum, count)``, for the sum of all
                sums over the sum of all counts; or a dict of these.

        Returns:
            A scalar tensor without a gradient, the same on every rank; a float for a number; a dict for a dict.

        Raises:
            TypeError: a value has none of these forms.

        Examples:
            >>> accuracy = engine.mean((engine.predict(inputs).argmax(1) == targets).float())
            >>> found = engine.mean({"loss": loss, "tokens": (token_losses.sum(), token_losses.numel())})
        """
        with explained("engine.mean", self._watch):
            return mean(values, self.mesh, self.device)

    def gradient_norm(self) -> torch.Tensor:
        """L2 norm of the whole model's gradient, before clipping: a scalar, the same on every rank. A collective.

        Raises:
            RuntimeError: the step's micro-batches are not complete; the plan has a pipeline
                (see :attr:`Engine.grad_norm`).
        """
        return self._manual_loop.gradient_norm()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients so that the whole model's norm is at most `max_norm`; returns the norm before that.

        It does what ``torch.nn.utils.clip_grad_norm_`` does, under any plan without a pipeline. A collective. With
        ``plan.clip_grad_norm`` the update clips by itself.
        """
        return self._manual_loop.clip_grad_norm_(max_norm)

    def register_gradient_hook(self, hook: GradientHook) -> HookHandle:
        """Registers a `hook` that is called before each update, by :meth:`Engine.step` and in your own loop, before
        clipping.

        Args:
            hook: called as ``hook(name, gradient)`` for each trained parameter of this rank that has a gradient:
                ``p.grad`` of ``engine.model``, complete, averaged and unscaled. It may change the gradient in place, or
                return another one. It must do the same on all ranks.

        Returns:
            A handle; its ``remove()`` removes the hook.
        """
        return self._gradients.register_hook(hook)

    def freeze(self, pattern: str | Sequence[str]) -> list[str]:
        """Stops training parameters, from the next forward on: what ``requires_grad_(False)`` does, by names.

        The optimizer leaves them and their states as they are, as torch's do. Every rank calls it, between steps. With
        a pipeline, a pattern also says which parameters of other stages are frozen there.

        Args:
            pattern: of names of parameters or modules, as ``fnmatch`` reads them: ``"blocks.0"``, ``"*.bias"``; or
                several of them.

        Returns:
            The names of all parameters that match, frozen before or not.

        Raises:
            ValueError: a pattern matches nothing; nothing was changed.

        Examples:
            >>> frozen = engine.freeze("layers.*")
            >>> loss = engine.step(inputs, targets)
            >>> frozen = engine.unfreeze("layers.*")
        """
        names = matching(pattern, self.sharded.aliases(), "engine.freeze")
        self._require_gradients(names, False)
        return names

    def unfreeze(self, pattern: str | Sequence[str]) -> list[str]:
        """Trains parameters from the next forward on: what ``requires_grad_(True)`` does, by names as for
        :meth:`freeze`.

        The optimizer goes on with the states that they had. One that was frozen at ``parallelize`` joins the optimizer
        in the group that `optimizer` puts it in. Every rank calls it.

        Returns:
            The names of all parameters that match, trained before or not.

        Raises:
            ValueError: nothing matches.
            RuntimeError: by the next step: the optimizer is offloaded, and has no room for one that was frozen at
                ``parallelize``.
        """
        names = matching(pattern, self.sharded.aliases(), "engine.unfreeze")
        self._require_gradients(names, True)
        return names

    def _require_gradients(self, names: Sequence[str], required: bool) -> None:
        shown = self.sharded.shown_parameters()
        for name in names:
            if name in shown:
                shown[name].requires_grad_(required)

    def add_penalty(self, function: Penalty) -> PenaltyHandle:
        """Adds a penalty on the weights to the loss of every :meth:`Engine.step`, once a step, under any plan.

        L1 and L2 of chosen weights, distances to earlier weights, orthogonality: whatever is a sum of terms of single
        parameters. With a pipeline each rank calls it with its own parameters, and the results are summed; so a penalty
        that combines parameters of several stages (a product of two norms, say) would be wrong there. A parameter that
        several stages have counts once.

        Args:
            function: called as ``function(model)``; it returns a scalar tensor, computed from
                ``model.named_parameters()``: whole tensors under the model's names, in the master weights' precision.
                They are gathered for it, so a rank needs room for all that its stage has. Every rank calls it at the
                same point of a step. It cannot run modules.

        Returns:
            A handle; its ``remove()`` removes the penalty.

        The loss that ``step`` returns includes it. Those of ``evaluate`` are of ``loss_fn`` alone.

        Examples:
            >>> handle = engine.add_penalty(lambda model: 1e-4 * sum(p.abs().sum() for p in model.parameters()))
            >>> handle.remove()
        """
        return self._penalties.register(function)

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        name: str | None = None,
        cut_sequences: bool = False,
        lengths: Sequence[float] | Callable[[Any], float] | None = None,
        padded: bool = False,
        **options: Any,
    ) -> EngineLoader:
        """A DataLoader for this rank, whose order does not depend on the plan; checkpoints hold where it stands.

        Each pass over it is one epoch. Ranks that differ only along tp, cp or pp get the same batches; tensors are on
        the Engine's device.

        Args:
            dataset: a map-style dataset, with a length; or a stream (``IterableDataset``), the same on every rank. Each
                reads it whole and takes its share, whatever the number of ranks and workers. One with
                ``state_dict`` and ``load_state_dict``, as torchdata and Hugging Face's ``datasets`` have, goes on from
                its place in a checkpoint; any other is read again up to that place. ``set_epoch`` is called before
                each epoch if there is one.
            batch_size: samples in one batch over all data ranks, so that training is the same on any number of them.
            shuffle: whether each epoch has its own order, which depends on the seed and the epoch alone. False for a
                stream, which keeps its own.
            drop_last: whether to leave out an epoch's last, smaller batch. Else it is dealt as evenly as possible, and
                some ranks may get none of its samples: :meth:`Engine.step` counts each sample once all the same, also
                where micro-batches get different numbers of samples, and if you read batches ahead.
            seed: of the order; None for the Engine's.
            generator: for the order of ``DataLoader(dataset, batch_size, shuffle=True, generator=generator)`` in place
                of that of `seed`, to compare with a script that has one. In the same state on every rank, and when a
                run is resumed. Its state is copied.
            name: the loader's name in checkpoints; by default "loader0", "loader1" and so on, in the order they are
                made.
            cut_sequences: whether each rank of context parallelism is given its own positions of every sample alone,
                for sequences that a host should not hold ``cp`` times over, or at all. The batch looks whole, and
                trains with the same losses. Samples are cut before they are put together, so of a dataset that returns
                views of a memory-mapped file, only this rank's positions are read. The sequences of a batch have one
                length. With ``cp=1`` they are whole.
            lengths: how long each sample is, in any unit; of a stream, a function of a sample. The samples of each
                batch are then dealt so that data ranks finish together. They get different numbers of them, at least
                ``plan.micro_batches``. What the batch is, and its loss, stay the same.
            padded: with `lengths`: whether `collate_fn` fills a rank's samples up to its longest one. A rank then takes
                as long as its samples times that length, and similar lengths are dealt to one rank.
            options: as for ``torch.utils.data.DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory`` and so on.

        Raises:
            ValueError: the number of data ranks does not divide `batch_size`; `name` is taken; `lengths` is of another
                number of samples; `padded` is given without it; `cut_sequences` is given
                with a pipeline, with ``cp_dims`` or with a ``collate_fn``; a pipeline with batch
                normalization could not cut the last batch into ``plan.micro_batches``.
            TypeError: `dataset` has no length and is no stream; an option would change the order of the data.
        """
        name = name or f"loader{len(self.loaders.by_name)}"
        if name in self.loaders.by_name:
            raise ValueError(
                f"there is a loader called {name!r} already, whose place checkpoints hold; give another name"
            )
        if cut_sequences:
            _check_cut(self.plan, options)
        if padded and lengths is None:
            raise ValueError("engine.loader was given padded=True without lengths: give the length of each sample")
        made = EngineLoader(
            dataset,
            batch_size,
            dp_rank=self.mesh.dp_rank,
            dp_size=self.mesh.dp_size,
            device=self.device,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=self.random.seed if seed is None else seed,
            options=options,
            generator=generator,
            sequences=self.sharded.sequences if cut_sequences else None,
            lengths=lengths,
            balance=Balance(padded, self.plan.micro_batches),
        )
        if not drop_last:
            # The last batch of a stream may have a single sample.
            rest = 1 if is_stream(dataset) else len(dataset) % batch_size  # type: ignore[arg-type]
            check_last_batch(rest, self.plan, self.sharded.structure)
        self.loaders.add(name, made)
        return made

    if not TYPE_CHECKING:  # else mypy would accept any name as an attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name in _ELSEWHERE:
                raise AttributeError(f"an Engine has no {name!r}; use {_ELSEWHERE[name]}", name=name, obj=self)
            near = difflib.get_close_matches(name, [known for known in dir(self) if known[0] != "_"], n=1)
            hint = f"; did you mean {near[0]!r}?" if near and name[0] != "_" else ""
            raise AttributeError(f"an Engine has no attribute {name!r}{hint}", name=name, obj=self)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "an Engine is not called: engine.model(inputs) is the model's output, and engine.step(inputs, targets) a "
            "whole optimizer step"
        )

    def __iter__(self) -> Iterator[NoReturn]:
        raise TypeError(
            "an Engine is not a list of parameters: engine.optimizer trains its model; give another optimizer to "
            "parallelize(optimizer=functools.partial(...))"
        )


def _check_cut(plan: Plan, options: Mapping[str, Any]) -> None:
    """Refuses what does not go with samples that are cut before they are put together."""
    given = {
        f"pp={plan.pp}": plan.pp > 1 and "a pipeline cuts whole sequences itself, on its first and last stage",
        f"cp_dims={plan.cp_dims!r}": plan.cp_dims is not None
        and "these are names of the model's arguments, and sequences of samples are found by their lengths",
        "collate_fn": options.get("collate_fn") is not None
        and "it would be given parts of samples, of which it can make neither targets nor padding",
    }
    for name, reason in given.items():
        if reason:
            raise ValueError(
                f"engine.loader(cut_sequences=True) was given with {name}, but {reason}; leave out one of the two"
            )
