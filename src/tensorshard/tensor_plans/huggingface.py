"""The tensor-parallel plans that Hugging Face publishes with its models, as one proposal among others.

They are read as plain data: ``base_model_tp_plan`` of a config, with names relative to the base model, and ``_tp_plan``
of a class with a head, with names of its own.
"""

from collections.abc import Mapping

from torch import nn

from tensorshard.tensor_plans.styles import COLWISE, COLWISE_GATHER, ROWWISE, SUM_GRADIENTS, VOCAB, Style
from tensorshard.tensor_plans.table import TensorPlan

# The names that styles have had from transformers 4.56 on. None: what a dense layer's table has no word for; what it
# names is left to the search.
_STYLES: dict[str, Style | None] = {
    "colwise": COLWISE,
    "local_colwise": COLWISE,
    "rowwise": ROWWISE,
    "local_rowwise": ROWWISE,
    "rowwise_split_input": ROWWISE,
    "rowwise_rep": ROWWISE,
    "colwise_rep": COLWISE_GATHER,
    "colwise_gather_output": COLWISE_GATHER,
    "embedding_rowwise": VOCAB,
    "replicated_with_grad_allreduce": SUM_GRADIENTS,
    "replicate": Style("replicate"),
}


def published_plan(model: nn.Module) -> TensorPlan | None:
    """The table published for `model`, in this package's styles; None where there is none."""
    table: dict[str, str] = {}
    base = getattr(model, "base_model", None)
    prefix = getattr(model, "base_model_prefix", "")
    within = f"{prefix}." if base is not None and base is not model and prefix else ""
    published = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    table.update({within + pattern: style for pattern, style in (published or {}).items()})
    own = vars(type(model)).get("_tp_plan")
    if isinstance(own, Mapping):
        table.update(own)
    entries = {pattern: style for pattern, name in table.items() if (style := normalise_style(name)) is not None}
    return TensorPlan(entries) if entries else None


def normalise_style(name: str) -> Style | None:
    """This package's style for one of Hugging Face's, whichever version's; None where there is no equivalent."""
    return _STYLES.get(name)
