"""What loops do with weights and gradients, written once for one process and for an Engine under any plan.

The models have dropout, which draws the same numbers in both.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensorshard as ts

STEPS = 4
POSITIONS = 4
ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 16), nn.Dropout(0.1))


class Net(nn.Module):
    """Blocks that take sequences [samples, positions, 16], and a head. All of it has dropout."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([_block() for _ in range(4)])
        self.head = nn.Linear(16, 4)
        self._reentrant = reentrant

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.inlet(x), 0.1, self.training)
        x = x + F.scaled_dot_product_attention(x, x, x)  # relates positions, as sequence parallelism asks for
        for block in self.blocks:
            if self._reentrant:
                x = x + checkpoint(block, x, use_reentrant=True)
                x = x + checkpoint(block, x, use_reentrant=True)
            else:
                x = x + block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x).mean(1))


class Tower(Net):
    """Half of the samples' batches come with an image: all samples of a call, or those in `rows`."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleList([_block() for _ in range(2)])

    def forward(
        self, x: torch.Tensor, image: torch.Tensor | None = None, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        if image is not None:
            for block in self.vision:
                image = image + block(image)
            x = x + image if rows is None else torch.where(rows[:, None, None], x + image, x)
        return super().forward(x)


class Tasks(Net):
    """A head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(16, 4) for _ in range(2)])
        self.task = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encode(x).mean(1)
        return self.head(x) + self.heads[self.task](x)


class Teacher(nn.Module):
    """A student, and its average."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x + 0.1) + 0.5 * target


class Listed(nn.Module):
    """Each expert is a module, which is called with the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16)) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        result = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == index)
            if len(rows):
                result = result.index_add(0, rows, expert(tokens[rows]) * weights[rows, places, None])
        return result.view_as(x)


class Stack(nn.Module):
    """The weights of all experts in one parameter each."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 8, 16) / 4)
        self.down = nn.Parameter(torch.randn(4, 16, 8) / 4)

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(tokens)
        for index in range(self.num_experts):
            rows, places = torch.where(chosen == index)
            out = F.linear(torch.tanh(F.linear(tokens[rows], self.up[index])), self.down[index])
            result = result.index_add(0, rows, out * weights[rows, places, None])
        return result


class Stacked(nn.Module):
    """A mixture whose experts are a :class:`Stack`."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        return self.experts(tokens, chosen, weights).view_as(x)


class Experts(Net):
    """A net with two mixtures of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.listed, self.stacked = Listed(), Stacked()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = super().encode(x)
        x = x + self.listed(x)
        return x + self.stacked(x)


class Side:
    """One process, or one rank of an Engine.

    Attributes:
        values: losses and others, by name and step. Ranks may have some of them.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        fields: dict[str, Any] | None,
        optimizer: Any,
        parts: int,
        micro_batches: int = 1,
    ) -> None:
        self.parts, self.micro_batches = parts, micro_batches  # of the plan: data ranks
        self.steps = 0
        self.values: dict[str, float] = {}
        self.engine: Any = None
        self.penalty: Callable[[nn.Module], torch.Tensor] | None = None
        module = build()
        if fields is None:
            self.model = module
            self.optimizer = optimizer([p for p in module.parameters() if p.requires_grad])
            return
        samples = torch.randn(2, POSITIONS, 16)  # the search for a table and the cut of a pipeline may look at them
        self.engine = ts.parallelize(
            module,
            ts.Plan(**fields),
            optimizer=optimizer,
            loss_fn=self.loss,
            sample_inputs=(samples, samples) if isinstance(module, Tower) else samples,
        )
        self.model = self.engine.model
        self.optimizer = self.engine.optimizer

    def note(self, values: dict[str, float]) -> None:
        self.values |= {f"{name} {self.steps}": value for name, value in values.items()}

    def loss(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(output, y)
        return loss if self.penalty is None else loss + self.penalty(self.model)

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """The samples of the first data rank, then those of the next one."""
        return torch.cat([x[i :: self.parts] for i in range(self.parts)])

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This side's samples."""
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, POSITIONS, 16, generator=generator), torch.randint(4, (16,), generator=generator)
        if self.engine is None:
            return self.in_order(x), self.in_order(y)
        share = slice(self.engine.mesh.dp_rank, None, self.engine.mesh.dp_size)
        return x[share], y[share]

    def step(self, x: Any, y: torch.Tensor) -> None:
        """A whole step."""
        if self.engine is not None:
            self.note({"loss": self.engine.step(x, y).item()})
            return
        loss = self.loss(self.model(x), y)
        self.note({"loss": loss.item()})
        loss.backward()
        self.update()

    def mean(self, loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: Any, y: Any) -> None:
        """A forward and a backward by hand for each micro-batch."""
        if self.engine is None:
            parts = [part.unflatten(0, (self.parts, self.micro_batches, -1)).transpose(0, 1) for part in (x, y)]
            for part_x, part_y in zip(*parts, strict=True):
                (loss_of(part_x.flatten(0, 1), part_y.flatten(0, 1)) / self.micro_batches).backward()
            return
        for part_x, part_y in zip(x.chunk(self.micro_batches), y.chunk(self.micro_batches), strict=True):
            self.engine.backward(loss_of(part_x, part_y))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        if self.engine is not None:
            return self.engine.full_state_dict()
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


