"""States of split models and of their optimizers, collected and loaded."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import tensorshard as ts
from article import (
    SGD,
    ArticleNet,
    article_samples,
    converted_net,
    train_article,
)


def _convert_train_collect(dim: int, path: str) -> None:
    ts.init_process_group(2)
    model = converted_net(dim)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    train_article(DistributedDataParallel(model), optimizer, torch.amp.GradScaler("cpu", enabled=False), 0, 3)
    images, _ = article_samples(9, 4)
    with torch.no_grad():
        output = model(images)  # of every rank's images: the same ones twice
        output = ts.distributed.gather(output, dim=-1)[:4] if dim == 1 else output[:4]
    state = ts.collect_state_dict(model, model.state_dict())
    if ts.distributed.get_rank() == 0:
        torch.save({"state": state, "images": images, "output": output}, path)


@pytest.mark.parametrize("dim", [0, 1])
def test_collected_into_the_original_class(ranks, tmp_path, dim):
    path = str(tmp_path / "model.pt")
    ranks(2, _convert_train_collect, dim, path)
    saved = torch.load(path, weights_only=True)
    original = ArticleNet(parallel=False)
    original.load_state_dict(saved["state"])
    torch.testing.assert_close(original(saved["images"]), saved["output"], rtol=1e-6, atol=1e-6)


def _resume_as_the_script_does(path: str) -> None:
    """It saves the first rank's optimizer.state_dict(), which has that rank's parts alone."""
    ts.init_process_group(2)
    model = converted_net(1)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    train_article(DistributedDataParallel(model), optimizer, torch.amp.GradScaler("cpu", enabled=False), 0, 1)
    optimizer.load_state_dict(copy.copy(optimizer.state_dict()))  # one's own is one's own
    if dist.get_rank() == 0:
        torch.save(optimizer.state_dict(), path)
    dist.barrier()
    state = torch.load(path, weights_only=True)
    if dist.get_rank() == 0:
        optimizer.load_state_dict(state)
    else:
        with pytest.raises(
            ValueError, match=r"momentum_buffer of parameter 4 holds part 0 of 2, saved by another rank"
        ):
            optimizer.load_state_dict(state)


def test_momenta_of_another_rank_are_refused(ranks, tmp_path):
    ranks(2, _resume_as_the_script_does, str(tmp_path / "optimizer.pt"))
