"""Heads with ``update=`` under a plan: their backward leaves gradients, and SGD trains them.

Between backward and update, a plan sums gradients over ranks, clips them, or skips a step. So it needs a gradient. The
update inside backward is switched off, and its rule becomes a parameter group of the optimizer.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tensorshard.passes.precision import master_dtype

logger = logging.getLogger("tensorshard")


@dataclass(frozen=True)
class HeadRule:
    """The SGD that a head would do by itself.

    Args:
        head: name of the module.
        parameters: the names of its parameters.
        options: of its optimizer's group, with what the optimizer notes there.
        tied: names of other modules' parameters that are the same as the head's.
    """

    head: str
    parameters: tuple[str, ...]
    options: dict[str, Any]
    tied: tuple[str, ...]

    def check(self, model: nn.Module) -> None:
        """Refuses what a plan could not do exactly.

        Raises:
            ValueError: a weight is tied; a weight or momentum is narrower than fp32; classes are sampled with a
                momentum; a step is half done; a scheduler is on the head's own optimizer.
        """
        head: Any = model.get_submodule(self.head)
        problem = self._problem(head.weight.dtype, head.sample_rate)
        if problem:
            raise ValueError(
                f"module {self.head!r} is a ParallelLinearCrossEntropy built with update=, whose parameters a plan "
                f"trains from gradients, by SGD on fp32 masters; {problem}"
            )

    def add_group(self, optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter]) -> None:
        """Adds the head's group to `optimizer`, with the head's own options.

        Every rank of a pipeline has the group, so that schedulers and checkpoints see the same groups on all. On ranks
        without the head it trains nothing.

        Raises:
            ValueError: the optimizer is not a ``torch.optim.SGD``.
        """
        if type(optimizer) is not torch.optim.SGD:
            raise ValueError(
                f"module {self.head!r} is a ParallelLinearCrossEntropy built with update=, which is SGD with "
                f"{self._described()}. Under a plan the optimizer does that in a parameter group of its own, but "
                f"optimizer(parameters) made {_with_article(type(optimizer).__name__)}: use "
                f"optimizer=functools.partial(torch.optim.SGD, lr=...) for the rest, or build the head without "
                f"update=, so that it is trained like the rest"
            )
        given = [(name, masters[name]) for name in self.parameters if name in masters]
        given = given or [(f"none of {self.head}", nn.Parameter(torch.empty(0)))]
        named = "param_names" in optimizer.param_groups[0]  # torch needs names for all groups or for none
        optimizer.add_param_group(
            {
                "params": given if named else [parameter for _, parameter in given],
                **self._sgd(),
                "dampening": 0,
                "nesterov": False,
                "maximize": False,
                "head": self.head,
            }
        )

    def log(self) -> None:
        """Logs how the update is done now."""
        steps = self.options["step"]
        logger.warning(
            "module %r was built with update=, but a plan needs its gradients, which take the memory of its weight "
            "once more; engine.optimizer trains it in a parameter group of its own: SGD with %s%s",
            self.head,
            self._described(),
            f", whose momentum begins anew after the {steps} steps of head.optimizer" if steps else "",
        )

    def _sgd(self) -> dict[str, float]:
        return {name: float(self.options[name]) for name in ("lr", "momentum", "weight_decay")}

    def _described(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._sgd().items())

    def _problem(self, dtype: torch.dtype, sample_rate: float) -> str | None:
        options = self.options
        if self.tied:
            return (
                f"its weight is also {', '.join(map(repr, self.tied))}, whose part of the gradient update= leaves out: "
                f"build the head without update=, or do not tie it"
            )
        if master_dtype(dtype) != dtype:
            return (
                f"its weight is of {str(dtype).removeprefix('torch.')}, which would not stay so narrow: build it with "
                f"dtype=torch.float32 (Plan(precision='bf16') computes in bf16), or train without a Plan"
            )
        if options["momentum_dtype"] != "fp32":
            return (
                f"its momentum of momentum_dtype={options['momentum_dtype']!r} would be as wide as the weight: leave "
                f"momentum_dtype out (zero=1 to 3 split the momentum over dp_shard), or train without a Plan"
            )
        if sample_rate < 1 and (options["momentum"] or options["weight_decay"]):
            return (
                f"with sample_rate={sample_rate} that would move the classes outside of a step's sample as well, by "
                f"momentum={options['momentum']} and weight_decay={options['weight_decay']}: build it with both at 0, "
                f"with sample_rate=1, or without update="
            )
        if options["pending"]:
            return (
                "micro-batches are in its momentum whose step was not ended, and a plan begins with a momentum of its "
                "own: call head.optimizer.step() first"
            )
        if "initial_lr" in options:
            return (
                "a learning-rate scheduler was built on head.optimizer, which does nothing then: build it on "
                "engine.optimizer, which has a parameter group of the head"
            )
        return None


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIO' else 'a'} {name}"
