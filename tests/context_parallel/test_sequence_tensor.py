"""What a sequence tensor shows: values of the whole tensor, on every rank."""

import copy
import pickle
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from sequence_parity import LAYOUTS, scattered
from simulated_ranks import simulate

from tensorshard.context_parallel import SequenceTensor, contiguous, cut, from_local, ring_attention, whole, zigzag
from tensorshard.context_parallel.rules import attention

X = torch.arange(22.0).view(2, 11) - 4


def on_ranks(function: Any, size: int = 2) -> list[Any]:
    def on_rank(group: Any) -> Any:
        with group.active():
            return function(group)

    return simulate(size, on_rank)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_code_reads_is_of_the_whole_tensor(layout):
    def read(group: Any) -> list[Any]:
        x = cut(X, 1, LAYOUTS[layout](11, group.size))
        assert isinstance(x, SequenceTensor) and x.local.shape != X.shape
        return [
            x.shape, x.size(1), len(x), x.numel(), x.dtype, x.tolist(), x.numpy().sum(), x.sum().item(),
            x[1, 3].item(), bool((x > -5).all()), bool((x > 10).any()), int(x.argmax()), x.stride(), 3.0 in x,
            list(x.shape), x.is_contiguous(), [row.tolist() for row in x], float(x.max()), x.is_floating_point(),
            x.unique().tolist(), x.nonzero().tolist(),
        ]  # fmt: skip

    expected = [
        X.shape, 11, 2, 22, torch.float32, X.tolist(), X.numpy().sum(), X.sum().item(), X[1, 3].item(), True, True, 21,
        (11, 1), True, [2, 11], True, X.tolist(), 17.0, True, X.unique().tolist(), X.nonzero().tolist(),
    ]  # fmt: skip
    for got in on_ranks(read, 3):
        assert got == expected


def test_parts_of_a_rank_make_a_sequence():
    def make(group: Any) -> torch.Tensor:
        layout = zigzag(11, group.size)
        local = X[:, torch.from_numpy(layout.positions(group.rank))]
        return whole({"x": [from_local(local, 1, layout), 3]})["x"][0]

    for got in on_ranks(make, 3):
        assert torch.equal(got, X)


def test_a_rank_may_be_without_positions():
    def run(group: Any) -> torch.Tensor:
        x = cut(torch.arange(6.0).view(2, 3).requires_grad_(), 1)
        return whole((x * 2).cumsum(1) + x.softmax(1) + F.pad(x, (1, 0))[:, :-1])

    x = torch.arange(6.0).view(2, 3)
    for got in on_ranks(run, 5):
        torch.testing.assert_close(got, (x * 2).cumsum(1) + x.softmax(1) + F.pad(x, (1, 0))[:, :-1])


def test_writes_through_views_reach_the_whole_tensor():
    def write(make: Any) -> torch.Tensor:
        x = make(X) * 1
        x[:, 2].fill_(7)  # a position that one rank has
        x[:, :3].mul_(2)
        x[0].add_(1)
        x[:, 4:].masked_fill_(x[:, 4:] > 12, 0)
        x.select(1, 10).zero_()
        x.view(22)[:2].neg_()
        return whole(x + 0)

    expected = write(lambda x: x)
    for got in on_ranks(lambda group: write(lambda x: cut(x, 1))):
        assert torch.equal(got, expected)


def test_a_write_that_cannot_reach_the_whole_tensor_is_refused():
    def write(group: Any) -> None:
        x = cut(torch.arange(24.0).view(2, 12), 1, scattered(12, 2)) * 1
        with pytest.raises(RuntimeError, match="a view without context parallelism"):
            x.view(2, 3, 4).add_(1)
        x.view(2, 3, 4).add(1)

    on_ranks(write)


def test_copies():
    def copies(group: Any) -> None:
        x = cut(X, 1)
        other = copy.deepcopy({"x": x})["x"]
        assert isinstance(other, SequenceTensor)
        other.zero_()
        assert torch.equal(whole(x), X)
        with pytest.raises(TypeError, match="whole"):
            pickle.dumps(x)

    on_ranks(copies)


def test_second_derivatives_are_refused():
    def differentiate(group: Any) -> None:
        x = torch.randn(2, 8).requires_grad_()
        loss = cut(x, 1).pow(3).mean()
        with pytest.raises(NotImplementedError, match="second derivatives"):
            torch.autograd.grad(loss, x, create_graph=True)

    on_ranks(differentiate)


_IN_ROUNDS = dict(_MESSAGE=0, _SPARED=0, _heads_send_less=lambda *_: False)


