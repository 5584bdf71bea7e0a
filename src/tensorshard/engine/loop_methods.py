"""The Engine's methods for a loop of one's own."""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils.data import Dataset

from tensorshard.engine.final_gradients import FinalGradients, GradientHook, HookHandle
from tensorshard.engine.loader import EngineLoader
from tensorshard.engine.other_weights import using_weights
from tensorshard.engine.own_loop import OwnLoop
from tensorshard.engine.waiting_for_updates import WaitingForUpdates
from tensorshard.mesh import Mesh

# What people look for on an Engine, and where it is.
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


class LoopMethods(WaitingForUpdates):
    """What a loop of one's own calls beside ``engine.model`` and ``engine.optimizer``: ``docs/your-own-loop.md``."""

    mesh: Mesh
    device: torch.device
    loaders: dict[str, EngineLoader]
    loader_states: dict[str, dict[str, int]]
    _gradients: FinalGradients
    _own_loop: OwnLoop
    _seed: int

    def backward(self, loss: Any) -> None:
        """The backward of one micro-batch's `loss`, in place of ``loss.backward()``.

        Gradients become those of the mean over the plan's micro-batches and the data ranks: after the last one,
        ``p.grad`` of ``engine.model.parameters()`` is the gradient, unscaled in fp16 too. With ``micro_batches=1``
        every call adds to the gradients, until ``engine.optimizer.zero_grad()``.

        Args:
            loss: a scalar, the mean over the micro-batch's samples; or ``(sum, count)`` where samples or tokens vary,
                whose gradient is exactly that of the global sum over the global count.

        Raises:
            TypeError: it is neither.
            ValueError: nothing that is trained is behind it.
            RuntimeError: the plan has a pipeline.

        Whatever it raises, the gradients of this step are dropped.
        """
        self._own_loop.backward(loss)

    def accumulate(self) -> AbstractContextManager[None]:
        """Surrounds one micro-batch of a loop of one's own: forward, :meth:`backward`, and perhaps the update.

        ``engine.optimizer.step()`` and ``zero_grad()`` do nothing within it before the step's last micro-batch, of
        ``plan.micro_batches``. So the same loop serves any number of them.
        """
        return self._own_loop.accumulate()

    def gradient_norm(self) -> torch.Tensor:
        """L2 norm of the whole model's gradient, before clipping: a scalar, the same on every rank. A collective.

        Raises:
            RuntimeError: the step's micro-batches are not complete; the plan has a pipeline
                (see :attr:`Engine.grad_norm`).
        """
        return self._own_loop.gradient_norm()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients so that their norm over the whole model is at most `max_norm`; returns it as it was.

        As ``torch.nn.utils.clip_grad_norm_``, under any plan without a pipeline. A collective. With
        ``plan.clip_grad_norm`` the update does so by itself.
        """
        return self._own_loop.clip_grad_norm_(max_norm)

    def register_gradient_hook(self, hook: GradientHook) -> HookHandle:
        """Has `hook` called before each update, by :meth:`Engine.step` and in a loop of one's own, before clipping.

        Args:
            hook: called as ``hook(name, gradient)`` for each trained parameter of this rank that has a gradient:
                ``p.grad`` of ``engine.model``, complete, averaged and unscaled. It may change it in place, or return
                another in its place. It must do alike on all ranks.

        Returns:
            A handle; its ``remove()`` takes the hook away.
        """
        return self._gradients.register_hook(hook)

    def using_weights(self, weights: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Within it the model has `weights`, such as an average of a run's; afterwards its own again. A collective.

        Args:
            weights: by names of ``engine.model.named_parameters()``, each like the parameter: made by
                ``parameter.detach().clone()``.

        Raises:
            ValueError: a name that no parameter has, or another shape; nothing was changed then.
        """
        return using_weights(self.sharded, dict(self.model.named_parameters()), weights)

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
        name: str | None = None,
        **options: Any,
    ) -> EngineLoader:
        """A DataLoader for this rank, whose order does not depend on the plan; checkpoints hold where it stands.

        Each pass over it is one epoch. Ranks that differ only along tp, cp or pp get the same batches; tensors are on
        the Engine's device.

        Args:
            dataset: with a length, and samples by their index.
            batch_size: samples in one batch over all data ranks, so that training is the same on any number of them.
            shuffle: whether each epoch has an order of its own, made of the seed and the epoch alone.
            drop_last: whether to leave out an epoch's last, smaller batch. Else it is dealt as evenly as it can be.
            seed: of the order; the Engine's if None.
            name: of its place in checkpoints; by default "loader0", "loader1" and so on, as they are made.
            options: as for ``torch.utils.data.DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory`` and so on.

        Raises:
            ValueError: a batch size that does not divide over the data ranks; a name that is taken.
            TypeError: a dataset without a length, or an option that the order of the data depends on.
        """
        made = EngineLoader(
            dataset,
            batch_size,
            dp_rank=self.mesh.dp_rank,
            dp_size=self.mesh.dp_size,
            device=self.device,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=self._seed if seed is None else seed,
            options=options,
        )
        name = name or f"loader{len(self.loaders)}"
        if name in self.loaders:
            raise ValueError(
                f"there is a loader called {name!r} already, whose place checkpoints hold; give another name"
            )
        self.loaders[name] = made
        if name in self.loader_states:  # of a checkpoint that was loaded before
            made.load_state_dict(self.loader_states.pop(name))
        return made

    if not TYPE_CHECKING:  # else every name would pass for an attribute

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
