"""One micro-batch on its way through the model's forward on one stage."""

from collections.abc import Sequence
from typing import Any

import torch

from tensorshard.model.tensors import TensorSpec, take_apart
from tensorshard.pipeline.cut import Cut
from tensorshard.pipeline.trace.call_graph import Leaf
from tensorshard.pipeline.trace.derivatives import DetachedAlias


class StageLeft(BaseException):
    """Leaves the model's forward once the stage has computed its part. No ``except Exception`` stops it."""


class StageRun:
    """One micro-batch on its way through the model's forward."""

    def __init__(self, cut: Cut, stage: int, received: Sequence[torch.Tensor]) -> None:
        self._graph = graph = cut.graph
        self._start, self._stop = cut.spans[stage]
        self._last = stage == cut.stages - 1
        expected = graph.crossing(self._start) if stage else ()
        if len(received) != len(expected):
            raise ValueError(f"stage {stage} received {len(received)} tensors; it needs {len(expected)}")
        for leaf, tensor in zip(expected, received, strict=True):
            if not graph.spec(leaf).fits(tensor):
                raise ValueError(
                    f"stage {stage} received {tensor.dtype} {list(tensor.shape)} for the output of "
                    f"{graph.calls[leaf[0]].unit!r}, which should be {graph.spec(leaf)}"
                )
        self._sends: tuple[Leaf, ...] = () if self._last else graph.crossing(self._stop)
        self._values: dict[Leaf, torch.Tensor] = {
            leaf: DetachedAlias.apply(tensor) if tensor.requires_grad else tensor
            for leaf, tensor in zip(expected, received, strict=True)
        }
        self._zeros: dict[torch.dtype, torch.Tensor] = {}
        self.position = 0  # of the next call
        self.depth = 0  # 1 while a unit runs
        self.is_stale = False  # whether what is sent needs gradients that the next stage does not know of
        self._left = False

    def begin(self, unit: str) -> None:
        """Called when a call of `unit` begins."""
        if self.depth:
            self.depth += 1
            return
        if self.position >= self._stop and not self._last:
            self._left = True
            raise StageLeft
        calls = self._graph.calls
        expected = calls[self.position].unit if self.position < len(calls) else "the end of the model"
        if expected != unit:
            raise RuntimeError(
                f"the model called {unit!r} where {expected!r} was expected: the order of its calls depends on values "
                f"or random numbers, and so differs from that of the sample inputs; name a module around those that "
                f"vary as one unit (pp_units)"
            )
        self.position += 1
        self.depth = 1

    def end(self, output: Any) -> None:
        """Called when the call that began last is over."""
        self.depth -= 1
        if self.depth:
            return
        if self.is_foreign():
            return
        call = self.position - 1
        wanted = [leaf for leaf in self._sends if leaf[0] == call]
        if not wanted:
            return
        tensors = take_apart(output)[0]
        for leaf in wanted:
            spec, unit = self._graph.spec(leaf), self._graph.calls[call].unit
            if leaf[1] >= len(tensors) or not spec.fits(tensors[leaf[1]]):
                got = [str(TensorSpec.of(tensor)) for tensor in tensors]
                raise RuntimeError(
                    f"{unit!r} returned {', '.join(got) or 'no tensor'}, but tensor {leaf[1]} of its output should be "
                    f"{spec}, as in the run on fake tensors: its shapes depend on values"
                )
            tensor = tensors[leaf[1]]
            self.is_stale |= tensor.requires_grad and not spec.requires_grad
            self._values[leaf] = tensor.clone() if leaf in self._graph.overwritten else tensor

    def is_foreign(self) -> bool:
        """Whether the call that began last belongs to another stage."""
        return not self._start <= self.position - 1 < self._stop

    def placeholder(self, device: torch.device | None) -> Any:
        """The tensors that the call that began last, of another stage's unit, returns on this stage."""
        call = self.position - 1
        made = self._graph.calls[call]
        return made.structure.build(
            [self._tensor((call, index), spec, device) for index, spec in enumerate(made.specs)]
        )

    def _tensor(self, leaf: Leaf, spec: TensorSpec, device: torch.device | None) -> torch.Tensor:
        overwritten = leaf in self._graph.overwritten
        if leaf in self._values and leaf[0] < self._start:
            return self._values[leaf].clone() if overwritten else self._values[leaf]
        if overwritten:  # code outside of units writes into it, so one shared element in memory is not enough
            return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        if spec.dtype not in self._zeros:
            self._zeros[spec.dtype] = torch.zeros((), dtype=spec.dtype, device=device)
        return self._zeros[spec.dtype].expand(spec.shape)

    def sent(self) -> tuple[torch.Tensor, ...]:
        """What goes to the next stage."""
        return tuple(self._sent(leaf) for leaf in self._sends)

    def _sent(self, leaf: Leaf) -> torch.Tensor:
        tensor = self._values[leaf]
        return DetachedAlias.apply(tensor) if self._graph.sent_spec(leaf).requires_grad else tensor.detach()

    def check_ended(self) -> None:
        """Called when the model's forward has returned."""
        if self._left:
            raise RuntimeError(
                "the model returned although its forward was left: it catches every exception, by a bare `except:` or "
                "by `except BaseException:`, that of leaving a stage as well; catch Exception"
            )
        if self.position < len(self._graph.calls):
            expected = self._graph.calls[self.position].unit
            raise RuntimeError(
                f"the model returned before it called {expected!r}, which it called with the sample inputs: the order "
                f"of its calls depends on values or random numbers; name a module around those that vary as one unit "
                f"(pp_units)"
            )
