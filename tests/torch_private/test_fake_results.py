"""Operators on fake tensors: answers that are remembered are those of torch's own fake tensors."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tensorshard.models.gpt import GPT
from tensorshard.torch_private.autograd import is_in_backward
from tensorshard.torch_private.dispatch import TorchDispatchMode
from tensorshard.torch_private.fake_results import QuickFakeTensorMode
from tensorshard.torch_private.fake_tensors import FakeTensor, FakeTensorMode
from tensorshard.torch_private.pytree import tree_leaves
from tensorshard.torch_private.tensors import storage_address


class _Seen(TorchDispatchMode):
    """Notes of every call what its results are like, and which arguments they share memory with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        output = func(*args, **(kwargs or {}))
        if func.namespace != "profiler":  # the optimizer's steps are marked for profilers
            self.calls.append((str(func), is_in_backward(), *(_seen(leaf, given) for leaf in tree_leaves(output))))
        return output


def _seen(leaf: object, given: list[torch.Tensor]) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    storage = leaf.untyped_storage()
    shared = [
        place for place, t in enumerate(given) if storage_address(t.untyped_storage()) == storage_address(storage)
    ]
    itself = [place for place, t in enumerate(given) if t is leaf]
    described = (tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.layout, storage.nbytes())
    return described, leaf.device, leaf.requires_grad, str(torch._C._dispatch_keys(leaf)), shared, itself


def _convolutions() -> torch.Tensor:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return model(torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)).square().mean()


def _transformer() -> torch.Tensor:
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        logits = GPT(64, 16, 2, 4, 32)(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _recurrent() -> torch.Tensor:
    output, (state, _) = nn.LSTM(8, 16, num_layers=2, batch_first=True)(torch.randn(3, 5, 8))
    return output.sum() + state.sum()


def _shapes() -> torch.Tensor:
    x = torch.randn(4, 6, requires_grad=True)
    y = x.clone()
    y[:, 2:4].mul_(2)
    first, second = y.chunk(2, dim=1)
    picked = y[torch.zeros(3, dtype=torch.int64)]
    parts = torch._foreach_mul([first, second], 2.0)
    expanded = y.sum(0, keepdim=True).expand(5, 6) + x.mean()
    values, places = expanded.sort(dim=1)
    last = y.unbind(0)[-1].to(torch.float64).view(2, 3).t().contiguous()
    results = [picked, *parts, values, last, y.softmax(1), torch.cat([first, second]), y.gather(1, places[:4, :2])]
    return sum((result.double().sum() for result in results), start=torch.zeros((), dtype=torch.float64))


def _update() -> torch.Tensor:
    weights = [nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4))]
    optimizer = torch.optim.AdamW(weights, fused=True)
    for _ in range(2):
        loss = (torch.randn(3, 8) @ weights[0] + weights[1]).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (torch.randn(3, 8) @ weights[0]).sum()


@pytest.mark.parametrize("case", [_convolutions, _transformer, _recurrent, _shapes, _update])
def test_remembered_answers_are_those_of_fake_tensors(case):
    def calls(mode: FakeTensorMode) -> list[object]:
        with mode, _Seen() as seen:
            case().backward()
        return seen.calls

    expected = calls(FakeTensorMode(allow_non_fake_inputs=True))
    assert len(expected) > 10
    for _ in range(3):  # the later ones are answered by what the first one found
        assert calls(QuickFakeTensorMode()) == expected


def test_an_answer_is_quick_only_for_shapes_that_were_seen():
    with QuickFakeTensorMode() as mode:
        x, y = torch.empty(4, 6), torch.empty(6, 4)
        add = torch.ops.aten.add.Tensor
        assert add(x, x).shape == (4, 6)
        quick, known = mode.call(add, (x, x), {})
        assert known is not None and type(quick) is FakeTensor and quick.fake_mode is mode
        assert quick.untyped_storage().nbytes() == 96 and quick is not x
        assert mode.call(add, (y, y), {})[0].shape == (6, 4)
        assert mode.call(add, (x.double(), 1), {})[0].dtype == torch.float64  # 1, 1.0 and True are told apart
        whole, half = torch.ops.aten.mul.Scalar(x.long(), 1), torch.ops.aten.mul.Scalar(x.long(), 1.0)
        assert (whole.dtype, half.dtype) == (torch.int64, torch.float32)
        with pytest.raises(RuntimeError, match="reduction dim"):
            torch.mm(x, x)
        with pytest.raises(RuntimeError, match="reduction dim"):  # an error is not remembered as an answer
            torch.mm(x, x)


def test_several_results_with_names_are_remembered():
    with QuickFakeTensorMode() as mode:
        given = (torch.empty(4, 3, 5), None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)
        for _ in range(2):
            outputs, known = mode.call(torch.ops.aten.native_batch_norm.default, given, {})
            assert known is not None and [tuple(output.shape) for output in outputs] == [(4, 3, 5), (3,), (3,)]


def test_answers_that_depend_on_values_are_asked_for_every_time():
    with QuickFakeTensorMode():
        mask = torch.ones(4, dtype=torch.bool)
        for _ in range(2):
            with pytest.raises(Exception, match=r"nonzero|dynamic"):
                torch.randn(4)[mask]
            with pytest.raises(Exception, match=r"_local_scalar_dense|data"):
                torch.ones(()).item()
        assert torch.tensor([1, 2, 3]).sum().dtype == torch.int64


def test_tensors_with_values_and_other_modes_are_left_alone():
    real = torch.ones(2, 3)
    with FakeTensorMode() as other:
        foreign = torch.empty(2, 3)
    with QuickFakeTensorMode() as mode:
        assert type(torch.ops.aten.mul.Tensor(real, real)) is FakeTensor
        assert mode.call(torch.ops.aten.relu.default, (real,), {})[1] is None
    with other:
        assert torch.relu(foreign).fake_mode is other
    assert torch.equal(real * 2, torch.full((2, 3), 2.0))
