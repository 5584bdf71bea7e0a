"""DeepSpeed's ZeRO 1, 2 and 3, with torch's own AdamW passed in."""

import deepspeed
from torch import Tensor

from benchmarks.peers import ModelFactory, Step
from benchmarks.workload import OPTIMIZER, loss_fn

# DeepSpeed's buckets hold 5e8 elements unless told otherwise, many times these models. DDP's default, 25 MiB,
# suits them: several buckets a model, each large enough for the bandwidth.
_BUCKET_ELEMENTS = 25 * 2**20 // 4


def build(model: ModelFactory, rank: int, world_size: int, *, stage: int) -> Step:
    """Options: `stage` is the ZeRO level, 1 to 3."""
    engine = make_engine(model, stage)

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = loss_fn(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def make_engine(model: ModelFactory, stage: int) -> "deepspeed.DeepSpeedEngine":
    """DeepSpeed's engine of a model; joins the world, if this process has not."""
    deepspeed.init_distributed("gloo")
    plain = model()
    engine, *_ = deepspeed.initialize(
        model=plain, optimizer=OPTIMIZER(plain.parameters()), config=_config(stage), dist_init_required=False
    )
    return engine


def _config(stage: int) -> dict[str, object]:
    zero: dict[str, object] = {
        "stage": stage,
        "overlap_comm": False,  # needs streams, which CPUs do not have
        "reduce_bucket_size": _BUCKET_ELEMENTS,
        "allgather_bucket_size": _BUCKET_ELEMENTS,
    }
    if stage < 3:
        zero["compute_grad_norm"] = False  # nobody asks for it
    else:
        # By default up to 1e9 gathered parameters stay, which is the whole model and not ZeRO 3.
        zero |= {
            "stage3_prefetch_bucket_size": _BUCKET_ELEMENTS,
            "stage3_max_live_parameters": _BUCKET_ELEMENTS,
            "stage3_max_reuse_distance": _BUCKET_ELEMENTS,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,  # only used to count samples
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # clips to a norm of 1 unless told not to
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
