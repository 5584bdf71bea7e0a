"""Models that pipelines get wrong easily: hooks, changes in place, gradients that end, padding, missing kernels."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import parity
import tensorshard as ts
from tensorshard.model.batches import call_model, split_batch

STEPS = 3
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-3)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Detached(Chain):
    """No gradient gets to the first two: their weights must not even decay."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x.detach() if index == 2 else x)
        return x


class ChangesItsInput(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(0.5))


class Hooked(Chain):
    """Hooks of the whole model and of blocks, of which one changes what crosses cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.register_forward_hook(lambda module, args, output: output * 1.5)
        self.layers[1].register_forward_hook(lambda module, args, output: (output, output[:, :1]))
        self.layers[2].register_forward_pre_hook(lambda module, args: (args[0][0] + args[0][1],))
        self.layers[2][0].register_full_backward_hook(lambda module, into, out: (into[0] * 2,))


class HooksItself(Chain):
    """Registers hooks on its blocks in its first forward, as models of transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "outputs"):
            self.outputs: list[torch.Tensor] = []
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: self.outputs.append(output.detach()))
        self.outputs.clear()
        return super().forward(x)


class Counts(Chain):
    """Buffers that the model's own code changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return super().forward(x)


class TiedBlocks(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3][0].weight = self.layers[0][0].weight


class InPlace(nn.Module):
    """Blocks that write their result into what they are given, the output of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 6)
        self.layers = nn.ModuleList(_Writes() for _ in range(4))
        self.outlet = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            layer(x)
        return self.outlet(x)


class InPlaceOfCode(InPlace):
    """The same for a tensor that code outside of modules makes, which every stage would have its own of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x) + 0
        for layer in self.layers:
            layer(x)
        return self.outlet(x)


class InPlaceOfBoth(InPlace):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x += 1
            layer(x)
        return self.outlet(x)


class _Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> None:
        x.copy_(torch.tanh(self.linear(x.clone())))


class Translates(nn.Module):
    """torch's own transformer, of which the encoder leaves out padding when it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Embedding(31, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 31)

    def forward(self, source: torch.Tensor, target: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.transformer(
            self.inlet(source),
            self.inlet(target),
            tgt_mask=mask,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.head(x)


class _NoFake(torch.autograd.Function):
    """Works on real tensors alone, as kernels do whose fake ones are stricter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if type(x).__name__ == "FakeTensor":
            raise RuntimeError("has no fake kernel")
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


class _Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(_NoFake.apply(self.linear(x)))


class NoFakes(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Doubles() for _ in range(4))


class _Reversed(torch.autograd.Function):
    """Computes the gradients of its modules itself, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: nn.ModuleList, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.layers, ctx.x = layers, x
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        parameters = list(ctx.layers.parameters())
        with torch.enable_grad():
            x = y = ctx.x.detach().requires_grad_()
            for layer in ctx.layers:
                y = layer(y)
        found = torch.autograd.grad(y, [x, *parameters], gradient)
        return found[0], None, *found[1:]


class _Reversible(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Reversed.apply(x, self.layers, *self.layers.parameters())


class _CallsForwards(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x


class Around(nn.Module):
    """Layers around a module whose code needs all that it holds, so that one stage computes the whole of it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.inlet, self.part, self.outlet = nn.Linear(6, 6), part, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.part(torch.tanh(self.inlet(x))))


class Solution(nn.Module):
    """A tensor that a loop fills with what modules return."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.field, self.outlet = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inlet(x)
        solution = torch.empty(3, *y.shape)
        solution[0] = y
        for step in (1, 2):
            y = y + 0.1 * torch.tanh(self.field(y))
            solution[step] = y
        return self.outlet(solution[1] + solution[2])


def _weight_norm() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6)), nn.Tanh()) for _ in range(4)))


def _features(step: int, samples: int = 8) -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 6, generator=generator), torch.randn(samples, 6, generator=generator)


def _sentences(step: int, samples: int = 8) -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    source, target = (torch.randint(0, 31, (samples, 7 + step % 2), generator=generator) for _ in range(2))
    padding = torch.arange(source.shape[1]) >= torch.randint(4, 7, (samples, 1), generator=generator)
    return {"source": source, "target": target, "padding": padding}, target.flip(1)


def _token_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


MODELS: dict[str, Any] = {
    "detached": Detached,
    "changes-its-input": ChangesItsInput,
    "hooked": Hooked,
    "hooks-itself": HooksItself,
    "counts": Counts,
    "tied-blocks": TiedBlocks,
    "in-place": InPlace,
    "older-weight-norm": _weight_norm,
    "torch-transformer": Translates,
    "no-fakes": NoFakes,
    "reversible": lambda: Around(_Reversible()),
    "forwards-called": lambda: Around(_CallsForwards()),
    "filled-in-a-loop": Solution,
}


