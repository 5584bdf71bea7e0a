"""The plans that every model is trained under."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.models.case import Case

WITH_EXPERTS = frozenset({
    "plain/hand-MoE", "transformers/Mixtral", "transformers/OLMoE", "transformers/Qwen2-MoE", "transformers/Qwen3-MoE",
    "transformers/DeepSeek-V3", "transformers/gpt-oss", "transformers/Jamba", "packages/litgpt: Mixtral",
})  # fmt: skip
"""The models with a mixture of experts, by their keys."""


@dataclass(frozen=True)
class PlanCase:
    """One column of the table.

    Args:
        key: on the command line and in results files.
        label: in the table.
        ranks: how many.
        fields: of the Plan.
        splits_batch: over how many data ranks the batch is divided.
        for_sequences: whether only sequence models are tried under it.
    """

    key: str
    label: str
    ranks: int
    fields: dict[str, Any] = field(default_factory=dict)
    splits_batch: int = 1
    for_sequences: bool = False

    def suits(self, case: Case) -> bool:
        """Whether the model is tried under the plan."""
        return ("ep" not in self.fields or case.key in WITH_EXPERTS) and (case.is_sequence or not self.for_sequences)

    def random_of(self, case: Case) -> str:
        """As in the Plan. Compiled code draws by itself, and in 16 bits other samples' masks would hide differences."""
        return "by_rank" if self.fields.keys() & {"compile", "precision"} else case.random

    @property
    def micro_batches(self) -> int:
        return self.fields.get("micro_batches", 1)

    @property
    def takes_samples(self) -> bool:
        """Whether ``sample_inputs`` may help: the model is run on fake tensors."""
        return "tp" in self.fields or "pp" in self.fields


PLANS = {
    plan.key: plan
    for plan in (
        PlanCase("zero3", "ZeRO 3", 2, dict(zero=3), splits_batch=2),
        PlanCase("tp", "tp 2", 2, dict(tp=2)),
        PlanCase("pp", "pp 2", 2, dict(pp=2, micro_batches=2)),
        PlanCase("tp-pp", "tp 2 x pp 2", 4, dict(tp=2, pp=2, micro_batches=2)),
        PlanCase("sp", "tp 2, sequence parallel", 2, dict(tp=2, sequence_parallel=True)),
        PlanCase(
            "sp-pp",
            "tp 2 x pp 2, sequence parallel",
            4,
            dict(tp=2, pp=2, sequence_parallel=True, micro_batches=2),
            for_sequences=True,
        ),
        PlanCase("cp", "cp 2", 2, dict(cp=2)),
        PlanCase("cp-zero3", "cp 2, ZeRO 3 over 2 x 2", 4, dict(cp=2, zero=3), splits_batch=2, for_sequences=True),
        PlanCase("cp-tp", "cp 2 x tp 2", 4, dict(cp=2, tp=2), for_sequences=True),
        PlanCase("cp-pp", "cp 2 x pp 2", 4, dict(cp=2, pp=2, micro_batches=2), for_sequences=True),
        PlanCase(
            "cp-sp",
            "cp 2 x tp 2, sequence parallel",
            4,
            dict(cp=2, tp=2, sequence_parallel=True),
            for_sequences=True,
        ),
        PlanCase("cp-bf16", "cp 2, bf16", 2, dict(cp=2, precision="bf16"), for_sequences=True),
        PlanCase("cp-full", "cp 2, recompute full", 2, dict(cp=2, recompute="full"), for_sequences=True),
        PlanCase("ep", "ep 2, ZeRO 3", 2, dict(ep=2, zero=3), splits_batch=2),
        PlanCase("ep-tp", "ep 2 x tp 2", 4, dict(ep=2, tp=2), splits_batch=2),
        PlanCase("ep-pp", "ep 2 x pp 2", 4, dict(ep=2, pp=2, micro_batches=2), splits_batch=2),
        PlanCase("bf16", "ZeRO 3, bf16", 2, dict(zero=3, precision="bf16"), splits_batch=2),
        PlanCase("full", "ZeRO 3, recompute full", 2, dict(zero=3, recompute="full"), splits_batch=2),
        PlanCase("selective", "ZeRO 3, recompute selective", 2, dict(zero=3, recompute="selective"), splits_batch=2),
        PlanCase("compile", "ZeRO 3, compile", 2, dict(zero=3, compile=True), splits_batch=2),
    )
}
