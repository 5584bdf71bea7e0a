"""DeepSpeed's ZeRO, verified as somebody else's layout: correct runs are exact, and a fault is named."""

import pytest
import torch
from torch import nn

import tensorshard as ts

deepspeed = pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(3)))
        self.head = nn.Linear(16, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x)))


def _batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(11, (8, 5), generator=generator), torch.randint(11, (8, 5), generator=generator)


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _alone():
    model, optimizer = _made()

    def step(index: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss(model, *_batch(index))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        return loss

    return model, step


def _layout(stage: int, same_samples: bool):
    def parallel():
        model, optimizer = _made()
        config = {
            "train_batch_size": 8,
            "gradient_clipping": 0.3,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        share = slice(0, 4) if same_samples else slice(torch.distributed.get_rank(), None, 2)

        def step(index: int) -> torch.Tensor:
            x, y = _batch(index)
            loss = _loss(engine, x[share], y[share])
            engine.backward(loss)
            engine.step()
            torch.distributed.all_reduce(mean := loss.detach() / 2)
            return mean

        return engine, step

    return parallel


@pytest.fixture(scope="module", autouse=True)
def _built_here():
    """DeepSpeed compiles an operator at its first use, which forked ranks must find built."""
    deepspeed.ops.op_builder.cpu.ShareMemCommBuilder().load()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_correct_runs_are_exact(stage):
    found = ts.verify_layout(_alone, _layout(stage, same_samples=False), ranks=2)
    assert found, found.describe()


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_the_same_samples_are_named(stage):
    found = ts.verify_layout(_alone, _layout(stage, same_samples=True), ranks=2)
    assert not found and "other samples" in found.describe()
