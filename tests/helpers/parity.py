"""Training a small model under a plan, and what one plain process makes of the same batches."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_map

import seeds
import tensorshard as ts
from bounds import assert_within
from head_models import bert_with_head, gpt_with_head, resnet_with_head
from pipeline_models import UNet
from table_models import make
from tensorshard.engine.combined_optimizer import CombinedOptimizer
from tensorshard.models import GPT, Bert, ViT, image_classification_loss, next_token_loss
from tensorshard.parallelize import split_tensors
from tensorshard.tensor_parallel.table.table import VerifiedTable

STEPS = 20
GLOBAL_BATCH = 16
# The bias of an attention's keys has a gradient of exactly zero but for rounding, which AdamW would divide by itself:
# an epsilon far above the rounding (1e-9 to 1e-7) keeps it at rest.
ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, eps=1e-4)


def build(kind: str) -> nn.Module:
    """A model small enough for hundreds of runs, its weights the same every time. With ``_dropping`` after its name,
    each of its dropout layers drops."""
    if kind.endswith(DROPPING):
        return _dropping(build(kind.removesuffix(DROPPING)))
    seeds.seed(1)
    plain = kind.removesuffix(_HEAD)
    return _BUILDERS[kind]() if plain == kind else _HEADED[plain](_BUILDERS[plain]())


DROPPING = "_dropping"


def _dropping(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name in ("p",) if isinstance(module, nn.Dropout) else ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.1)
    return model


def _unet() -> nn.Module:
    model = UNet()
    for block in (*model.down, *model.up):
        block.conv.bias.requires_grad_(False)  # its gradient is zero but for rounding, as a norm follows
    return model


def _resnet(classes: int = 5) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[2, 2], layer_type="basic", num_labels=classes, num_channels=3
    )
    return ResNetForImageClassification(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _hf_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(61, 16, 3, 2, 30),
    "gpt_fp64": lambda: GPT(61, 16, 2, 2, 30).double(),
    "gpt_tied": lambda: GPT(61, 16, 2, 2, 30, tie_embeddings=True),
    "gpt_dropout": lambda: GPT(61, 16, 2, 2, 30, dropout=0.2),
    "bert": lambda: Bert(61, 16, 2, 2, 30, dropout=0.0),
    "vit": lambda: ViT(16, 4, 5, 2, 2, 30),
    "vit_317": lambda: ViT(16, 4, 317, 2, 2, 30),
    "resnet": _resnet,
    "resnet_37": partial(_resnet, 37),
    "gpt_101": lambda: GPT(101, 16, 2, 4, 32),
    "gpt2": partial(make, "gpt2"),
    "gpt_neox": partial(make, "gpt_neox"),
    "phi3": partial(make, "phi3"),
    "qwen3": partial(make, "qwen3"),
    "gemma2": partial(make, "gemma2"),
    "t5": partial(make, "t5"),
    "bloom": partial(make, "bloom"),
    "gpt_bigcode": partial(make, "gpt_bigcode"),
    "llama_one": partial(make, "llama_one"),
    "mixtral": partial(make, "mixtral"),
    "unet": _unet,
    "llama": _llama,
    "hf_bert": _hf_bert,
}
# The same models with a ParallelLinearCrossEntropy in the place of the last layer: they take the targets, too.
_HEADED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "gpt": gpt_with_head,
    "gpt_tied": gpt_with_head,
    "bert": bert_with_head,
    "resnet_37": resnet_with_head,
}
_HEAD = "_head"


# How many tokens or classes there are, of models that have not 61 or 5.
_OTHER_SIZES = {"gpt_101": 101, "resnet_37": 37, "vit_317": 317}
_PLAIN_IMAGES = ("vit", "vit_317")  # whose output is the logits
_IMAGES = (*_PLAIN_IMAGES, "resnet", "resnet_37")


def loss_function(kind: str) -> Callable[[Any, Any], Any]:
    kind = kind.removesuffix(DROPPING)
    if kind.endswith(_HEAD):
        return _mean if kind.removesuffix(_HEAD) in _IMAGES else _sum_and_count
    if kind == "unet":
        return nn.functional.cross_entropy
    if kind in _IMAGES:
        return image_classification_loss if kind in _PLAIN_IMAGES else _loss_of_logits(image_classification_loss)
    plain = kind in ("gpt", "gpt_fp64", "gpt_tied", "gpt_101", "gpt_dropout", "bert")
    return next_token_loss if plain else _loss_of_logits(next_token_loss)


def _mean(output: Any, targets: Any) -> Any:
    return output


def _sum_and_count(output: Any, targets: Any) -> Any:
    return output, (targets != -100).sum()


def _loss_of_logits(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return partial(_on_logits, loss)


def _on_logits(loss: Callable[[Any, Any], Any], output: Any, targets: Any) -> Any:
    return loss(output.logits, targets)


def batch(kind: str, step: int, size: int = GLOBAL_BATCH) -> tuple[Any, torch.Tensor]:
    """The global batch of a step; in text some targets are padding, unevenly over the samples."""
    kind = kind.removesuffix(DROPPING)
    if kind.endswith(_HEAD):
        inputs, targets = batch(kind.removesuffix(_HEAD), step, size)
        return ({**inputs, "targets": targets} if isinstance(inputs, dict) else (inputs, targets)), targets
    generator = seeds.generator(1000 + step)
    if kind == "unet":
        images = torch.randn(size, 3, 16, 16, generator=generator)
        return images, torch.randint(0, 2, (size, 16, 16), generator=generator)
    if kind in _IMAGES:
        images = torch.randn(size, 3, 16, 16, generator=generator)
        return images, torch.randint(0, _OTHER_SIZES.get(kind, 5), (size,), generator=generator)
    tokens = torch.randint(0, _OTHER_SIZES.get(kind, 61), (size, 13), generator=generator)
    inputs: Any = tokens[:, :-1]
    targets = tokens[:, 1:].clone()
    lengths = torch.randint(4, 13, (size, 1), generator=generator)
    padding = torch.arange(12).expand(size, 12) >= lengths
    targets[padding] = -100
    if kind in ("bert", "hf_bert", "bloom"):
        name = "tokens" if kind == "bert" else "input_ids"
        inputs = {name: inputs, "attention_mask": (~padding).long()}
    elif kind == "t5":
        inputs = {"input_ids": inputs.flip(1), "decoder_input_ids": inputs}
    elif kind in ("llama", "llama_one", "mixtral", "gpt2", "gpt_bigcode", "gpt_neox", "phi3", "qwen3", "gemma2"):
        inputs = {"input_ids": inputs}
    return inputs, targets


def train(
    kind: str, fields: dict[str, Any], steps: int = STEPS, as_callable: bool = False, optimizer: Any = ADAMW
) -> dict[str, Any]:
    """Losses of `steps` steps of `kind` under Plan(**fields), and the weights after them (on rank 0)."""
    engine = make_engine(kind, fields, as_callable=as_callable, optimizer=optimizer)
    losses, norms = [], []
    for step in range(steps):
        losses.append(engine.step(*shard(engine, *batch(kind, step))).item())
        norms.append(engine.grad_norm.item())
    return {"losses": losses, "norms": norms, "state": engine.full_state_dict()}


def make_engine(kind: str, fields: dict[str, Any], as_callable: bool = False, optimizer: Any = ADAMW) -> ts.Engine:
    with _tables_found_once(kind):
        return ts.parallelize(
            partial(build, kind) if as_callable else build(kind),
            ts.Plan(**fields),
            optimizer=optimizer,
            loss_fn=loss_function(kind),
        )


@contextmanager
def _tables_found_once(kind: str) -> Iterator[None]:
    """A tensor-parallel table that was found for `kind` in this process is used again, which saves seconds."""
    search = split_tensors.choose_tensor_table

    def choose(model: nn.Module, size: int, table: Any = None, *, sequence_parallel: bool, **options: Any) -> Any:
        def find() -> VerifiedTable:
            return search(model, size, table, sequence_parallel=sequence_parallel, **options)

        if table is not None or options.get("inputs") is not None:
            return find()
        key = kind, size, sequence_parallel
        if key not in _TABLES:
            _TABLES[key] = find()
        return copy.deepcopy(_TABLES[key])

    with mock.patch.object(split_tensors, "choose_tensor_table", choose):
        yield


_TABLES: dict[tuple[str, int, bool], VerifiedTable] = {}


def forget_tables() -> None:
    """From now on this process searches for tables again."""
    _TABLES.clear()


def shard(engine: ts.Engine, inputs: Any, targets: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """This data rank's part of a global batch."""
    rank, size = engine.mesh.dp_rank, engine.mesh.dp_size
    cut = lambda tensor: tensor.chunk(size)[rank]  # noqa: E731
    return tree_map(cut, inputs), cut(targets)