# -- what loops do --


def clamp(side: Side, step: int) -> None:
    side.step(*side.batch(step))
    with torch.no_grad():
        for p in side.model.parameters():
            p.clamp_(-0.1, 0.1)


def clamp_data(side: Side, step: int) -> None:
    side.step(*side.batch(step))
    for p in side.model.parameters():
        p.data.clamp_(-0.1, 0.1)


def new_head(side: Side, step: int) -> None:
    side.step(*side.batch(step))
    for name, p in side.model.named_parameters():  # under pp a rank has some of them
        if step == 1 and name.startswith("head."):
            nn.init.constant_(p, 0.1)


def sharpness(side: Side, step: int) -> None:
    """Sharpness-aware minimization (Foret et al. 2020)."""
    x, y = side.batch(step)
    loss_of = lambda x, y: F.cross_entropy(side.model(x), y)  # noqa: E731
    side.mean(loss_of, x, y)
    with torch.no_grad():
        parameters = list(side.model.parameters())
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [p.grad * (0.05 / norm) for p in parameters]
        for p, move in zip(parameters, moves, strict=True):
            p.add_(move)
    side.optimizer.zero_grad()
    side.mean(loss_of, x, y)
    with torch.no_grad():
        for p, move in zip(parameters, moves, strict=True):
            p.sub_(move)
    side.update()


def read(side: Side, step: int) -> None:
    """Norms of weights, as a log shows them."""
    side.step(*side.batch(step))
    with torch.no_grad():
        side.note({name: p.norm().item() for name, p in side.model.named_parameters()})


def ema_teacher(side: Side, step: int) -> None:
    side.step(*side.batch(step))
    with torch.no_grad():
        for t, s in zip(side.model.teacher.parameters(), side.model.student.parameters(), strict=True):
            t.mul_(0.9).add_(s, alpha=0.1)


