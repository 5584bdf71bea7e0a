"""What a run will hold on each rank, printed before it starts."""

from dataclasses import dataclass

import torch

from tensorshard.comm.sharding import to_local
from tensorshard.passes.precision import DTYPES
from tensorshard.plan.plan import Plan
from tensorshard.sharded.sharded_model import ShardedModel


@dataclass(frozen=True)
class Summary:
    """Parameters and types of a laid-out model, as one rank sees them. Sizes are in bytes."""

    parameters: int
    trained_parameters: int
    held_parameters: int
    updated_parameters: int
    master_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    buffer_bytes: int
    optimizer: str
    tensor_plan: str | None
    pipeline: str | None
    offload: str | None = None
    logits: str | None = None

    def describe(self) -> str:
        """A few lines for a person."""
        lines = [
            f"parameters     {self.parameters:,} in the model, {self.trained_parameters:,} of them trained",
            f"on this rank   {self.held_parameters:,} held, {self.updated_parameters:,} updated",
            f"dtypes         {_name(self.master_dtype)} master weights and optimizer states, "
            f"{_name(self.compute_dtype)} computation, {_name(self.reduce_dtype)} gradient sums",
            f"optimizer      {self.optimizer}",
        ]
        if self.logits is not None:
            lines.append(self.logits)
        if self.tensor_plan is not None:
            lines.append(self.tensor_plan)
        if self.pipeline is not None:
            lines.append(self.pipeline)
        if self.offload is not None:
            lines.append(f"offloaded by this rank:\n{self.offload}")
        return "\n".join(lines)


def summarize(
    plan: Plan, sharded: ShardedModel, optimizer: torch.optim.Optimizer, offload: str | None = None
) -> Summary:
    """Counts what a laid-out model holds on this rank."""
    masters = sharded.masters()
    trained = {p for p in masters.values() if p.requires_grad}
    first = next(iter(trained or masters.values()), torch.empty(0))
    shapes = sharded.full_shapes()
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return Summary(
        parameters=sum(shape.numel() for shape in shapes.values()),
        trained_parameters=sum(shape.numel() for name, shape in shapes.items() if sharded.is_trained(name)),
        held_parameters=sharded.held_numel(),
        updated_parameters=sum(to_local(p).numel() for p in trained),
        master_dtype=first.dtype,
        compute_dtype=DTYPES[plan.precision] if first.dtype == torch.float32 else first.dtype,
        reduce_dtype=DTYPES[plan.reduce_dtype or "fp32"],
        buffer_bytes=sum(b.nbytes for b in sharded.model.buffers()),
        optimizer=type(optimizer).__name__ + (" (fused)" if fused else ""),
        tensor_plan=sharded.split.describe(),
        pipeline=sharded.describe_stages(),
        offload=offload,
        logits=sharded.logits.describe(),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
