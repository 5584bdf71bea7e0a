"""nn.MultiheadAttention split by its heads: every argument and option against the original, forward and backward."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts
from bounds import assert_within
from tensorshard.tensor_parallel.apply.apply_table import apply_tensor_parallel, find_layouts
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.table.layouts import join_shards, local_shard
from tensorshard.tensor_parallel.table.table import TensorTable
from tensorshard.tensor_parallel.verify.simulated_ranks import run_as_ranks

WIDTH, HEADS, BATCH, QUERIES, KEYS = 16, 4, 3, 5, 7
PADDING = torch.arange(KEYS).expand(BATCH, KEYS) >= torch.tensor([[7], [4], [2]])
CAUSAL = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)


class Attention(nn.Module):
    """The attention, its result as a tuple of tensors; one input means self-attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn_like(parameter) / 2)

    def forward(self, inputs: list[torch.Tensor], **call: Any) -> tuple[torch.Tensor, ...]:
        query, key, value = inputs if len(inputs) == 3 else (inputs[0], inputs[-1], inputs[-1])
        return tuple(t for t in self.attention(query, key, value, **call) if t is not None)


def run(model: nn.Module, inputs: list[torch.Tensor], call: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Outputs, gradients of the inputs, and of the parameters."""
    own = [tensor.clone().requires_grad_() for tensor in inputs]
    outputs = model(own, **call)
    generator = torch.Generator().manual_seed(4)
    sum((o * torch.randn(o.shape, generator=generator, dtype=o.dtype)).sum() for o in outputs).backward()
    return outputs, [tensor.grad for tensor in own], {name: p.grad for name, p in model.named_parameters()}


def inputs(kind: str, batch_first: bool = True, width: int = WIDTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    lengths = {"self": [QUERIES], "cross": [QUERIES, KEYS], "three": [QUERIES, KEYS, KEYS]}[kind]
    shapes = [(BATCH, n, WIDTH if i == 0 else width) for i, n in enumerate(lengths)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return made if batch_first else [tensor.transpose(0, 1).contiguous() for tensor in made]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


SELF, CROSS, THREE = inputs("self"), inputs("cross"), inputs("three")
FAST = {"need_weights": False}
CASES: dict[str, tuple[dict[str, Any], list[torch.Tensor], dict[str, Any]]] = {
    "self": ({}, SELF, FAST),
    "self-weights": ({}, SELF, {}),
    "self-weights-of-heads": ({}, SELF, {"average_attn_weights": False}),
    "self-causal": ({}, SELF, {"attn_mask": CAUSAL, "is_causal": True, **FAST}),
    "self-causal-weights": ({}, SELF, {"attn_mask": CAUSAL, "is_causal": True}),
    "self-length-first": ({"batch_first": False}, inputs("self", batch_first=False), {}),
    "cross": ({}, CROSS, FAST),
    "cross-padding": ({}, CROSS, {"key_padding_mask": PADDING, **FAST}),
    "cross-padding-weights": ({}, CROSS, {"key_padding_mask": PADDING}),
    "cross-float-mask": ({}, CROSS, {"attn_mask": noise(QUERIES, KEYS), **FAST}),
    "cross-mask-per-head": ({}, CROSS, {"attn_mask": noise(BATCH * HEADS, QUERIES, KEYS), **FAST}),
    "cross-bool-mask-per-head": ({}, CROSS, {"attn_mask": noise(BATCH * HEADS, QUERIES, KEYS) > 1}),
    "cross-both-masks": ({}, CROSS, {"attn_mask": noise(QUERIES, KEYS) > 1, "key_padding_mask": PADDING, **FAST}),
    "cross-length-first": (
        {"batch_first": False},
        inputs("cross", batch_first=False),
        {"key_padding_mask": PADDING, "attn_mask": noise(QUERIES, KEYS) > 1},
    ),
    "three": ({}, THREE, FAST),
    "no-bias": ({"bias": False}, CROSS, FAST),
    "other-widths": ({"kdim": 6, "vdim": 6}, inputs("three", width=6), FAST),
    "other-widths-no-bias": ({"kdim": 6, "vdim": 6, "bias": False}, inputs("three", width=6), {}),
    "appended": (
        {"add_bias_kv": True, "add_zero_attn": True},
        CROSS,
        {"key_padding_mask": PADDING, "attn_mask": noise(BATCH * HEADS, QUERIES, KEYS), **FAST},
    ),
    "appended-weights": ({"add_bias_kv": True, "add_zero_attn": True}, CROSS, {}),
    "unbatched": ({}, [t[0] for t in CROSS], {"key_padding_mask": PADDING[1], **FAST}),
    "unbatched-weights": ({}, [t[0] for t in CROSS], {"attn_mask": noise(HEADS, QUERIES, KEYS)}),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
def test_computes_what_the_original_does(case, size):
    options, given, call = CASES[case]
    options = {"batch_first": True, **options}
    whole = Attention(**options)
    outputs, input_gradients, gradients = run(whole, given, call)
    plan = TensorTable.from_dict({"attention": "heads"})
    layouts = find_layouts(whole, plan.resolve(whole), size)

    def on_rank(group: Any) -> tuple[Any, Any, Any]:
        model = copy.deepcopy(whole)  # random numbers are not for several threads
        model.zero_grad()
        apply_tensor_parallel(model, plan, group)
        for name, parameter in model.named_parameters():
            parameter.data = local_shard(parameter.data, layouts[name], group.rank(), size)
        return run(model, given, call)

    ranks = run_as_ranks(size, on_rank)
    for found_outputs, found_input_gradients, _ in ranks:
        torch.testing.assert_close(found_outputs, outputs)
        torch.testing.assert_close(found_input_gradients, input_gradients)
    for name, gradient in gradients.items():
        joined = join_shards([rank[2][name] for rank in ranks], layouts[name])
        torch.testing.assert_close(joined, gradient)
    split = {name.rpartition(".")[2] for name, layout in layouts.items() if layout.dim is not None}
    assert not split & {"bias"} and "weight" in split  # the bias of out_proj is whole, its weight is not


def test_bad_masks_are_refused():
    def on_rank(group: Any, **call: Any) -> None:
        model = Attention(batch_first=True)
        apply_tensor_parallel(model, TensorTable.from_dict({"attention": "heads"}), group)
        model(CROSS, **call)

    for call, message in [
        ({"attn_mask": noise(KEYS, KEYS)}, "attn_mask has the shape"),
        ({"key_padding_mask": PADDING[:2]}, "key_padding_mask has the shape"),
        ({"attn_mask": torch.ones(QUERIES, KEYS, dtype=torch.long)}, "must be bool or floating"),
        ({"is_causal": True}, "needs both"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            run_as_ranks(1, partial(on_rank, **call))


class Translator(nn.Module):
    """nn.Transformer between embeddings and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 29)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = source == 0
        mixed = self.transformer(
            self.embedding(source),
            self.embedding(target),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.head(mixed)


class Classifier(nn.Module):
    """nn.TransformerEncoder, whose inference has fused kernels of its own."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, **{"batch_first": True, **options})
        self.batch_first = layer.self_attn.batch_first
        self.embedding = nn.Embedding(29, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, 29)

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(source)
        embedded = embedded if self.batch_first else embedded.transpose(0, 1)
        hidden = self.encoder(embedded, src_key_padding_mask=source == 0)
        return self.head(hidden[:, 0] if self.batch_first else hidden[0])


def build(kind: str) -> nn.Module:
    torch.manual_seed(1)
    models = {
        "translator": Translator,
        "classifier": Classifier,
        "classifier_norm_first": partial(Classifier, norm_first=True),
        "classifier_length_first": partial(Classifier, batch_first=False),
        "classifier_both": partial(Classifier, norm_first=True, batch_first=False),
    }
    model = models[kind]()
    with torch.no_grad():
        for parameter in model.parameters():  # no norm or bias as its initialisation leaves it
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def batch(kind: str, step: int) -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    source = torch.randint(1, 29, (8, 6), generator=generator)
    source[torch.arange(6) >= torch.randint(2, 7, (8, 1), generator=generator)] = 0
    if kind != "translator":
        return source, torch.randint(0, 29, (8,), generator=generator)
    target = torch.randint(0, 29, (8, 5), generator=generator)
    return (source, target), torch.randint(0, 29, (8, 5), generator=generator)


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())


# An epsilon above the rounding of gradients that are zero, as those of keys' biases are.
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
STEPS = 8


def train(kind: str, fields: dict[str, Any]) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    engine = ts.parallelize(build(kind), ts.Plan(**fields), optimizer=OPTIMIZER, loss_fn=loss)
    rank, size = engine.mesh.dp_rank, engine.mesh.dp_size

    def mine(step: int) -> tuple[Any, torch.Tensor]:
        given, targets = batch(kind, step)
        part = [t.chunk(size)[rank] for t in ((*given, targets) if isinstance(given, tuple) else (given, targets))]
        return (tuple(part[:-1]) if isinstance(given, tuple) else part[0]), part[-1]

    losses = [engine.step(*mine(step)).item() for step in range(STEPS)]
    return losses, engine.evaluate(*mine(STEPS)).item(), engine.full_state_dict()


def alone(kind: str) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    model = build(kind)
    optimizer = OPTIMIZER(model.parameters())
    losses = []
    for step in range(STEPS):
        given, targets = batch(kind, step)
        value = loss(model(*given) if isinstance(given, tuple) else model(given), targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    model.eval()
    with torch.no_grad():
        given, targets = batch(kind, STEPS)
        value = loss(model(*given) if isinstance(given, tuple) else model(given), targets)
    return losses, value.item(), model.state_dict()


@pytest.mark.parametrize(
    ("kind", "world_size", "fields"),
    [
        pytest.param("translator", 2, dict(tp=2), marks=pytest.mark.slow),
        pytest.param("translator", 4, dict(tp=2, zero=3, recompute="full"), marks=pytest.mark.slow),
        pytest.param("translator", 4, dict(tp=4), marks=pytest.mark.slow),
        ("classifier", 2, dict(tp=2)),
        pytest.param("classifier", 4, dict(tp=2, zero=1, recompute="selective"), marks=pytest.mark.slow),
        pytest.param("classifier", 4, dict(tp=2, zero=3), marks=pytest.mark.slow),
        pytest.param("classifier", 4, dict(tp=4, sequence_parallel=True), marks=pytest.mark.slow),
        ("classifier_norm_first", 2, dict(tp=2, sequence_parallel=True)),
        pytest.param("classifier_length_first", 4, dict(tp=4, sequence_parallel=True), marks=pytest.mark.slow),
        pytest.param(
            "classifier_both", 4, dict(tp=2, zero=3, recompute="full", sequence_parallel=True), marks=pytest.mark.slow
        ),
        pytest.param("translator", 2, dict(tp=2, sequence_parallel=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_training_and_inference(ranks, kind, world_size, fields):
    losses, evaluated, state = ranks(world_size, train, kind, fields)[0]
    expected_losses, expected, expected_state = alone(kind)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-5, atol=1e-5)
    assert evaluated == pytest.approx(expected, rel=1e-5)
    assert list(state) == list(expected_state)
    for name, value in expected_state.items():
        error = ((state[name] - value).norm() / value.norm().clamp(min=0.1)).item()
        assert_within(error, 1e-5, name)


def test_the_search_splits_every_attention_of_a_transformer():
    found = find_tensor_plan(build("translator"), 4)
    table = found.plan.to_dict()
    assert table["transformer.decoder.layers.*.multihead_attn"] == "heads"
    assert table["transformer.encoder.layers.*.self_attn.out_proj"] == "rowwise"
    assert found.split_share > 0.9
    assert not found.whole


def test_a_model_keeps_its_fused_kernels_where_nothing_is_split():
    model = copy.deepcopy(build("classifier"))
    run_as_ranks(
        1, lambda group: apply_tensor_parallel(model, TensorTable.from_dict({"head": "colwise_gather"}), group)
    )
    assert all(layer.activation_relu_or_gelu for layer in model.encoder.layers)
