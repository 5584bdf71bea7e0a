"""Batches, losses and calls that an Engine cannot do: each told in a sentence, and as if it had not been."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset, TensorDataset

import tensorshard as ts
from tensorshard.models import GPT, next_token_loss
from wrong_inputs import Case, Said, assert_refused, say_all

SGD = partial(torch.optim.SGD, lr=0.1)
TOKENS, TARGETS = torch.tensor([[0, 6], [1, 2]]), torch.tensor([0, 2])


class _Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([])


class Engines:
    """Small ones, and a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses = nn.functional.cross_entropy  # what loss_fn does; cases change it for a call
        self.usual = self._classifier()
        self.in_two = self._classifier(micro_batches=2)
        self.fp16 = self._classifier(precision="fp16")
        self.gpt = ts.parallelize(GPT(11, 8, 1, 2, 16), ts.Plan(), optimizer=SGD, loss_fn=next_token_loss)
        self.saved = folder / "saved"
        self.usual.save(self.saved)

    def _classifier(self, **fields: Any) -> ts.Engine:
        model = nn.Sequential(nn.Embedding(7, 8), nn.Flatten(), nn.Linear(16, 3))
        return ts.parallelize(
            model,
            ts.Plan(**fields),
            optimizer=SGD,
            loss_fn=lambda output, targets: self.losses(output, targets),  # noqa: PLW0108 - as it is then
        )

    def step(self, loss: Any) -> None:
        """A step of which the loss function is ``loss(output, targets)``."""
        usual, self.losses = self.losses, loss
        try:
            self.usual.step(TOKENS, TARGETS)
        finally:
            self.losses = usual

    def output(self) -> torch.Tensor:
        return self.usual.model(TOKENS)


def _data() -> TensorDataset:
    return TensorDataset(torch.randn(8, 2), torch.arange(8))


def _generate(e: Engines, prompts: Any = TOKENS[1:], max_new_tokens: Any = 2, **more: Any) -> None:
    e.gpt.generate(prompts, max_new_tokens=max_new_tokens, **more)


def _iterate(e: Engines, **options: Any) -> None:
    next(iter(e.usual.loader(_data(), 4, **options)))


def _nested(e: Engines) -> None:
    with e.in_two.accumulate(), e.in_two.accumulate():
        pass


def _two_in_one(e: Engines) -> None:
    with e.in_two.accumulate():
        e.in_two.backward(e.in_two.model(TOKENS).mean())
        e.in_two.backward(e.in_two.model(TOKENS).mean())


def _too_early(e: Engines) -> None:
    e.in_two.backward(e.in_two.model(TOKENS).mean())
    try:
        e.in_two.optimizer.step()
    finally:
        e.in_two.optimizer.zero_grad()


def _hook_of_another_shape(e: Engines) -> None:
    handle = e.usual.register_gradient_hook(lambda name, gradient: torch.zeros(5))
    try:
        e.usual.step(TOKENS, TARGETS)
    finally:
        handle.remove()


