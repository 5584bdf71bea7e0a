"""The tensor-parallel plans that Hugging Face publishes with its models. The search treats each as one proposal.

They are read as plain data: ``base_model_tp_plan`` of a config, with names relative to the base model, and
``_tp_plan`` of a class with a head, with names of its own.
"""

from collections.abc import Mapping

from torch import nn

from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.styles import COLWISE, COLWISE_GATHER, ROWWISE, SUM_GRADIENTS, VOCAB, Replicate
from tensorshard.tensor_parallel.table.table import TensorTable

# The names of styles since transformers 4.56.
_STYLES: dict[str, Style] = {
    "colwise": COLWISE,
    "local_colwise": COLWISE,
    "rowwise": ROWWISE,
    "local_rowwise": ROWWISE,
    "rowwise_rep": ROWWISE,
    "rowwise_split_input": ROWWISE,
    "colwise_rep": COLWISE_GATHER,
    "colwise_gather_output": COLWISE_GATHER,
    "embedding_rowwise": VOCAB,
    "replicated_with_grad_allreduce": SUM_GRADIENTS,
    "replicate": Replicate(),
}
# Styles for mixtures of experts, and for activations alone. The search decides about what they name.
_NO_EQUIVALENT = frozenset([
    "all_reduce", "embedding_colwise", "ep_dispatch_experts", "ep_router", "free_full_weight", "gather",
    "grouped_gemm", "isolated_from_parallel", "local", "local_packed_rowwise", "local_params", "mla_kv_a_proj",
    "moe_identity_expert", "moe_tp_experts", "packed_colwise", "packed_rowwise", "sequence_parallel",
])  # fmt: skip


def published_table(model: nn.Module) -> tuple[TensorTable, dict[str, str]]:
    """The table published with `model`, perhaps empty; and its entries whose style tensorshard does not know."""
    table: dict[str, str] = {}
    prefix = getattr(model, "base_model_prefix", "")
    within = f"{prefix}." if prefix and getattr(model, "base_model", model) is not model else ""
    published = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    table.update({within + pattern: style for pattern, style in (published or {}).items()})
    own = vars(type(model)).get("_tp_plan")
    if isinstance(own, Mapping):
        table.update(own)
    entries = {pattern: style for pattern, name in table.items() if (style := _STYLES.get(name)) is not None}
    unknown = {p: name for p, name in table.items() if name not in _STYLES and name not in _NO_EQUIVALENT}
    return TensorTable(entries), unknown