def _parts(kind: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(1)
    if kind == "torch-transformer":
        return MODELS[kind](), _sentences, _token_loss
    return MODELS[kind](), _features, nn.functional.mse_loss


def _alone(kind: str, micro_batches: int) -> dict[str, Any]:
    model, batch, loss_fn = _parts(kind)
    optimizer = ADAMW(model.parameters())
    losses = []
    for step in range(STEPS):
        pairs = split_batch(*batch(step), micro_batches)
        losses.append(0.0)
        for inputs, targets in pairs:
            share = loss_fn(call_model(model, inputs), targets) / len(pairs)
            share.backward()
            losses[-1] += share.item()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    inputs, targets = batch(9, 6)
    with torch.no_grad():
        losses.append(loss_fn(call_model(model, inputs), targets).item())
    return {"losses": losses, "state": {name: value.detach() for name, value in model.state_dict().items()}}


def _train(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    model, batch, loss_fn = _parts(kind)
    engine = ts.parallelize(
        model, ts.Plan(**fields), optimizer=ADAMW, loss_fn=loss_fn, sample_inputs=batch(0)[0], seed=0
    )
    size, rank = engine.mesh.dp_size, engine.mesh.dp_rank

    def part(step: int, samples: int) -> tuple[Any, Any]:
        return split_batch(*batch(step, samples), size)[rank]

    losses = [engine.step(*part(step, 8)).item() for step in range(STEPS)]
    return {"losses": [*losses, engine.evaluate(*part(9, 6)).item()], "state": engine.full_state_dict()}


@pytest.mark.fast_cases("detached")
@pytest.mark.parametrize("kind", MODELS)
def test_models_train_as_in_one_process(ranks, kind):
    expected = _alone(kind, 4)
    parity.assert_same(ranks(2, _train, kind, dict(pp=2, micro_batches=4))[0], expected, 1e-5)
    # Several stages on a rank: some have too few units for that.
    if kind not in ("in-place", "torch-transformer", "reversible", "forwards-called", "filled-in-a-loop"):
        fields = dict(pp=2, micro_batches=4, pp_schedule="zbv")
        parity.assert_same(ranks(2, _train, kind, fields)[0], expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("kind", ["detached", "tied-blocks"])
def test_gradients_that_end_and_weights_that_are_tied_between_stages_under_zero(ranks, kind, level):
    expected = _alone(kind, 4)
    fields = dict(pp=2, pp_split=["layers.2"], dp_shard=2, zero=level, micro_batches=2)
    parity.assert_same(ranks(4, _train, kind, fields)[0], expected, 1e-5)


# What is refused.


class ByMethods(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.linear(x, layer[0].weight)
        return x


class ByForward(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.forward(x)
        return x


class Reentrant(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class Decides(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x if x.sum() > 0 else -x
        return x


class KeepsByHook(Chain):
    """A hook keeps what a block returns, for the end."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []
        self.layers[0].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.kept.append(output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.clear()
        return super().forward(x) + self.kept[0]


def _backward_hook(*names: str) -> nn.Module:
    model = Chain()
    for name in names:
        model.get_submodule(name).register_full_backward_hook(lambda module, into, out: None)
    return model


REFUSED: dict[str, tuple[Any, str]] = {
    "by-methods": (ByMethods, "ByMethods called none of its 4 units as modules"),
    "by-forward": (ByForward, "the model calls layers.0.forward(...) itself"),
    "reentrant": (Reentrant, "'layers.0' by torch.utils.checkpoint with use_reentrant=True"),
    "decides": (Decides, "Move that code into a module with them"),
    "keeps": (KeepsByHook, "'layers.0' hands the model's output a tensor by another way"),
    "in-place-of-code": (InPlaceOfCode, "a tensor changed in place), so both must be on one stage"),
    "in-place-of-both": (InPlaceOfBoth, "is changed in place by a later module and by code outside of modules"),
    "root-backward-hook": (partial(_backward_hook, ""), "the model has a hook on its backward"),
    "backward-hooks": (
        partial(_backward_hook, "layers.0", "layers.1", "layers.2"), "a hook on its backward, which does not see",
    ),
}  # fmt: skip


def _refusal(kind: str) -> str:
    try:
        ts.parallelize(
            REFUSED[kind][0](),
            ts.Plan(pp=2, micro_batches=4, pp_schedule="looped_bfs"),
            optimizer=ADAMW,
            loss_fn=nn.functional.mse_loss,
        )
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", REFUSED)
def test_what_stands_in_the_way_is_said(ranks, kind):
    for message in ranks(2, _refusal, kind):
        assert REFUSED[kind][1] in message
        assert "sample_inputs" not in message  # which would not help


def _difference(kind: str) -> str:
    plan = ts.Plan(pp=2, micro_batches=4)
    engine = ts.parallelize(Chain(), plan, optimizer=ADAMW, loss_fn=nn.functional.mse_loss)
    rank = dist.get_rank()
    inputs, targets = _features(rank if kind == "values" else 0, 8 + 4 * rank if kind == "sizes" else 8)
    try:
        engine.step(inputs, targets)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["values", "sizes"])
def test_different_batches_on_one_pipeline_are_refused_on_every_rank(ranks, kind):
    for message in ranks(2, _difference, kind):
        assert "engine.step was given different batches on ranks 0 and 1" in message
        assert "rank=engine.mesh.dp_rank" in message
    if kind == "sizes":
        assert "inputs of [8, 6] and [12, 6]" in message
