"""Hugging Face Accelerate's FSDP2 plugin, wrapping each block."""

from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.peers import ModelFactory, Step
from benchmarks.workload import OPTIMIZER, loss_fn


def build(model: ModelFactory, rank: int, world_size: int, *, reshard_after_forward: bool = True) -> Step:
    """Options: `reshard_after_forward` is True for ZeRO 3, False for ZeRO 2."""
    plain = model()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=reshard_after_forward,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(plain.blocks[0]).__name__],
        # Every rank has the weights already. Loading them on rank 0 alone is for Transformers' checkpoints.
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # On CPUs Accelerate (1.15) passes over the plugin in silence and prepares for DDP. What it does on GPUs
    # runs on CPUs too, once its state says so.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    sharded, optimizer = accelerator.prepare(plain, OPTIMIZER(plain.parameters()))
    if not all(isinstance(parameter, DTensor) for parameter in sharded.parameters()):
        raise RuntimeError("Accelerate left parameters whole, so that this is not FSDP2")

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = loss_fn(sharded(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