BATCHES: dict[str, Case] = {
    "tokens above the vocabulary": (
        lambda e: e.usual.step(TOKENS + 1, TARGETS), "inputs of this batch are 1 to 7", "0 has 7 rows", "the vocabulary"
    ),
    "negative tokens": (lambda e: e.usual.evaluate(TOKENS - 1, TARGETS), "are -1 to 5", "0 has 7 rows"),
    "tokens above it in predict": (lambda e: e.usual.predict(TOKENS + 1), "are 1 to 7", "the vocabulary"),
    "tokens above it in a loop of one's own": (lambda e: e.usual.model(TOKENS + 1), "are 1 to 7", "the vocabulary"),
    "floating-point tokens": (lambda e: e.usual.step(TOKENS.float(), TARGETS), "Long", "torch.float32 [2, 2]"),
    "targets out of range": (lambda e: e.usual.step(TOKENS, TARGETS + 1), "Target 3", "1 to 3", "number of classes"),
    "floating-point targets": (lambda e: e.usual.step(TOKENS, TARGETS.float()), "torch.float32", "targets.long()"),
    "fewer targets than inputs": (
        lambda e: e.usual.step(TOKENS, TARGETS[:1]), "torch.int64 [1]", "torch.float32 [2, 3]"
    ),
    "no targets": (lambda e: e.usual.step(TOKENS, None), "loss_fn", "None", "torch.float32 [2, 3]"),
    "inputs of another width": (
        lambda e: e.usual.step(torch.zeros(2, 3, dtype=torch.long), TARGETS), "mat1 and mat2", "torch.int64 [2, 3]",
        "failed in '2', a Linear(in_features=16, out_features=3, bias=True)", "called with torch.float32 [2, 24]",
    ),
    "inputs by a wrong name": (lambda e: e.gpt.step({"input_idz": TOKENS}, TOKENS), "input_idz", "torch.int64 [2, 2]"),
    "one input too many": (lambda e: e.gpt.step((TOKENS, TOKENS, TOKENS), TOKENS), "GPT", "torch.int64 [2, 2]"),
    "numpy inputs": (lambda e: e.usual.step(TOKENS.numpy(), TARGETS), "a ndarray", "a tensor, or a tuple or dict"),
    "numpy inputs in a tuple": (lambda e: e.usual.step((TOKENS.numpy(),), TARGETS), "no tensors", "ndarray"),
    "a list of numbers": (lambda e: e.usual.step([[0, 1], [2, 3]], TARGETS), "no tensors"),
    "no inputs": (lambda e: e.usual.step(None, TARGETS), "inputs are a NoneType", "a tensor, or a tuple or dict"),
    "inputs of no samples": (lambda e: e.usual.step(TOKENS[:0], TARGETS[:0]), "no samples", "at least one"),
    "an input without dimensions": (lambda e: e.usual.step(torch.tensor(3), TARGETS), "first dimension"),
    "inputs of different lengths": (lambda e: e.gpt.step((TOKENS, TOKENS[:1]), TOKENS), "first dimensions [1, 2]"),
    "a batch that does not split": (
        lambda e: e.in_two.step(torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, dtype=torch.long)),
        "a batch of 3 samples", "micro_batches=2", "can be 1, 3",
    ),
    "targets that do not split": (
        lambda e: e.in_two.step(TOKENS, torch.zeros(3, dtype=torch.long)), "shape (3,)", "first dimension must be 2"
    ),
    "a sequence longer than the model's": (
        lambda e: e.gpt.step(torch.zeros(1, 9, dtype=torch.long), torch.zeros(1, 9, dtype=torch.long)), "9", "8"
    ),
    "step without a batch": (lambda e: e.usual.step(), "inputs"),
}  # fmt: skip

LOSSES: dict[str, Case] = {
    "a loss for each sample": (
        lambda e: e.step(partial(nn.functional.cross_entropy, reduction="none")), "shape (2,)", "a scalar tensor"
    ),
    "a number": (lambda e: e.step(lambda *_: 1.5), "loss_fn returned 1.5", "a scalar tensor"),
    "nothing": (lambda e: e.step(lambda *_: None), "loss_fn returned None", "a scalar tensor"),
    "a loss and a dict of metrics": (
        lambda e: e.step(lambda output, _: (output.mean(), {"accuracy": 1.0})), "loss_fn returned", "(sum, count)"
    ),
    "a loss and None": (lambda e: e.step(lambda output, _: (output.mean(), None)), "loss_fn returned", "(sum, count)"),
    "a count below 0": (lambda e: e.step(lambda output, _: (output.sum(), -1)), "a count of -1", "0 or more"),
    "a count for each sample": (
        lambda e: e.step(lambda output, _: (output.sum(), torch.ones(2))), "loss_fn returned", "(sum, count)"
    ),
    "a count that is nan": (lambda e: e.step(lambda output, _: (output.sum(), float("nan"))), "nan"),
    "a detached loss": (lambda e: e.step(lambda output, _: output.mean().detach()), "no gradient", ".detach()"),
    "the count of what was right": (
        lambda e: e.step(lambda output, targets: (output.argmax(1) == targets).sum()), "no gradient"
    ),
    "a loss of complex numbers": (lambda e: e.step(lambda output, _: (output + 0j).mean()), "complex"),
    "a loss that is nan": (lambda e: e.step(lambda output, _: output.mean() * float("nan")), "loss of step 1 is nan"),
    "a loss of the output alone, in evaluate": (lambda e: e.usual.evaluate(TOKENS, None), "loss_fn", "None"),
}  # fmt: skip

