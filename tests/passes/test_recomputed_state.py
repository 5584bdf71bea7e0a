"""Blocks with a state of their own train under recomputation as without it."""

import collections
import itertools
import random
import tempfile
import weakref
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorshard as ts
from rank_pool import RankError
from tensorshard.model.forwards import Role, convert_forward
from tensorshard.passes.recompute import apply_recompute

ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-5)
WIDTH = 8
SHARED: dict[str, Any] = {"calls": 0}
CALLS = 0


class Layers(nn.Module):
    """What all blocks here compute with."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        return h + self.down(torch.tanh(self.up(h) * scale))


class Block(nn.Module):
    def __init__(self, owner: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = Layers()
        self.prepare(owner)

    def prepare(self, owner: Any) -> None:
        pass

    def reset(self) -> None:
        pass

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Spiking(Block):
    memory: torch.Tensor | None

    def reset(self) -> None:
        self.memory = None

    def forward(self, h):
        self.memory = self.layers(h) if self.memory is None else 0.5 * self.memory + self.layers(h + self.memory)
        return self.memory


class SpikingInPlace(Block):
    def reset(self) -> None:
        self.memory = torch.zeros(WIDTH)

    def forward(self, h):
        h = self.layers(h, 1 + self.memory.sum())
        self.memory.mul_(0.5).add_(0.25)
        return h


class Counting(Block):
    def prepare(self, owner):
        self.calls = 0

    def forward(self, h):
        self.calls += 1
        return self.layers(h, 1 / self.calls)


class CountingInASubmodule(Block):
    def prepare(self, owner):
        self.inner = Counting()

    def forward(self, h):
        return self.inner(h)


class Appending(Block):
    def reset(self) -> None:
        self.seen = []

    def forward(self, h):
        self.seen.append(h)
        return self.layers(torch.stack(list(self.seen)).sum(0), 1 / len(self.seen))


class Queueing(Block):
    def prepare(self, owner):
        self.seen = collections.deque(maxlen=2)
        self.kinds = set()

    def forward(self, h):
        self.seen.append(float(h.detach().mean()))
        self.kinds.add(len(self.kinds))
        return self.layers(h, 1 + sum(self.seen) + len(self.kinds))


class Caching(Block):
    def reset(self) -> None:
        self.cache = {"inner": {}}

    def forward(self, h):
        inner = self.cache["inner"]
        inner["h"] = h + inner["h"] if "h" in inner else h
        return self.layers(inner["h"])


@dataclass
class State:
    calls: int = 0
    seen: list[Any] = field(default_factory=list)


class WithObject(Block):
    def prepare(self, owner):
        self.state, self.space = State(), SimpleNamespace(calls=0)

    def forward(self, h):
        self.state.calls += 1
        self.space.calls += 2
        self.state.seen.append(self.space.calls)
        return self.layers(h, 1 / (self.state.calls + sum(self.state.seen)))


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class WithSlots(Block):
    def prepare(self, owner):
        self.state = Slotted()

    def forward(self, h):
        self.state.calls += 1
        return self.layers(h, 1 / self.state.calls)


class OfParent(Block):
    def prepare(self, owner):
        self.parent = [owner]

    def forward(self, h):
        self.parent[0].depth += 1
        return self.layers(h, 1 / self.parent[0].depth)


class OfParentByReference(Block):
    def prepare(self, owner):
        self.parent = weakref.ref(owner)

    def forward(self, h):
        self.parent().depth += 1
        return self.layers(h, 1 / self.parent().depth)


class SetFromOutside(Block):
    """Its state does not change while it runs, but between its calls."""

    def __init__(self, owner):
        super().__init__(owner)
        owner.told.append(self)
        self.time = 0

    def forward(self, h):
        return self.layers(h, 1 / (1 + self.time))


class PythonsNumbers(Block):
    def prepare(self, owner):
        self.numbers = random.Random(3)

    def forward(self, h):
        return self.layers(h, random.random() + self.numbers.random())


class NumpysNumbers(Block):
    def prepare(self, owner):
        self.numbers = np.random.default_rng(3)
        self.history = np.zeros(2)

    def forward(self, h):
        self.history[0] += 1
        return self.layers(h, np.random.rand() + self.numbers.random() + float(self.history[0]))


class OwnGenerator(Block):
    def prepare(self, owner):
        self.numbers = torch.Generator().manual_seed(3)

    def forward(self, h):
        return self.layers(h, torch.rand(2 * WIDTH, generator=self.numbers))


class GlobalVariables(Block):
    def forward(self, h):
        global CALLS  # noqa: PLW0603
        CALLS += 1
        SHARED["calls"] += 1
        return self.layers(h, 1 / (CALLS + SHARED["calls"]))


class ClassAttribute(Block):
    calls = 0

    def forward(self, h):
        ClassAttribute.calls += 1
        return self.layers(h, 1 / self.calls)


def _closure() -> type[Block]:
    calls = 0

    class Enclosing(Block):
        def forward(self, h):
            nonlocal calls
            calls += 1
            return self.layers(h, 1 / calls)

    return Enclosing


class LateBuffer(Block):
    def forward(self, h):
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(WIDTH), persistent=False)
        else:
            self.late = self.late * 0.5
        return self.layers(h * self.late)


class BufferOfShared(Block):
    def prepare(self, owner):
        self.shared = owner.shared

    def forward(self, h):
        self.shared.running.mul_(0.5).add_(0.25)
        return self.layers(h + self.shared.running)


class ReadOnce(Block):
    def prepare(self, owner):
        self.numbers = itertools.cycle([0.5, 1.0, 2.0])

    def forward(self, h):
        return self.layers(h, next(self.numbers))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(WIDTH), persistent=False)


class Net(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.depth, self.told = 0, []
        self.shared = Shared()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([block(self), block(self)])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        self.depth = 0
        for block in self.blocks:
            block.reset()
        total = 0
        for time in range(3):
            h = self.first(x) * (time + 1)
            for block in self.told:
                block.time = time
            for block in self.blocks:
                h = block(h)
            total = total + h
        return self.last(total)


KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Spiking, SpikingInPlace, Counting, CountingInASubmodule, Appending, Queueing, Caching, WithObject, WithSlots,
        OfParent, OfParentByReference, SetFromOutside, PythonsNumbers, NumpysNumbers, OwnGenerator, GlobalVariables,
        ClassAttribute, LateBuffer, BufferOfShared, ReadOnce,
    )
}  # fmt: skip


def _train(name: str, fields: dict[str, Any], own_loop: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    global CALLS
    kind = KINDS[name] if name in KINDS else _closure()
    model = Net(kind)
    sample = torch.zeros(2, WIDTH)
    # Micro-batches leave state one for the other, as in a plain loop.
    engine = ts.parallelize(
        model,
        ts.Plan(**fields),
        optimizer=ADAMW,
        loss_fn=nn.functional.mse_loss,
        sample_inputs=sample,
        check_samples=False,
    )
    # The search for a tensor-parallel table runs the model, too.
    CALLS, SHARED["calls"], ClassAttribute.calls = 0, 0, 0
    random.seed(1)
    np.random.seed(1)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, WIDTH, generator=generator), torch.randn(8, 1, generator=generator)
        x, y = (t.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for t in (x, y))
        if own_loop:
            loss = nn.functional.mse_loss(engine.model(x), y)
            engine.backward(loss)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            losses.append(loss.item())
        else:
            losses.append(engine.step(x, y).item())
    kept = {"calls": CALLS, "shared": SHARED["calls"], "class": ClassAttribute.calls, "depth": model.depth}
    kept["random"], kept["numpy"] = random.random(), np.random.rand()
    for place, block in enumerate(model.blocks):
        kept.update({f"{place}.{key}": getattr(block, key) for key in ("calls", "time") if hasattr(block, key)})
        if hasattr(block, "seen"):
            kept[f"{place}.seen"] = len(block.seen)
    return losses, engine.full_state_dict(), kept


def _compare(ranks, name, fields, mode, **options):
    expected = ranks(2, _train, name, fields, **options)
    found = ranks(2, _train, name, dict(fields, recompute=mode), **options)
    for (losses, state, kept), (other_losses, other_state, other_kept) in zip(found, expected, strict=True):
        assert losses == pytest.approx(other_losses, rel=1e-6)
        assert kept == other_kept
        for key, value in state.items():
            torch.testing.assert_close(value, other_state[key], rtol=1e-5, atol=1e-6)


@pytest.mark.fast_cases("Spiking-full")
@pytest.mark.parametrize("mode", ["full", pytest.param("selective", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*KINDS, "Enclosing"])
def test_state_is_what_it_was(ranks, name, mode):
    _compare(ranks, name, dict(zero=1, micro_batches=2), mode)


@pytest.mark.fast_cases("{'tp': 2}-Spiking")
@pytest.mark.parametrize("name", ["Spiking", "SpikingInPlace", "Counting", "Appending", "WithObject", "SetFromOutside"])
@pytest.mark.parametrize(
    "fields",
    [
        dict(zero=3),
        dict(tp=2),
        dict(pp=2, zero=0, micro_batches=2),
        dict(pp=2, zero=0, micro_batches=4),
        dict(zero=3, precision="bf16"),
        dict(zero=1, offload=ts.Offload(activations="cpu")),
    ],
    ids=str,
)
def test_under_other_plans(ranks, name, fields):
    _compare(ranks, name, fields, "full")


@pytest.mark.parametrize("name", ["Spiking", "Counting", "PythonsNumbers"])
def test_in_a_loop_of_ones_own(ranks, name):
    _compare(ranks, name, dict(zero=1), "full", own_loop=True)


class FromAFile(Block):
    """Its state is where nobody looks."""

    def prepare(self, owner):
        self.file = tempfile.TemporaryFile()  # noqa: SIM115

    def forward(self, h):
        self.file.write(b".")
        return self.layers(h, 1 / self.file.tell())


class MoreTheFirstTime(FromAFile):
    def forward(self, h):
        self.file.write(b".")
        return self.layers(h).tanh() if self.file.tell() == 1 else self.layers(h).detach()


class OtherShapes(FromAFile):
    def forward(self, h):
        self.file.write(b".")
        return self.layers(torch.cat([h] * self.file.tell()))[: len(h)]


class WritesItsArgument(Block):
    def forward(self, h):
        self.layers.up.weight.data.mul_(0.5)  # behind autograd's back
        return self.layers(h)


@pytest.mark.parametrize("kind", [FromAFile, MoreTheFirstTime, OtherShapes, WritesItsArgument])
def test_what_cannot_be_restored_is_refused_by_name(ranks, kind):
    with pytest.raises(RankError, match=r"block 'blocks.1' \(\w+\) computes other values .* recompute='none'") as error:
        ranks(2, _one_step, kind)
    assert "CheckpointError" not in str(error.value)


def _one_step(kind):
    # Without a trial run of what the model draws, which would write into the file, too.
    plan = ts.Plan(zero=1, recompute="full", random="by_rank")
    engine = ts.parallelize(Net(kind), plan, optimizer=ADAMW, loss_fn=nn.functional.mse_loss)
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters() if "last" in name}
    try:
        engine.step(torch.ones(2, WIDTH), torch.ones(2, 1))
    finally:
        for name, p in engine.model.named_parameters():
            assert name not in before or torch.equal(p, before[name])


class Filling(Layers):
    """Gets a list and a dict, which it fills."""

    def forward(self, x, states, *, table):
        states.append(x)
        x = Layers.forward(self, torch.stack(list(states)).sum(0) + table["sum"])
        table["sum"] = table["sum"] + x
        return x


def _arguments(mode):
    torch.manual_seed(0)
    blocks = [Filling(), Filling()]
    apply_recompute(blocks, mode)
    x, states = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH), []
    table = {"sum": x}
    for block in [*blocks, *blocks]:
        x = block(x, states, table=table)
    (x.square().mean() + table["sum"].mean()).backward()
    return len(states), [p.grad for block in blocks for p in block.parameters()]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_arguments_that_a_block_fills(mode):
    torch.testing.assert_close(_arguments(mode), _arguments("none"))


def _compiled(kind, mode):
    random.seed(1)
    torch.manual_seed(0)
    model = Net(kind)
    apply_recompute(model.blocks, mode)
    for block in model.blocks:
        if mode != "none":
            convert_forward(block, Role.COMPILATION, partial(torch.compile, backend="aot_eager"))
    found = []
    for step in range(2):
        model.zero_grad()
        loss = model(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) + step).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters())]
    return found


@pytest.mark.filterwarnings("ignore")  # torch's, of what is in the graph
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("kind", [Spiking, Counting, Appending, SetFromOutside, PythonsNumbers])
def test_compiled(kind, mode):
    torch.testing.assert_close(_compiled(kind, mode), _compiled(kind, "none"), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_compiled_and_refused():
    """Whether the recomputed forward reads the file again depends on where the compiler cuts the code, which depends on
    what it compiled before."""
    try:
        found = _compiled(FromAFile, "full")
    except RuntimeError as error:
        assert "block FromAFile computes other values" in str(error)
    else:
        torch.testing.assert_close(found, _compiled(FromAFile, "none"), rtol=1e-4, atol=1e-5)


class FromAFileLater(FromAFile):
    """Depends on the file from its third call on."""

    def forward(self, h):
        self.file.write(b".")
        return self.layers(h, 1 / max(self.file.tell() - 4, 1))


def _later(debug):
    plan = ts.Plan(recompute="full")
    model = nn.Sequential(nn.Sequential(FromAFileLater()), nn.Sequential(FromAFileLater()))
    engine = ts.parallelize(model, plan, optimizer=ADAMW, loss_fn=nn.functional.mse_loss, debug=debug)
    for _ in range(4):
        engine.step(torch.ones(2, WIDTH), torch.ones(2, WIDTH))


@pytest.mark.slow
def test_debug_compares_in_all_steps(ranks):
    ranks(1, _later, False)
    with pytest.raises(RankError, match="computes other values"):
        ranks(1, _later, True)


class Position(nn.Module):
    """A block of a sequence model, with a memory of its last call."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.calls, self.memory = 0, None

    def forward(self, h):
        self.calls += 1
        given = h if self.memory is None else h + 0.5 * self.memory
        self.memory = h + self.down(torch.tanh(self.up(self.norm(given)) / self.calls))
        return self.memory


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(11, 16), nn.Linear(16, 11)
        self.blocks = nn.ModuleList([Position(), Position()])

    def forward(self, tokens):
        h = self.embed(tokens)
        for block in self.blocks:
            block.memory = None
        for block in [*self.blocks, *self.blocks]:
            h = block(h)
        return self.head(h)


def _sequences(mode):
    plan = ts.Plan(tp=2, sequence_parallel=True, recompute=mode)
    tokens = torch.arange(32).view(4, 8) * 7 % 11
    engine = ts.parallelize(
        Sequences(),
        plan,
        optimizer=ADAMW,
        loss_fn=lambda output, targets: nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten()),
        sample_inputs=tokens,
    )
    return [engine.step(tokens, tokens).item() for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", pytest.param("selective", marks=pytest.mark.slow)])
def test_with_sequences_split(ranks, mode):
    assert ranks(2, _sequences, mode)[0] == pytest.approx(ranks(2, _sequences, "none")[0], rel=1e-6)
