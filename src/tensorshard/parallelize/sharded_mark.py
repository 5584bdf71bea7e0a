"""Marks on modules that a plan has laid out, so that none is laid out twice: the second plan would train nothing."""

from collections.abc import Iterable

from torch import nn

_MARK = "_tensorshard_laid_out_by"


def mark_laid_out(models: Iterable[nn.Module], by: str) -> None:
    """Marks every module of `models` as laid out that holds tensors: others may be shared with another model.

    Args:
        by: the name of the function that did it, for the error of :func:`check_not_laid_out`.
    """
    for model in models:
        for module in model.modules():
            if _holds_tensors(module):
                vars(module)[_MARK] = by


def _holds_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def is_laid_out(module: nn.Module) -> bool:
    """Whether `module` is, or belongs to, a model that is laid out."""
    return _MARK in vars(module)


def check_not_laid_out(model: nn.Module) -> None:
    """Refuses a model if it, or one of its modules, is laid out already.

    Raises:
        ValueError: it is laid out already, whether or not its Engine still exists.
    """
    for name, module in model.named_modules():
        by = vars(module).get(_MARK)
        if by is not None:
            what = f"module {name!r} of the model" if name else "the model"
            raise ValueError(
                f"{what} is laid out already, by {by}, and a model can be laid out only once. Build a new model, or "
                f"give parallelize the callable that builds it. To go on with these weights, engine.save() them and "
                f"load() them under the other plan, or load the old engine's full_state_dict() into the new model"
            )