def some_ranks_call(side: Side, step: int) -> None:
    """Every second data rank's batch has images."""
    generator = torch.Generator().manual_seed(step)
    x, image = torch.randn(2, 16, POSITIONS, 16, generator=generator)
    y = torch.randint(4, (16,), generator=generator)
    parts = side.parts
    with_image = [index % 2 == 1 or parts == 1 for index in range(parts)]
    if side.engine is None:
        x, image, y = map(side.in_order, (x, image, y))
        rows = torch.tensor(with_image).repeat_interleave(len(x) // parts)
        loss = F.cross_entropy(side.model(x, image, rows), y)
        side.note({"loss": loss.item()})
        loss.backward()
        side.update()
    else:
        i = side.engine.mesh.dp_rank
        inputs = (x[i::parts], image[i::parts]) if with_image[i] else x[i::parts]
        side.step(inputs, y[i::parts])


def steps_skip(side: Side, step: int) -> None:
    """Modules that several steps do not call."""
    side.model.task = 0 if step in (0, 3) else 1
    side.step(*side.batch(step))


def freeze(side: Side, step: int) -> None:
    if step == 2:
        side.model.blocks.requires_grad_(False)
    side.step(*side.batch(step))


def unfreeze(side: Side, step: int) -> None:
    """By names of modules and of parameters, where an Engine takes them."""
    if step in (0, 2):
        if side.engine is not None:
            (side.engine.freeze if step == 0 else side.engine.unfreeze)(["blocks", "inlet.b*"])
        else:
            for p in [*side.model.blocks.parameters(), side.model.inlet.bias]:
                p.requires_grad_(step == 2)
    side.step(*side.batch(step))


def frozen_from_the_start(side: Side, step: int) -> None:
    if step == 2:
        side.model.blocks.requires_grad_(True)
        if side.engine is None:  # there, nobody else does it
            side.optimizer.add_param_group({"params": list(side.model.blocks.parameters())})
    side.step(*side.batch(step))


def add_group(side: Side, step: int) -> None:
    if step == 2:
        side.model.blocks.requires_grad_(True)
        side.optimizer.add_param_group({"params": list(side.model.blocks.parameters()), "lr": 2e-3})
    side.step(*side.batch(step))


def replace(side: Side, step: int) -> None:
    if step == 2:
        side.model.head = nn.Linear(16, 4)
    side.step(*side.batch(step))


def penalty(side: Side, step: int) -> None:
    """An orthogonality penalty on every matrix."""

    def squares(model: nn.Module) -> torch.Tensor:
        matrices = [w for w in model.parameters() if w.ndim == 2]
        return sum(0.1 * (w.t() @ w - torch.eye(w.size(1))).square().sum() for w in matrices)

    if side.engine is not None and side.engine.plan.pp > 1:
        if step == 0:
            side.engine.add_penalty(squares)
    else:
        side.penalty = squares
    side.step(*side.batch(step))


def double_backward(side: Side, step: int) -> None:
    """A gradient penalty, as of WGAN-GP."""

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        output = side.model(x)
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return F.cross_entropy(output, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()

    side.mean(loss_of, *side.batch(step))
    side.update()


def twice(side: Side, step: int) -> None:
    """Blocks that run twice under reentrant checkpointing."""
    x, y = side.batch(step)
    side.step(x, y)


def other_method(side: Side, step: int) -> None:
    """Parts of the model, called one by one."""

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        features = side.model.encode(x)
        return F.cross_entropy(side.model.head(features.mean(1)), y) + side.model.blocks[0](x).square().mean()

    side.mean(loss_of, *side.batch(step))
    side.update()


def swap(side: Side, step: int) -> None:
    """An average of the weights, and an evaluation with it."""
    side.step(*side.batch(step))
    average = side.__dict__.setdefault("average", {n: p.detach().clone() for n, p in side.model.named_parameters()})
    with torch.no_grad():
        for name, p in side.model.named_parameters():
            average[name].mul_(0.5).add_(p.detach(), alpha=0.5)
        x, y = side.batch(step + 100)
        if side.engine is not None:
            before = {name: weight.clone() for name, weight in side.engine.full_state_dict().items()}
            with side.engine.using_weights(average):
                side.note({"average": side.engine.evaluate(x, y).item()})
            assert all(torch.equal(weight, before[name]) for name, weight in side.engine.full_state_dict().items())
        else:
            output = torch.func.functional_call(side.model.eval(), average, (x,))
            side.model.train()
            side.note({"average": F.cross_entropy(output, y).item()})


def gradients_by_hand(side: Side, step: int) -> None:
    """Two tasks' gradients, as of PCGrad."""
    x, y = side.batch(step)
    parameters = list(side.model.parameters())
    output = side.model(x)
    first = torch.autograd.grad(F.cross_entropy(output, y), parameters, retain_graph=True)
    second = torch.autograd.grad(F.cross_entropy(output, (y + 1) % 4), parameters)
    for p, a, b in zip(parameters, first, second, strict=True):
        p.grad = a + 0.5 * b
    side.update()


def other_weights(side: Side, step: int) -> None:
    """A forward with other weights by torch.func.functional_call, then a step."""
    with torch.no_grad():
        half = {name: p.detach() * 0.5 for name, p in side.model.named_parameters()}
        x, y = side.batch(step)
        output = torch.func.functional_call(side.model, half, (x,))
        value = F.cross_entropy(output.float(), y)
        if side.engine is not None and side.engine.mesh.dp_size > 1:
            torch.distributed.all_reduce(value, group=side.engine.mesh.dp_group)
            value = value / side.engine.mesh.dp_size
        side.note({"other weights": value.item()})
    side.step(x, y)


def clip_each(side: Side, step: int) -> None:
    """Gradients clipped by the norm of each weight (adaptive gradient clipping, Brock et al. 2021)."""
    side.mean(lambda x, y: F.cross_entropy(side.model(x), y), *side.batch(step))
    with torch.no_grad():
        for p in side.model.parameters():
            p.grad.mul_((0.01 * p.norm() / p.grad.norm()).clamp(max=1.0))
    side.update()


def groups(side: Side, step: int) -> None:
    """What the optimizer's groups hold is written by a hook and by the loop, and read for a log."""
    if step == 0:

        def decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.data.mul_(0.98)

        side.optimizer.register_step_post_hook(decay)
    side.step(*side.batch(step))
    parameters = [p for group in side.optimizer.param_groups for p in group["params"]]
    for (name, _), p in zip(side.model.named_parameters(), parameters, strict=True):
        side.note({name: p.detach().norm().item()})
        p.data = p.data.clamp(-0.2, 0.2)


def gradient_hook(side: Side, step: int) -> None:
    """Gradients are divided by their norms, which a log shows."""

    def divide(name: str, gradient: torch.Tensor) -> torch.Tensor:
        norm = gradient.norm()
        side.note({name: norm.item()})
        return gradient / (norm + 1)

    x, y = side.batch(step)
    if side.engine is not None:
        if step == 0:
            side.engine.register_gradient_hook(divide)
        side.step(x, y)
        return
    loss = side.loss(side.model(x), y)
    side.note({"loss": loss.item()})
    loss.backward()
    for name, p in side.model.named_parameters():
        assert p.grad is not None
        p.grad = divide(name, p.grad)
    side.update()


def states(side: Side, step: int) -> None:
    """Moments are read, set to zero for some neurons, replaced and taken out, by the model's parameters."""
    side.step(*side.batch(step))
    for name, p in side.model.named_parameters():
        assert p in side.optimizer.state
        state = side.optimizer.state[p]
        side.note({name: state["exp_avg"].abs().sum().item()})
        if step == 0:
            state["exp_avg"][:2] = 0
        if step == 1:
            side.optimizer.state[p] = {**state, "exp_avg_sq": 2 * state["exp_avg_sq"]}
        if step == 2:
            state = side.optimizer.state.pop(p)
            assert p not in side.optimizer.state
            state["exp_avg"] = torch.zeros_like(p)
            side.optimizer.state[p] = state


def states_of_groups(side: Side, step: int) -> None:
    """Moments are damped by their norms, by the tensors of the optimizer's groups; and added up over all states."""
    side.step(*side.batch(step))
    for group in side.optimizer.param_groups:
        for p in group["params"]:
            moment = side.optimizer.state[p]["exp_avg"]
            moment.mul_(1 / (1 + moment.norm()))
    if side.engine is None or side.engine.plan.pp == 1:
        states = list(side.optimizer.state.values())
        assert len(states) == len(side.optimizer.state.items()) > 0
        side.note({f"total {step}": sum(state["exp_avg"].abs().sum().item() for state in states)})


def second_phase(side: Side, step: int) -> None:
    """An optimizer made anew, for the head alone."""
    if step < 2:
        side.step(*side.batch(step))
        return
    if step == 2:
        side.model.inlet.requires_grad_(False)
        side.model.blocks.requires_grad_(False)
        side.second = torch.optim.SGD(side.model.head.parameters(), lr=0.1)  # type: ignore[attr-defined]
    side.mean(lambda x, y: F.cross_entropy(side.model(x), y), *side.batch(step))
    side.second.step()  # type: ignore[attr-defined]
    side.second.zero_grad()  # type: ignore[attr-defined]


def _generator() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def two_engines(side: Side, step: int) -> None:
    """A second model's loss goes through the first, and trains the second alone."""
    if step == 0:
        fields = None
        if side.engine is not None:
            plan = side.engine.plan
            fields = dict(zero=plan.zero, tp=plan.tp, pp=plan.pp, micro_batches=plan.micro_batches)
            fields |= dict(precision=plan.precision, dp_replicate=plan.dp_replicate, recompute=plan.recompute)
        side.other = Side(_generator, fields, ADAMW, side.parts, side.micro_batches)  # type: ignore[attr-defined]
    other = side.other  # type: ignore[attr-defined]
    x, y = side.batch(step)
    other.mean(lambda x, y: F.cross_entropy(side.model(other.model(x)), y), x, y)
    other.update()
    side.optimizer.zero_grad()
    with torch.no_grad():
        made = other.model(x).float()
    side.step(made, y)


def frozen_blocks() -> Net:
    net = Net()
    net.blocks.requires_grad_(False)
    return net


LOOPS: dict[str, tuple[Callable[[Side, int], None], Callable[[], nn.Module], Any]] = {
    "clamp": (clamp, Net, ADAMW),
    "clamp_data": (clamp_data, Net, ADAMW),
    "new_head": (new_head, Net, ADAMW),
    "sharpness": (sharpness, Net, ADAMW),
    "read": (read, Net, ADAMW),
    "ema_teacher": (ema_teacher, Teacher, ADAMW),
    "some_ranks_call": (some_ranks_call, Tower, ADAMW),
    "steps_skip": (steps_skip, Tasks, MOMENTUM),
    "freeze": (freeze, Net, MOMENTUM),
    "unfreeze": (unfreeze, Net, MOMENTUM),
    "frozen_from_the_start": (frozen_from_the_start, frozen_blocks, ADAMW),
    "add_group": (add_group, frozen_blocks, ADAMW),
    "replace": (replace, Net, ADAMW),
    "penalty": (penalty, Net, ADAMW),
    "double_backward": (double_backward, Net, ADAMW),
    "twice": (twice, partial(Net, reentrant=True), ADAMW),
    "other_method": (other_method, Net, ADAMW),
    "two_engines": (two_engines, Net, ADAMW),
    "swap": (swap, Net, ADAMW),
    "gradients_by_hand": (gradients_by_hand, Net, ADAMW),
    "other_weights": (other_weights, Net, ADAMW),
    "clip_each": (clip_each, Net, ADAMW),
    "groups": (groups, Net, ADAMW),
    "gradient_hook": (gradient_hook, Net, ADAMW),
    "states": (states, Net, ADAMW),
    "states_of_groups": (states_of_groups, Net, ADAMW),
    "second_phase": (second_phase, Net, ADAMW),
}

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero0": (2, dict(zero=0)),
    "zero1": (2, dict(zero=1)),
    "zero2": (2, dict(zero=2)),
    "zero3": (2, dict(zero=3)),
    "hybrid-zero1": (4, dict(dp_replicate=2, zero=1)),
    "hybrid-zero3": (4, dict(dp_replicate=2, zero=3)),
    "tp": (2, dict(tp=2)),
    "tp-zero1": (4, dict(tp=2, zero=1)),
    "tp-zero3": (4, dict(tp=2, zero=3)),
    "cp-zero1": (2, dict(cp=2, zero=1)),
    "cp-zero3": (2, dict(cp=2, zero=3)),
    "sequence-parallel": (2, dict(tp=2, sequence_parallel=True)),
    "pp": (2, dict(pp=2, micro_batches=2)),
    "bf16-zero1": (2, dict(zero=1, precision="bf16")),
    "offload-zero2": (2, dict(zero=2, offload="cpu")),
    "recompute-zero1": (2, dict(zero=1, recompute="full")),
    "accumulate-zero2": (2, dict(zero=2, micro_batches=2)),
    "sequence-parallel-zero3": (4, dict(tp=2, sequence_parallel=True, zero=3)),
    "tp-cp-zero1": (4, dict(tp=2, cp=2, zero=1)),
    "dp-cp-zero2": (4, dict(cp=2, zero=2)),
    "tp-pp": (4, dict(tp=2, pp=2, micro_batches=2)),
    "pp-zero1": (4, dict(pp=2, micro_batches=2, zero=1)),
    "pp-bf16": (2, dict(pp=2, micro_batches=2, precision="bf16")),
    "bf16-zero3": (2, dict(zero=3, precision="bf16")),
    "bf16-tp": (2, dict(tp=2, precision="bf16")),
    "offload-zero3": (2, dict(zero=3, offload="cpu")),
    "recompute-tp-zero3": (4, dict(tp=2, zero=3, recompute="full")),
    "accumulate-zero3": (2, dict(zero=3, micro_batches=2)),
}


# Of models with experts.
EXPERT_PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep": (2, dict(ep=2, zero=0)),
    "ep-zero1": (2, dict(ep=2, zero=1)),
    "2xep-zero2": (4, dict(ep=2, zero=2)),
    "ep-zero3": (2, dict(ep=2, zero=3)),
    "ep-tp-zero3": (4, dict(ep=2, tp=2, zero=3)),
    "ep-cp-zero1": (4, dict(ep=2, cp=2, zero=1)),
}

Results = tuple[dict[str, torch.Tensor], dict[str, float]]


def run(loop: str, fields: dict[str, Any] | None, parts: int, experts: bool = False, micro_batches: int = 1) -> Results:
    """Weights and further values after a few steps. On ranks other than the first the weights are {}.

    Args:
        fields: of the plan; None for one process without an Engine, with the numbers that an Engine draws.
        parts: data ranks of the plan.
        experts: whether the model has mixtures of experts.
        micro_batches: of the plan.
    """
    act, build, optimizer = LOOPS[loop]
    if experts:
        build = Experts
    side = Side(build, fields, optimizer, parts, micro_batches)
    with ts.same_randomness(side.model) if fields is None else nullcontext():
        for side.steps in range(STEPS):
            act(side, side.steps)
    return side.state(), side.values


def try_to_run(
    loop: str, fields: dict[str, Any], parts: int, experts: bool = False, micro_batches: int = 1
) -> Results | str:
    """As :func:`run`; the sentence if it is refused."""
    try:
        return run(loop, fields, parts, experts, micro_batches)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
