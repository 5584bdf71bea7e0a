"""torch's parallelize_module, as its tutorial and torchtitan use it."""

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from benchmarks.layers import LLAMA_LAYERS, LayerWork

# For each kind of layer, by the module that holds it: what reads its input, what writes its output.
_REGIONS: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    "block": {
        "block.attention": (("query", "key", "value"), "output"),
        "block.mlp": (("up",), "down"),
    },
    "mlp": {"": (("up",), "down")},
    "llama": {
        f"model.layers.{layer}.{part}": split
        for layer in range(LLAMA_LAYERS)
        for part, split in {
            "self_attn": (("q_proj", "k_proj", "v_proj"), "o_proj"),
            "mlp": (("gate_proj", "up_proj"), "down_proj"),
        }.items()
    },
}
_NORMS = {
    "block": ("block.attention_norm", "block.mlp_norm"),
    "mlp": (),
    "llama": ("model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm", "model.norm"),
}


def build(
    work: LayerWork, rank: int, world_size: int, *, sequence_parallel: bool = False, prepare_input: bool = False
) -> nn.Module:
    """Options: `sequence_parallel` splits the norms' activations along the sequence, as torchtitan does.
    `prepare_input` makes one DTensor of what query, key and value read, as torchtitan does there, so that
    its gradient is summed once; without it each layer does so for itself, as in torch's own tutorial."""
    mesh = init_device_mesh("cpu", (world_size,))
    module = work.module()
    plan: dict[str, ParallelStyle] = {}
    for parent, (columns, row) in _REGIONS[work.kind].items():
        if parent and (sequence_parallel or prepare_input):
            plan[parent] = _prepare(work, Shard(1) if sequence_parallel else Replicate(), parent)
        prefix = f"{parent}." if parent else ""
        plan |= {f"{prefix}{column}": ColwiseParallel() for column in columns}
        plan[f"{prefix}{row}"] = RowwiseParallel(output_layouts=Shard(1) if sequence_parallel else Replicate())
    if sequence_parallel:
        plan |= {norm: SequenceParallel() for norm in _NORMS[work.kind]}
        plan |= _ends(work)
    return parallelize_module(module, mesh, plan)


def _prepare(work: LayerWork, layout: Replicate | Shard, parent: str) -> ParallelStyle:
    if parent.endswith("self_attn"):  # called by keyword
        return PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": layout}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
    return PrepareModuleInput(input_layouts=(layout,), desired_input_layouts=(Replicate(),))


def _ends(work: LayerWork) -> dict[str, ParallelStyle]:
    """Input and output of the whole are not split, for every contender alike."""
    if work.kind == "llama":  # whose rotary tables are computed from the whole input
        replicated, sharded = (Replicate(),), (Shard(1),)
        return {
            "model.layers.0": PrepareModuleInput(
                input_layouts=replicated, desired_input_layouts=sharded, use_local_output=True
            ),
            "": PrepareModuleOutput(output_layouts=sharded, desired_output_layouts=replicated),
        }
    return {
        "": PrepareModuleInputOutput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(1),),
            use_local_input=True,
            output_layouts=(Shard(1),),
            desired_output_layouts=(Replicate(),),
        )
    }
