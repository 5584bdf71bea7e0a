"""Silent faults of pipeline parallelism, with the stages and schedules of `torch.distributed.pipelining`."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks.museum.exhibit import Exhibit
from benchmarks.museum.language_model import VOCABULARY, WIDTH, Built, adamw, batch, build, cross_entropy

MICRO_BATCHES = 4


class Stages(nn.Module):
    """A model with tied embeddings, whose stages have what they need of it. `stage`: -1 is the whole model."""

    def __init__(self, stage: int = -1, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = None if tied else nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.stage = stage

    def keep_own(self) -> None:
        """Drops the other stage's modules. The embedding that is the head, too, stays in both."""
        others = ["norm", "head"] if self.stage == 0 else ["up", "down"]
        if self.stage == 1 and self.head is not None:
            others.append("embedding")
        for name in others:
            setattr(self, name, None)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.stage != 1:
            hidden = self.embedding(hidden)
            hidden = hidden + self.down(torch.relu(self.up(hidden)))
        if self.stage != 0:
            hidden = self.norm(hidden)
            hidden = hidden @ self.embedding.weight.T if self.head is None else self.head(hidden)
        return hidden


def _own_stage(tied: bool = False) -> Stages:
    model = build(partial(Stages, dist.get_rank(), tied))
    assert isinstance(model, Stages)
    model.keep_own()
    return model


def _schedule(model: Stages, loss: Callable[[Tensor, Tensor], Tensor], **options: bool) -> ScheduleGPipe:
    stage = PipelineStage(model, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=loss, **options)


def _run(schedule: ScheduleGPipe, tokens: Tensor, labels: Tensor) -> Tensor:
    """Forward and backward of a batch: the sum of the micro-batches' losses, which all ranks get."""
    losses: list[Tensor] = []
    if dist.get_rank() == 0:
        schedule.step(tokens)
    else:
        schedule.step(target=labels, losses=losses, return_outputs=False)
    loss = torch.stack(losses).sum().detach() if losses else torch.zeros((), dtype=torch.float64)
    dist.broadcast(loss, dist.get_world_size() - 1)
    return loss


def _reference(tied: bool = False, lengths: tuple[int, ...] = (8,)) -> Built:
    """Accumulates over batches of several lengths, each token counting the same."""
    model = build(partial(Stages, tied=tied))
    optimizer = adamw(model.parameters())

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for length in lengths:
            tokens, labels = batch(i, length=length)
            value = cross_entropy(model(tokens), labels, "sum") / (labels.shape[0] * sum(lengths))
            value.backward()
            loss += value.detach()
        optimizer.step()
        return loss

    return model, step


def _tied(synchronized: bool) -> Built:
    model = _own_stage(tied=True)
    schedule = _schedule(model, cross_entropy)
    optimizer = adamw(model.parameters())

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        loss = _run(schedule, *batch(i)) / MICRO_BATCHES
        if synchronized:
            dist.all_reduce(model.embedding.weight.grad)
        optimizer.step()
        return loss

    return model, step


def _accumulated(keep_gradients: bool) -> Built:
    """Accumulates over two calls of the schedule, whose stage is made anew for each length of sequences."""
    lengths = (8, 4)
    model = _own_stage()
    optimizer = adamw(model.parameters())
    rows = batch(0)[0].shape[0]

    def new_schedule() -> ScheduleGPipe:
        if not keep_gradients:
            for parameter in model.parameters():  # those that finding out the shapes may have left behind
                parameter.grad = None
        return _schedule(
            model,
            lambda logits, labels: cross_entropy(logits, labels, "sum") / (rows * sum(lengths)),
            scale_grads=False,
        )

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        loss = sum(_run(new_schedule(), *batch(i, length=length)) for length in lengths)
        optimizer.step()
        return loss

    return model, step


def _sum_of_losses(divided_before_backward: bool) -> Built:
    model = _own_stage()
    count = batch(0)[1].numel()

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        value = cross_entropy(logits, labels, "sum")
        return value / count if divided_before_backward else value

    schedule = _schedule(model, loss, scale_grads=False)
    optimizer = adamw(model.parameters())

    def step(i: int) -> Tensor:
        optimizer.zero_grad()
        value = _run(schedule, *batch(i))
        optimizer.step()
        return value if divided_before_backward else value / count

    return model, step


EXHIBITS = [
    Exhibit(
        name="tied embeddings on the first and last stage, that nobody keeps equal",
        report="uw-syfi/piper#13",
        said="The embedding that is also the head was copied to both stages, and the copies' gradients were not summed"
        " before the update: each stage trained its own.",
        reference=partial(_reference, tied=True),
        parallel=partial(_tied, synchronized=False),
        correct=partial(_tied, synchronized=True),
        kinds=frozenset({"not reduced"}),
        module="embedding",
    ),
    Exhibit(
        name="accumulated gradients, dropped when a stage is made anew",
        report="NVIDIA-NeMo/Automodel#3530",
        said="Pipeline stages were initialised again for every new length of sequences, which set all gradients to"
        " None. Of an accumulation, only the last batch trained; the loss was summed elsewhere and looked right.",
        reference=partial(_reference, lengths=(8, 4)),
        parallel=partial(_accumulated, keep_gradients=False),
        correct=partial(_accumulated, keep_gradients=True),
        kinds=frozenset({"gradient", "other samples"}),
    ),
    Exhibit(
        name="a sum of losses that is divided after backward",
        report="pytorch/torchtitan#2972",
        said="Without a pipeline, the summed loss was divided by the number of tokens before backward; with one, the"
        " schedule ran backward of the sum, and only the reported loss was divided.",
        reference=_reference,
        parallel=partial(_sum_of_losses, divided_before_backward=False),
        correct=partial(_sum_of_losses, divided_before_backward=True),
        kinds=frozenset({"scaled"}),
    ),
]
