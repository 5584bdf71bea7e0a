"""Finds models that call ``torch.distributed`` themselves, for all ranks, under a plan in which ranks share samples.

Codebooks that sum over all ranks what their batch adds to them are an example. Tensor-parallel ranks have the same
samples, which would count several times; of a pipeline one stage alone would make the call, and wait for ever.

Also here: errors of torch's own collectives and sharded tensors, said in the Engine's terms.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.call_watch import CallWatch, add_cause, is_of_collective, with_cause
from tensorshard.comm.groups import CollectiveMismatchError
from tensorshard.comm.world import world
from tensorshard.model.call_stack import users_line
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.modules import called_module
from tensorshard.torch_private.patches import replaced
from tensorshard.torch_private.process_groups import COLLECTIVES

_PACKAGE, _TORCH = (str(Path(module.__file__ or "").parent) for module in (sys.modules["tensorshard"], torch))
# torch's words when code computes with a DTensor and a plain tensor. The model's own parameters mix with plain ones.
_SHARDED = "mixed torch.Tensor and DTensor"


class OwnCollectives:
    """Watches the first forward in training.

    Args:
        plan: one under which ranks have the same samples, or parts of the model; else nothing is watched.
    """

    def __init__(self, plan: Plan) -> None:
        axes = {"tp": plan.tp, "cp": plan.cp, "pp": plan.pp}
        self._axes = [axis for axis, degree in axes.items() if degree > 1]
        self._watches = bool(self._axes) and dist.is_initialized()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, a forward may be the first.

        Raises:
            RuntimeError: its code makes a collective call for all ranks.
        """
        if not self._watches or not torch.is_grad_enabled() or world().is_simulated:
            yield
            return
        try:
            with models_collectives(self._refuse):
                yield
        finally:
            self._watches = False

    def _refuse(self, name: str, call: Callable[[], Any], group: dist.ProcessGroup, _: Any) -> Any:
        if group is not dist.group.WORLD:
            return call()
        raise RuntimeError(
            f"the model calls torch.distributed itself ({name}, {users_line()}), for all ranks, and under "
            f"{' and '.join(self._axes)} these have the same samples or other parts of the model: pass the "
            f"group of the ranks that share the batch (group=engine.mesh.dp_group), switch it off in the "
            f"model, or use a plan without {' and '.join(self._axes)}"
        )


@contextmanager
def models_collectives(instead: Callable[[str, Callable[[], Any], dist.ProcessGroup, Any], Any]) -> Iterator[None]:
    """A context in which ``instead(name, call, group, first)`` is called for a collective that a model's forward makes.

    Args:
        instead: is given the call to make, and its first argument, in which all but barriers leave their results.
    """

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            call = partial(method, group, *args, **kwargs)
            return instead(name, call, group, args[0] if args else None) if _is_a_models() else call()

        return called

    with ExitStack() as stack:
        for name in COLLECTIVES:
            if name in vars(dist.ProcessGroup):
                stack.enter_context(replaced(dist.ProcessGroup, name, partial(watched, name.strip("_"))))
        yield


def _is_a_models() -> bool:
    """Whether the code of a model, in its forward, makes the call."""
    frame, caller = sys._getframe(2), None
    while frame is not None:
        file = frame.f_code.co_filename
        if caller is None and not file.startswith(_TORCH):
            caller = file
            if caller.startswith(_PACKAGE):
                return False
        if caller is not None and called_module(frame) is not None:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextmanager
def explained(call: str, watch: CallWatch | None = None, *, counted: bool = True) -> Iterator[None]:
    """Adds advice to an error of a collective, or of a computation with a sharded tensor.

    Args:
        call: what the user called.
        watch: knows what the other ranks do.
        counted: whether all ranks make this call, the same number of times.
    """
    try:
        with watch.calling(call) if watch is not None and counted else nullcontext():
            yield
    except RuntimeError as error:
        if _SHARDED in str(error):
            error.add_note(
                "one of these tensors is split over the ranks (a DTensor), and another is plain: give the whole, by "
                "tensor.full_tensor(), which every rank has to call"
            )
        if is_of_collective(error):
            cause = None if watch is None else watch.explain(call)
            if cause is not None and not isinstance(error, CollectiveMismatchError):  # torch's own words
                raise CollectiveMismatchError(with_cause(call, cause)) from error
            if cause is not None:
                add_cause(error, call, cause)
            else:
                error.add_note(
                    f"{call} is a collective: every rank must call it, in the same order as all that computes on split "
                    f"or sharded tensors. Rank {dist.get_rank()} waited for a rank that has failed, ran out of batches "
                    f"before this one, did not call it, or took another branch in the model or the loss. Of streams "
                    f"whose lengths differ by rank, end all when the first one ends (an all-reduce over "
                    f"engine.mesh.dp_group of whether there is another batch tells), or deal a dataset by "
                    f"engine.loader. The process group is of no more use: end the processes"
                )
        raise
