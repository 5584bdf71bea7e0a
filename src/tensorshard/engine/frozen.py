"""A model that is not trained, beside those that are: a teacher, a reference, a reward model."""

from typing import Any, NoReturn

import torch
from torch import nn

from tensorshard.engine.engine import Engine
from tensorshard.engine.generation import logits_in
from tensorshard.loss.logits.distillation import distillation_loss
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan


class FrozenModel:
    """A model under a plan that nothing trains. Made by :func:`tensorshard.parallelize_frozen`.

    It has no optimizer, gradients or master weights: at ZeRO 3 a rank holds its share of the weights in their own type.

    Attributes:
        plan, mesh, device: as an Engine's.

    Examples:
        >>> teacher = ts.parallelize_frozen(functools.partial(torch.nn.Linear, 16, 4), ts.Plan(zero=3))
        >>> teacher(torch.randn(8, 16)).shape
        torch.Size([8, 4])
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.plan: Plan = engine.plan
        self.mesh: Mesh = engine.mesh
        self.device: torch.device = engine.device

    @property
    def model(self) -> nn.Module:
        """The sharded model, which can be called with gradients by its inputs, under a plan without a pipeline: for a
        perceptual loss, say, or a generator's critic."""
        return self._engine.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for this data rank's batch, in evaluation mode, without gradients, 16-bit tensors as fp32.

        It may be called anywhere: in a loop, and in the loss function of an Engine. Ranks that differ only along tp, cp
        or pp of this model's own plan pass the same batch, and all get the whole output.

        Args:
            args: the model's positional arguments; or one tuple or dict of all arguments, as for
                :meth:`tensorshard.Engine.step`.
            kwargs: its keyword arguments.

        Raises:
            TypeError: positional and keyword arguments were given together.
            ValueError: ranks that should pass the same batch do not.
        """
        if args and kwargs:
            raise TypeError(
                f"a frozen model was called with {len(args)} positional arguments and the keywords "
                f"{', '.join(kwargs)}; name all of them, or none"
            )
        return self._engine.predict(kwargs or (args[0] if len(args) == 1 else args))

    def log_probs(self, inputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """The log-probability of each target, as :meth:`tensorshard.Engine.log_probs` computes it: large logits are not
        held."""
        return self._engine.log_probs(inputs, targets)

    def distillation_loss(
        self, inputs: Any, student_logits: torch.Tensor, *, temperature: float = 1.0, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How far a student's logits are from this teacher's for the same inputs:
        ``tensorshard.nn.functional.distillation_loss``, which holds neither of them.

        It is called in a ``loss_fn(model, batch)`` or a loop of your own. This model then needs the same data ranks as
        the student. Otherwise, and beside a student with a pipeline, compute the teacher's logits before the step, and
        pass them as targets. With ``pp`` or ``cp`` the teacher's logits are held.

        Args:
            inputs: of this data rank, as for :meth:`tensorshard.Engine.step`.
            student_logits: [samples, ..., classes].
            temperature, mask: as for that function.

        Raises:
            ValueError: the shapes differ; ranks that should pass the same inputs do not.
        """
        options: dict[str, Any] = {"temperature": temperature, "mask": mask}
        if self.plan.pp > 1 or self.plan.cp > 1:
            return distillation_loss(student_logits, logits_in(self._engine.predict(inputs)), **options)
        with_grad = torch.is_grad_enabled()

        def read(output: Any, _: Any) -> Any:
            with torch.set_grad_enabled(with_grad):
                return distillation_loss(student_logits, logits_in(output), **options)

        return self._engine._read_output("distillation_loss", inputs, None, read)

    def gather(self, values: Any) -> Any:
        """What each of its data ranks has, put together on every rank, as :meth:`tensorshard.Engine.gather` does: so
        the data ranks of another plan get theirs."""
        return self._engine.gather(values)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The original model's state dict, as of an Engine: on rank 0; {} elsewhere. Every rank calls it."""
        return self._engine.full_state_dict()

    def summary(self) -> Any:
        """The types and sizes of what this rank holds."""
        return self._engine.summary()

    def __getattr__(self, name: str) -> NoReturn:
        if name in ("step", "backward", "optimizer", "train"):
            raise AttributeError(
                f"a frozen model has no {name!r}, since nothing trains it: tensorshard.parallelize(model, plan, "
                f"optimizer=..., loss_fn=...) makes an Engine",
                name=name,
                obj=self,
            )
        raise AttributeError(
            f"a frozen model has no {name!r}; it is called as model(inputs), and has log_probs(inputs, targets), "
            f"gather(values), the sharded model as .model, plan, mesh and full_state_dict()",
            name=name,
            obj=self,
        )