LOOPS: dict[str, Case] = {
    "backward of nothing": (lambda e: e.usual.backward(None), "engine.backward was given None", "a scalar tensor"),
    "backward of a vector": (lambda e: e.usual.backward(e.output().mean(1)), "shape (2,)", "a scalar tensor"),
    "backward of a detached loss": (lambda e: e.usual.backward(e.output().mean().detach()), "no gradient"),
    "loss.backward() of micro-batches": (lambda e: e.in_two.model(TOKENS).mean().backward(), "engine.backward(loss)"),
    "loss.backward() in fp16": (lambda e: e.fp16.model(TOKENS).mean().backward(), "fp16", "engine.backward(loss)"),
    "an update before the last micro-batch": (_too_early, "after 1 of", "micro_batches=2", "engine.accumulate()"),
    "accumulate within accumulate": (_nested, "entered within itself", "surrounds one micro-batch"),
    "two backwards of one micro-batch": (_two_in_one, "2 calls of engine.backward", "one micro-batch"),
    "clipping below 0": (lambda e: e.usual.clip_grad_norm_(-1.0), "max_norm is -1.0", "a number above 0"),
    "clipping at nan": (lambda e: e.usual.clip_grad_norm_(float("nan")), "max_norm is nan", "a number above 0"),
    "clipping by text": (lambda e: e.usual.clip_grad_norm_("1"), "max_norm is '1'", "a number above 0"),
    "a hook that is no function": (
        lambda e: e.usual.register_gradient_hook(3), "hook is an int", "hook(name, gradient)"
    ),
    "a hook that returns another shape": (_hook_of_another_shape, "a gradient hook returned Tensor [5]", "[7, 8]"),
    "weights by a name that is not there": (
        lambda e: e.usual.using_weights({"nope": TOKENS}).__enter__(), "'nope'", "named_parameters()"
    ),
    "weights of another shape": (
        lambda e: e.usual.using_weights({"2.bias": torch.zeros(9)}).__enter__(), "'2.bias'", "[9]", "[3]"
    ),
    "a schedule on the Engine": (lambda e: torch.optim.lr_scheduler.StepLR(e.usual, 1), "Engine"),
    "an optimizer on the Engine": (lambda e: torch.optim.SGD(e.usual, lr=0.1), "engine.optimizer"),
    "pickle of the Engine": (lambda e: torch.save(e.usual, e.folder / "x"), "cannot be pickled", "engine.save(path)"),
    "pickle of the model": (lambda e: torch.save(e.usual.model, e.folder / "x"), "pickle", "engine.full_state_dict()"),
    "DDP around the model": (
        lambda e: nn.parallel.DistributedDataParallel(e.usual.model), "laid out", "Use engine.model as it is"
    ),
    "FSDP around a block of it": (lambda e: fully_shard(e.usual.model[2]), "laid out", "zero=, dp_shard="),
    "calling the Engine": (lambda e: e.usual(TOKENS), "engine.model(", "engine.step(inputs, targets)"),
    "engine.parameters()": (lambda e: e.usual.parameters(), "engine.model.parameters()"),
    "engine.state_dict()": (lambda e: e.usual.state_dict(), "engine.full_state_dict()"),
    "engine.cuda()": (lambda e: e.usual.cuda(), "parallelize(device="),
    "a name with a typing mistake": (lambda e: e.usual.setp(TOKENS, TARGETS), "'setp'", "step"),
    "a state dict that lacks weights": (lambda e: e.usual.model.load_state_dict({}), "Missing key", "0.weight"),
    "a schedule without a pipeline": (lambda e: e.usual.draw_schedule(), "pp=1", "set pp to 2"),
}  # fmt: skip

TEXTS: dict[str, Case] = {
    "prompts as lists": (lambda e: _generate(e, [[1, 2]]), "list", "token ids"),
    "prompts as text": (lambda e: _generate(e, "once"), "str", "token ids"),
    "one prompt without samples": (lambda e: _generate(e, torch.tensor([1, 2])), "(2,)", "[samples, tokens]"),
    "floating-point prompts": (lambda e: _generate(e, torch.ones(1, 2)), "torch.float32", "whole numbers"),
    "an empty prompt": (lambda e: _generate(e, torch.zeros(1, 0, dtype=torch.long)), "(1, 0)", "at least one token"),
    "tokens above the vocabulary": (
        lambda e: _generate(e, torch.tensor([[1, 11]])), "1 to 11", "embedding has 11 rows"
    ),
    "no new tokens": (lambda e: _generate(e, max_new_tokens=0), "max_new_tokens=0", "at least 1"),
    "half a token": (lambda e: _generate(e, max_new_tokens=2.5), "max_new_tokens=2.5", "whole number"),
    "more than the model reads": (lambda e: _generate(e, max_new_tokens=9), "11 together", "at most 8"),
    "a temperature below 0": (lambda e: _generate(e, temperature=-1.0), "temperature=-1.0", "at least 0"),
    "a temperature as text": (lambda e: _generate(e, temperature="hot"), "temperature='hot'", "at least 0"),
    "a temperature that is nan": (lambda e: _generate(e, temperature=float("nan")), "temperature=nan", "at least 0"),
    "none of the likeliest": (lambda e: _generate(e, top_k=0), "top_k=0", "at least 1"),
    "an end token as text": (lambda e: _generate(e, eos_token_id="</s>"), "eos_token_id='</s>'", "a whole number"),
    "a model that is no language model": (
        lambda e: e.usual.generate(TOKENS, max_new_tokens=1), "(2, 3)", "logits of shape [samples, tokens, vocabulary]"
    ),
}  # fmt: skip

