"""Plan(random="same"): with dropout, every plan gives what one process gives, and what a plain loop gives."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tensorshard as ts
from rank_pool import RankError
from tensorshard.models import GPT, next_token_loss

STEPS = 4
ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-5)


class Net(nn.Module):
    """A GPT with dropout of embeddings, attention, features and residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.head = nn.Linear(16, 61)

    def forward(self, tokens):
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.inner, self.residual = nn.Dropout(0.2), nn.Dropout(0.1)
        self.attention_dropout = 0.1

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        p = self.attention_dropout if self.training else 0.0
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + self.residual(self.o(attended.transpose(1, 2).flatten(2)))
        h = self.inner(nn.functional.gelu(self.up(self.norm2(x))))  # as wide on each of two ranks as the block's output
        return x + self.inner(self.down(h))


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 61, (8, 13), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def _engine(fields: dict[str, Any]) -> ts.Engine:
    plan = ts.Plan(random="same", **fields)
    sample = _batch(0)[0]
    return ts.parallelize(Net, plan, optimizer=ADAMW, loss_fn=_loss, seed=3, sample_inputs=sample, device="cpu")


def _mine(engine: ts.Engine, batch: Any) -> Any:
    return tuple(part.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for part in batch)


def _train(fields: dict[str, Any]) -> list[float]:
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    engine = _engine(fields)
    return [engine.step(*_mine(engine, _batch(step))).item() for step in range(STEPS)]


def _resume(path: str, fields: dict[str, Any], begin: int, end: int) -> list[float]:
    engine = _engine(fields)
    if begin:
        engine.load(path)
    losses = [engine.step(*_mine(engine, _batch(step))).item() for step in range(begin, end)]
    if end < STEPS:
        engine.save(path)
    return losses


def _own_loop(fields: dict[str, Any]) -> list[float]:
    engine = _engine(fields)
    losses = []
    for step in range(STEPS):
        inputs, targets = _mine(engine, _batch(step))
        loss = _loss(engine.model(inputs), targets)
        engine.backward(loss)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@cache
