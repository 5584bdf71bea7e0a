"""AdamW in one pass: torch's own numbers, to the last bit, or torch's own kernels."""

import shutil
from functools import partial

import pytest
import torch
from torch import nn

from tensorshard import Offload
from tensorshard.offload import compiled_adamw
from tensorshard.offload.offloaded_optimizer import OffloadedOptimizer
from tensorshard.offload.tiers import Tiers

SIZES = (1, 63, 64, 1000, 200_003)


@pytest.fixture
def without_compiler(monkeypatch):
    compiled_adamw._kernels.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    yield
    compiled_adamw._kernels.cache_clear()


def _train(offloaded: bool, options: dict, factor: float | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    parameters = {str(size): nn.Parameter(torch.randn(size)) for size in SIZES}
    optimizer = torch.optim.AdamW(parameters.values(), fused=True, **options)
    ours = None
    if offloaded:
        tiers = Tiers(Offload(optimizer="cpu", buffer_memory="1MiB"))
        ours = OffloadedOptimizer(optimizer, parameters, {}, tiers, offloaded={}, agree=lambda _: None)
    for _ in range(4):
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape)
            if factor is not None and ours is None:
                parameter.grad.mul_(factor)
        if ours is None:
            optimizer.step()
        else:
            ours.step(parameters.values(), None if factor is None else torch.tensor(factor, dtype=torch.float64))
    states = [optimizer.state[p][key] for p in parameters.values() for key in ("exp_avg", "exp_avg_sq")]
    return [*(p.detach() for p in parameters.values()), *states]


@pytest.mark.parametrize("factor", [None, 0.3])
@pytest.mark.parametrize(
    "options", [dict(lr=1e-2), dict(lr=3e-4, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0), dict(betas=(0.4, 0.9))]
)
def test_updates_are_torchs(options, factor):
    found, expected = (_train(offloaded, options, factor) for offloaded in (True, False))
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_torchs_kernels_do_it():
    options = dict(lr=1e-2)
    group = torch.optim.AdamW([nn.Parameter(torch.ones(64))], fused=True).param_groups[0]
    assert not compiled_adamw.does(group, torch.ones(64))
    assert all(map(torch.equal, _train(True, options, None), _train(False, options, None)))


def test_several_threads_and_copies_compute_the_same():
    before = torch.get_num_threads()
    has_compiler = any(map(shutil.which, ("cc", "gcc", "clang")))
    group = torch.optim.AdamW([nn.Parameter(torch.ones(64))], fused=True).param_groups[0]
    results = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            weights, gradient, average, square = (torch.rand(150_000) for _ in range(4))
            copy = torch.zeros(150_000, dtype=torch.bfloat16)
            assert compiled_adamw.does(group, weights) == has_compiler
            if not has_compiler:
                return
            run = partial(compiled_adamw.update, group, weights, gradient, (average, square), 7, factor=0.5, copy=copy)
            done = run()
            assert 150_000 - 64 < done <= 150_000
            assert torch.equal(copy[:done], weights[:done].bfloat16())
            results.append((weights, average, square, copy))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))