LOADERS: dict[str, Case] = {
    "a batch of 0": (lambda e: e.usual.loader(_data(), 0), "batch_size is 0", "at least 1"),
    "a batch as text": (lambda e: e.usual.loader(_data(), "4"), "batch_size is '4'", "an integer of at least 1"),
    "half a sample": (lambda e: e.usual.loader(_data(), 2.5), "batch_size is 2.5", "an integer of at least 1"),
    "a stream": (lambda e: e.usual.loader(_Stream(), 4), "_Stream", "shuffle=False"),
    "no samples": (lambda e: e.usual.loader(TensorDataset(torch.zeros(0, 2)), 4), "no samples"),
    "no whole batch": (
        lambda e: e.usual.loader(TensorDataset(torch.zeros(3, 2)), 4, drop_last=True), "3 samples", "batch_size=4"
    ),
    "a sampler of one's own": (lambda e: e.usual.loader(_data(), 4, sampler=[1]), "given sampler", "shuffle"),
    "an option with a typing mistake": (
        lambda e: e.usual.loader(_data(), 4, num_wokers=2), "'num_wokers'", "'num_workers'"
    ),
    "fewer than no workers": (lambda e: e.usual.loader(_data(), 4, num_workers=-1), "num_workers"),
    "a negative seed": (lambda e: e.usual.loader(_data(), 4, seed=-1), "seed is -1", "0 or more"),
    "a seed as the generator": (lambda e: e.usual.loader(_data(), 4, generator=3), "generator is 3", "manual_seed(0)"),
    "an order twice": (
        lambda e: e.usual.loader(_data(), 4, shuffle=False, generator=torch.Generator()),
        "shuffle=False",
        "one of the two",
    ),
    "a name twice": (
        lambda e: [e.usual.loader(_data(), 4, name="twice") for _ in range(2)], "'twice' already", "another name"
    ),
}  # fmt: skip

FILES: dict[str, Case] = {
    "a checkpoint that is there": (lambda e: e.usual.save(e.saved), "is there already", "not overwritten"),
    "a folder that cannot be made": (
        lambda e: e.usual.save(e.saved / "engine.json" / "x"), "cannot be written", "nothing was written"
    ),
    "no path": (lambda e: e.usual.save(None), "path is None", "a path"),
    "an extra of tensors": (lambda e: e.usual.save(e.folder / "x", extra={"a": TOKENS}), "extra", "numbers, strings"),
    "an extra that is no dict": (lambda e: e.usual.save(e.folder / "x", extra=[1]), "extra is a list", "a dict"),
    "no checkpoint": (lambda e: e.usual.load(e.folder / "nowhere"), "nowhere", "not a checkpoint", "no such folder"),
    "a path as a number": (lambda e: e.usual.load(3), "path is 3", "a path"),
    "a checkpoint of another model": (lambda e: e.gpt.load(e.saved), "another model", "such as"),
    "files for others at a place that is taken": (
        lambda e: e.usual.save_pretrained(e.saved), "is there already", "not overwritten"
    ),
    "a size that is none": (
        lambda e: e.usual.save_pretrained(e.folder / "x", max_shard_size="5 gigs"), "'5 gigs'", "such as '5GB'"
    ),
    "a dtype by its name": (lambda e: e.usual.save_pretrained(e.folder / "x", dtype="bf16"), "'bf16'", "torch.dtype"),
    "a dtype of integers": (lambda e: e.usual.save_pretrained(e.folder / "x", dtype=torch.int8), "floating-point"),
}  # fmt: skip

ALL = {
    f"{where}: {what}": case
    for where, cases in dict(
        batches=BATCHES, losses=LOSSES, loops=LOOPS, texts=TEXTS, loaders=LOADERS, files=FILES
    ).items()
    for what, case in cases.items()
}


def _say_all(folder: Path) -> tuple[dict[str, Said], bool]:
    """What is said, and whether the engines are as they were."""
    engines = Engines(folder)
    before = [engine.full_state_dict() for engine in (engines.usual, engines.in_two, engines.gpt)]
    found = say_all(ALL, engines)
    after = [engine.full_state_dict() for engine in (engines.usual, engines.in_two, engines.gpt)]
    same = all(torch.equal(x[name], y[name]) for x, y in zip(before, after, strict=True) for name in x)
    engines.usual.optimizer.zero_grad()
    return found, same and bool(engines.usual.step(TOKENS, TARGETS).isfinite()) and engines.usual.step_count == 1


@pytest.fixture(scope="module")
def found(ranks, tmp_path_factory) -> tuple[dict[str, Said], bool]:
    return ranks(1, _say_all, tmp_path_factory.mktemp("wrong"))[0]


@pytest.mark.parametrize("what", ALL)
def test_a_wrong_call(found, what):
    assert_refused(what, found[0][what], ALL[what])


def test_nothing_was_changed(found):
    assert found[1]