def _plain() -> list[float]:
    torch.manual_seed(3)
    model = Net()
    optimizer = ADAMW(model.parameters())
    losses = []
    with ts.same_randomness(model, seed=3):
        for step in range(STEPS):
            inputs, targets = _batch(step)
            loss = _loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "1-full-micro2": (1, dict(recompute="full", micro_batches=2)),
    "2-zero0-selective": (2, dict(zero=0, recompute="selective")),
    "2-zero1-micro2": (2, dict(zero=1, micro_batches=2)),
    "2-zero3-micro4-full": (2, dict(zero=3, micro_batches=4, recompute="full")),
    "2-tp": (2, dict(tp=2)),
    "2-tp-sequence-full": (2, dict(tp=2, sequence_parallel=True, recompute="full")),
    "2-pp-micro2": (2, dict(pp=2, micro_batches=2)),
    "2-pp-micro4-full": (2, dict(pp=2, micro_batches=4, recompute="full")),
    "2-cp": (2, dict(cp=2)),
    "2-cp-full": (2, dict(cp=2, recompute="full")),
    "4-tp-pp-micro2": (4, dict(tp=2, pp=2, micro_batches=2)),
    "4-zero3-tp-micro2": (4, dict(tp=2, zero=3, micro_batches=2)),
    "4-cp-tp-sequence": (4, dict(cp=2, tp=2, sequence_parallel=True)),
    "4-cp-tp-sequence-full": (4, dict(cp=2, tp=2, sequence_parallel=True, recompute="full")),
    "4-zero2-pp-micro2": (4, dict(pp=2, zero=2, micro_batches=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANS)
def test_every_plan_draws_as_one_process(ranks, case):
    size, fields = PLANS[case]
    for losses in ranks(size, _train, fields):
        assert losses == pytest.approx(_plain(), rel=1e-5)


@pytest.mark.parametrize("case", ["1-full-micro2", "2-zero3-micro4-full", "2-tp"])
def test_loops_of_ones_own_draw_as_one_process(ranks, case):
    size, fields = PLANS[case]
    found = ranks(size, _own_loop, {key: value for key, value in fields.items() if key != "micro_batches"})
    data_ranks = 1 if "tp" in fields else size
    means = [sum(step) / data_ranks for step in zip(*found[:data_ranks], strict=True)]
    assert means == pytest.approx(_plain(), rel=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_under_another_plan(ranks, tmp_path):
    path = str(tmp_path / "checkpoint")
    losses = ranks(2, _resume, path, dict(tp=2), 0, 2)[0]
    losses += ranks(2, _resume, path, dict(zero=3, micro_batches=2), 2, STEPS)[0]
    assert losses == pytest.approx(_plain(), rel=1e-5)
    assert len(set(losses)) == STEPS


class Routed(nn.Module):
    """Draws as many numbers as values say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x)
        chosen = h[:, 0] > 0
        return h + nn.functional.dropout(h[chosen], 0.5, self.training).sum()


def test_what_cannot_be_the_same_is_refused_by_name(ranks):
    ranks(1, _refused)


def _refused() -> None:
    torch.manual_seed(0)
    engine = ts.parallelize(Routed(), ts.Plan(random="same"), optimizer=ADAMW, loss_fn=nn.functional.mse_loss)
    before = engine.full_state_dict()
    with pytest.raises(RuntimeError, match=r"draws random numbers of shape.*random='by_rank'"):
        engine.step(torch.randn(9, 4), torch.randn(9, 4))
    assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())


def _noisy_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Logits with noise, labels that are left out at random, and a weight that all samples share."""
    kept = torch.rand(targets.shape) < 0.8
    noisy = output + 0.1 * torch.randn_like(output) + 0.1 * torch.randn(output.size(-1))
    return (
        nn.functional.cross_entropy(noisy.flatten(0, 1), targets.flatten(), reduction="none")[kept.flatten()].sum() / 96
    )


def _noisy_loss_of_model(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return _noisy_loss(model(inputs), targets) * (8 / len(inputs))


class Quiet(Net):
    """Draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(module, _Block):
                module.attention_dropout = 0.0


def _losses_that_draw(fields: dict[str, Any], of_model: bool, net: type[nn.Module] = Net) -> list[float]:
    def loss(output, targets):  # a mean of the micro-batch, as plain losses are
        return _noisy_loss(output, targets) * (8 / len(targets))

    loss_fn = _noisy_loss_of_model if of_model else loss
    plan = ts.Plan(**fields)
    engine = ts.parallelize(
        net,
        plan,
        optimizer=ADAMW,
        loss_fn=loss_fn,
        seed=3,
        sample_inputs=None if of_model else _batch(0)[0],
        device="cpu",
    )
    losses = []
    for step in range(3):
        batch = _mine(engine, _batch(step))
        losses.append((engine.step(batch) if of_model else engine.step(*batch)).item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "of_model"),
    [
        *((c, m) for c in ("1-full-micro2", "2-zero1-micro2", "2-zero3-micro4-full", "2-tp") for m in (False, True)),
        ("2-pp-micro2", False),  # a pipeline takes loss_fn(output, targets) alone
    ],
)
def test_loss_functions_that_draw(ranks, case, of_model):
    size, fields = PLANS[case]
    expected = ranks(1, _losses_that_draw, {}, of_model)[0]
    for losses in ranks(size, _losses_that_draw, fields, of_model):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["2-zero1-micro2", "2-pp-micro2"])
def test_losses_that_draw_of_models_that_do_not(ranks, case):
    size, fields = PLANS[case]
    expected = ranks(1, _losses_that_draw, {}, False, Quiet)[0]
    for losses in ranks(size, _losses_that_draw, fields, False, Quiet):
        assert losses == pytest.approx(expected, rel=1e-5)


def _diffusion(fields: dict[str, Any]) -> list[float]:
    """A loop that adds noise of its own to samples, and in the loss, of batches of uneven shares."""
    net = partial(nn.Linear, 6, 6)
    mse = nn.functional.mse_loss

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with engine.random.of_samples():
            kept = torch.bernoulli(torch.full_like(targets, 0.5))
        return mse(output * kept, targets * kept)

    engine = ts.parallelize(net, ts.Plan(**fields), optimizer=ADAMW, loss_fn=loss_fn, seed=3, device="cpu")
    data = torch.randn(22, 6, generator=torch.Generator().manual_seed(0))
    losses = []
    for clean, _ in engine.loader(TensorDataset(data, data), batch_size=8, shuffle=False):
        with engine.random.of_samples():
            noisy = clean + torch.rand(len(clean), 1) * torch.randn_like(clean)
            scale = torch.rand(())
        losses.append(engine.step(noisy * scale, clean).item())
    return losses


@pytest.mark.parametrize(
    ("size", "fields"),
    [(2, dict(zero=1)), (4, dict(zero=3)), (1, dict(micro_batches=2)), (2, dict(zero=1, micro_batches=2))],
)
def test_what_a_loop_draws_of_samples(ranks, size, fields):
    expected = ranks(1, _diffusion, {})[0]
    for losses in ranks(size, _diffusion, fields):
        assert losses == pytest.approx(expected, rel=1e-5)


def _compiled(dropout: float) -> float:
    model = partial(GPT, vocab_size=61, context_length=12, num_layers=2, num_heads=2, width=16, dropout=dropout)
    plan = ts.Plan(compile=True)
    engine = ts.parallelize(model, plan, optimizer=ADAMW, loss_fn=next_token_loss, seed=3, device="cpu")
    return engine.step(*_batch(0)).item()


@pytest.mark.slow
def test_compiled_code_that_draws_is_refused(ranks):
    assert ranks(1, _compiled, 0.0)[0] > 0
    with pytest.raises(RankError, match=r"blocks\.0\..*in a block that compile=True compiles.*random='by_rank'"):
        ranks(1, _compiled, 0.1)


class ChecksItself(nn.Module):
    """Recomputes a function, whose dropout no module that runs again would announce."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.a, self.b, self.reentrant = nn.Linear(8, 16), nn.Linear(16, 8), reentrant

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(nn.functional.dropout(self.a(x).relu(), 0.3, self.training))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return x + self.inner(x)
        return x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant)


def _checks_itself(fields: dict[str, Any], reentrant: bool | None) -> list[float]:
    """Steps of the Engine and of a loop of one's own, in turn."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(ChecksItself(reentrant) for _ in range(3)))
    engine = ts.parallelize(model, ts.Plan(**fields), optimizer=ADAMW, loss_fn=nn.functional.mse_loss)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(5):
        x, y = (torch.randn(4, 8, generator=generator) for _ in range(2))
        if step % 2:
            loss = nn.functional.mse_loss(engine.model(x), y)
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        else:
            loss = engine.step(x, y)
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("fields", [dict(), dict(tp=2), dict(tp=2, random="by_rank")])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_function_that_is_recomputed_without_its_module(ranks, fields, reentrant):
    size = fields.get("tp", 1)
    expected = ranks(size, _checks_itself, fields, None)[0]
    assert len(set(expected)) == 5
    assert ranks(size, _checks_itself, fields, reentrant)[0] == pytest.approx(expected, rel=1e-5)


def test_noise_in_a_backward_is_the_users(ranks):
    """A draw of a hook is no repetition, and moves the user's generator as torch does."""
    assert ranks(1, _noise_in_backward)[0]


def _noise_in_backward() -> bool:
    engine = _engine(dict())
    x, _ = _batch(0)
    drawn: list[torch.Tensor] = []
    output = engine.model(x)
    output.register_hook(lambda gradient: drawn.append(torch.rand(3)))
    torch.manual_seed(9)
    output.square().mean().backward()
    return torch.equal(drawn[0], torch.rand(3, generator=torch.Generator().manual_seed(9)))


class RoutedTwice(nn.Module):
    """A module gets each chosen row twice. As many rows in all trial runs would be a coincidence."""

    def __init__(self) -> None:
        super().__init__()
        self.expert, self.router = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.cat([(self.router(x)[:, 0] > 0).nonzero()[:, 0]] * 2)
        return x.index_add(0, rows, self.expert(x[rows]))


def test_rows_that_come_twice_are_refused_whatever_their_number(ranks):
    assert ranks(1, _refuse_rows_that_come_twice)[0] == {"refused"}


def _refuse_rows_that_come_twice() -> set[str]:
    found = set()
    for seed in (0, 2, 3, 5):
        torch.manual_seed(seed)
        engine = ts.parallelize(RoutedTwice(), ts.Plan(), optimizer=ADAMW, loss_fn=nn.functional.mse_loss)
        try:
            engine.step(torch.randn(8, 4), torch.ones(8, 4))
            found.add("trained")
        except RuntimeError as error:
            found.add("refused" if "random='by_rank'" in str(error) else str(error))
    return found