@pytest.mark.parametrize("in_rounds", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_types_of_one_process(dtype, in_rounds, monkeypatch):
    linear = torch.nn.Linear(16, 16)
    for name, value in _IN_ROUNDS.items() if in_rounds else ():
        monkeypatch.setattr(attention, name, value)

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype):
            y = linear(x)
            attended = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
            return [y, y.softmax(1), y.mean(1), attended, F.layer_norm(y, (16,)), y.transpose(1, 2) @ y, y.cumsum(1)]

    x = torch.randn(2, 12, 16)
    expected = run(x)
    for got in on_ranks(lambda group: whole(run(cut(x, 1)))):
        assert [y.dtype for y in got] == [y.dtype for y in expected]
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_gradients_of_keys_travel_while_the_next_round_is_computed():
    logs: dict[int, list[str]] = {}
    backward = ring_attention._Call.backward

    def computes(*args: Any) -> Any:
        logs[threading.get_ident()].append("computes")
        return backward(*args)

    def differentiate(group: Any) -> list[str]:
        log, start = logs.setdefault(threading.get_ident(), []), group.start

        def started(pieces: Any, shapes: Any, what: str, number: int) -> Any:
            finish = start(pieces, shapes, what, number)
            log.append(f"{what} {number}")
            return lambda: (log.append(f"ends {what} {number}"), finish())[1]

        group.start = started
        x = cut(torch.randn(2, 2, 12, 8), 2).requires_grad_()
        F.scaled_dot_product_attention(x, x, x).pow(2).mean().backward()
        return [entry for entry in log if "'" in entry or entry == "computes"]

    with mock.patch.multiple(attention, **_IN_ROUNDS), mock.patch.object(ring_attention._Call, "backward", computes):
        for log in on_ranks(differentiate, size=3):
            first, second = (entry for entry in log if entry.startswith("attention'"))
            expected = ["computes", "computes", first, "computes", f"ends {first}", second, f"ends {second}"]
            assert [entry for entry in log if "attention'" in entry or entry == "computes"] == expected


def test_places_are_copied_to_a_device_once():
    places = zigzag(16, 2).places(1)
    with torch.inference_mode():
        made = places.on(torch.device("cpu"))
    assert made.tolist() == [4, 5, 6, 7, 8, 9, 10, 11] and not made.is_inference()
    assert places.on(torch.device("meta")) is places.on(torch.device("meta"))

    def attend(group: Any) -> None:
        x = cut(torch.randn(2, 1, 26, 8), 2, zigzag(26, 2)).requires_grad_()
        F.scaled_dot_product_attention(x, x, x, is_causal=True).flip(2).cumsum(2).mean().backward()

    counts = []
    for _ in range(3):  # in the first, threads may each make what one of them keeps
        with mock.patch.object(torch, "from_numpy", wraps=torch.from_numpy) as copies:
            on_ranks(attend)
        counts.append(copies.call_count)
    assert counts[0] > 0 and counts[2] == 0


def test_positions_that_a_model_counts_are_cut_inside_only():
    def count(group: Any) -> Any:
        x = cut(X, 1)
        inside = torch.arange(11)
        other = torch.arange(7)
        return isinstance(inside, SequenceTensor), isinstance(other, SequenceTensor), whole(inside + x).tolist()

    def apply() -> Any:  # in torch 2.13 its code is replaced, in 2.15 the attribute
        attribute = vars(torch.autograd.Function)["apply"]
        return getattr(getattr(attribute, "__func__", None), "__code__", attribute)

    arange, before = torch.arange, apply()
    for got in on_ranks(count):
        assert got == (True, False, (torch.arange(11) + X).tolist())
    assert torch.arange is arange and apply() is before


def test_hooks_and_gradients_of_sequence_tensors():
    def run(group: Any) -> Any:
        seen = []
        x = cut(X, 1).requires_grad_()
        y = x * 2
        y.register_hook(lambda grad: seen.append(grad.shape))
        ((y * y.mean()).sum() / group.size).backward()
        return seen, whole(x.grad)

    x = X.clone().requires_grad_()
    ((x * 2) * (x * 2).mean()).sum().backward()
    for seen, grad in on_ranks(run):
        assert seen == [X.shape]
        torch.testing.assert_close(grad, x.grad)


def test_what_is_refused_with_a_sentence():
    with pytest.raises(RuntimeError, match="with group"):
        cut(X, 1)

    def refuse(group: Any) -> None:
        with pytest.raises(ValueError, match="layout of 5 positions"):
            cut(X, 1, contiguous(5, 2))
        with pytest.raises(ValueError, match="too short"):
            cut(X[:, :1], 1)

    on_ranks(refuse)


def test_ranks_that_make_different_exchanges_are_told():
    def differ(group: Any) -> None:
        x = cut(X, 1)
        whole(x) if group.rank == 0 else x.mean()

    with pytest.raises(RuntimeError, match="different exchanges"):
        on_ranks(differ)