def reference(
    kind: str,
    clip: float | None = None,
    steps: int = STEPS,
    micro_batches: int = 1,
    data_ranks: int = 1,
    optimizer: Any = ADAMW,
) -> dict[str, Any]:
    """The same training in plain PyTorch on one process, with the whole batch at once; done once a session.

    Batch normalization sees micro-batches apart, so only for its sake `micro_batches` over `data_ranks` matter.
    """
    return _reference(kind, clip, steps, micro_batches, data_ranks, optimizer)


@cache
def _reference(
    kind: str, clip: float | None, steps: int, micro_batches: int, data_ranks: int, make: Any
) -> dict[str, Any]:
    model = build(kind)
    made = make(model.parameters())
    optimizer = CombinedOptimizer(made) if isinstance(made, list) else made
    loss_fn = loss_function(kind)
    losses, norms = [], []
    with ts.same_randomness(model):
        for step in range(steps):
            inputs, targets = batch(kind, step)
            loss = torch.zeros(())
            for part in _micro_batches(len(targets), micro_batches, data_ranks):
                cut = {k: v[part] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[part]
                result = loss_fn(model(**cut) if isinstance(cut, dict) else model(cut), targets[part])
                weight = (targets != -100).sum() if isinstance(result, tuple) else micro_batches
                share = (result[0] if isinstance(result, tuple) else result) / weight
                share.backward()
                loss = loss + share.detach()
            if clip is not None:
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"losses": losses, "norms": norms, "state": model.state_dict()}


def _micro_batches(size: int, count: int, data_ranks: int) -> list[torch.Tensor]:
    """Which samples are computed together: the i-th micro-batches of all data ranks."""
    return [part.flatten() for part in torch.arange(size).view(data_ranks, count, -1).unbind(1)]


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Losses and weights agree within `tolerance`."""
    torch.testing.assert_close(
        torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=tolerance, atol=tolerance
    )
    assert_same_state(found["state"], expected["state"], tolerance)


def assert_same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Each tensor, by the norm of the difference, agrees within `tolerance`."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        got = found[name]
        assert got.shape == value.shape and got.dtype == value.dtype, name
        size = value.double().norm().clamp(min=0.1)
        assert_within((got.double() - value.double()).norm() / size, tolerance, name)
