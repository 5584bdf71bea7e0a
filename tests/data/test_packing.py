"""Packed documents train as the same documents do on their own."""

import json
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset

import seeds
import tensorshard as ts
from bounds import assert_within
from tensorshard.models import GPT, next_token_loss

LENGTH = 16


def documents(count: int = 40, longest: int = LENGTH + 1) -> list[list[int]]:
    generator = seeds.generator(5)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator)
    return [torch.randint(61, (int(length),), generator=generator).tolist() for length in lengths]


def gpt() -> nn.Module:
    seeds.seed(1)
    return GPT(61, LENGTH, 2, 2, 16).double()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    seeds.seed(1)
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


MODELS = {"gpt": (gpt, ("tokens", "position_ids")), "llama": (llama, ("input_ids", "position_ids"))}
SGD = partial(torch.optim.SGD, lr=0.1)


def packed(kind: str, fields: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps on all rows at once."""
    make, names = MODELS[kind]
    engine = ts.parallelize(make(), ts.Plan(**fields), optimizer=SGD, loss_fn=next_token_loss)
    rows = ts.data.pack(documents(), LENGTH, names=names)
    losses = []
    for _ in range(3):
        (batch,) = engine.loader(rows, len(rows) + len(rows) % 2, shuffle=False, name=f"{len(losses)}")
        losses.append(engine.step(*batch).item())
    return losses, engine.full_state_dict()


def separate(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same in plain PyTorch, each document a batch of its own."""
    model = MODELS[kind][0]()
    optimizer = SGD(model.parameters())
    losses = []
    for _ in range(3):
        total = sum(
            F.cross_entropy(
                getattr(output := model(torch.tensor([document[:-1]])), "logits", output)[0],
                torch.tensor(document[1:]),
                reduction="sum",
            )
            for document in documents()
        )
        loss = total / sum(len(document) - 1 for document in documents())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("world", "fields"),
    [
        pytest.param(1, {}, id="plain"),
        pytest.param(2, {"zero": 3}, id="zero3"),
        pytest.param(2, {"tp": 2}, id="tp2"),
        pytest.param(2, {"pp": 2, "micro_batches": 2}, id="pp2"),
        pytest.param(2, {"cp": 2}, id="cp2"),
        pytest.param(2, {"zero": 2, "micro_batches": 3, "recompute": "full"}, id="micro"),
    ],
)
@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.fast_cases("gpt-zero3")
def test_packed_documents_have_the_loss_of_separate_ones(ranks, kind, world, fields):
    losses, state = ranks(world, packed, kind, fields)[0]
    expected_losses, expected = separate(kind)
    for found, wanted in zip(losses, expected_losses, strict=True):
        assert_within(abs(found - wanted), 1e-6, "loss")
    for name, value in expected.items():
        assert_within((state[name] - value).abs().max(), 1e-6, name)


def test_rows_hold_every_document_once():
    rows = ts.data.pack(documents(), LENGTH)
    seen = []
    for inputs, targets in rows:
        ids = ts.data.document_ids(inputs["position_ids"])
        for number in ids.unique():
            here = ids == number
            assert inputs["position_ids"][here].tolist() == list(range(int(here.sum())))
            if (targets[here] != -100).any():
                seen.append([int(inputs["input_ids"][here][0]), *targets[here].tolist()])
    assert sorted(seen) == sorted(documents())
    assert rows.filled > 0.89
    assert ts.data.pack(documents(), LENGTH, lengths=[len(document) for document in documents()]).filled == rows.filled


@pytest.mark.parametrize("as_stream", [False, True])
def test_longer_documents_are_split_or_cut(as_stream):
    long = list(range(10))
    given: Any = Documents([long]) if as_stream else [long]
    split = {
        int(x): int(y) for i, t in ts.data.pack(given, 4) for x, y in zip(i["input_ids"], t, strict=True) if y >= 0
    }
    assert split == {token: token + 1 for token in range(9)}  # no target is lost
    ((inputs, targets),) = ts.data.pack(given, 4, longer="cut")
    assert inputs["input_ids"].tolist() == [0, 1, 2, 3] and targets.tolist() == [1, 2, 3, 4]


def test_labels_say_what_is_predicted():
    document = {"input_ids": torch.tensor([5, 6, 7, 8]), "labels": torch.tensor([-100, -100, 7, 8]), "other": None}
    inputs, targets = ts.data.pack([document], 5, pad=9)[0]
    assert inputs["input_ids"].tolist() == [5, 6, 7, 9, 9] and targets.tolist() == [-100, 7, 8, -100, -100]
    assert inputs["position_ids"].tolist() == [0, 1, 2, 0, 1]


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 1]])


def attention_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """What each document gets on its own: [2, 1, 8, 4]."""
    offsets, longest = ts.data.document_offsets(POSITIONS)
    assert offsets.tolist() == [0, 3, 5, 8, 14, 16] and offsets.dtype == torch.int32 and longest == 6
    flat = [x.transpose(1, 2).reshape(16, 1, 4) for x in (q, k, v)]
    parts = [
        F.scaled_dot_product_attention(*(x[first:last].transpose(0, 1) for x in flat), is_causal=causal)
        for first, last in pairwise(offsets.tolist())
    ]
    return torch.cat(parts, 1).view(1, 2, 8, 4).transpose(0, 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", ["sdpa", pytest.param("flex", marks=pytest.mark.slow)])  # which imports a compiler
def test_masks_keep_documents_apart(kernel, causal):
    q, k, v = torch.randn(3, 2, 1, 8, 4, generator=seeds.generator(1), dtype=torch.float64)
    if kernel == "sdpa":
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=ts.data.document_mask(POSITIONS, causal=causal))
    else:
        from torch.nn.attention.flex_attention import flex_attention

        found = flex_attention(q, k, v, block_mask=ts.data.document_block_mask(POSITIONS, causal=causal))
    torch.testing.assert_close(found, attention_alone(q, k, v, causal))


def test_offsets_need_whole_rows():
    with pytest.raises(ValueError, match=r"begin with \[1\]; each must begin with 0"):
        ts.data.document_offsets(POSITIONS[:1, 1:])


class Documents(IterableDataset[list[int]]):
    """A stream without a state."""

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents = documents

    def __iter__(self):
        yield from self.documents


class StatefulDocuments(Documents):
    """One with a state."""

    place = 0

    def __iter__(self):
        while self.place < len(self.documents):
            self.place += 1
            yield self.documents[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("kind", [Documents, StatefulDocuments])
def test_a_packed_stream_goes_on_where_it_was(kind):
    make = lambda: ts.data.pack(kind(documents(longest=40)), LENGTH, open_rows=3)  # noqa: E731
    whole = [(i["input_ids"].tolist(), t.tolist()) for i, t in make()]
    assert sum(y >= 0 for _, targets in whole for y in targets) == sum(len(d) - 1 for d in documents(longest=40))
    for stop in (1, 7, len(whole) - 1):
        stream = make()
        rows = iter(stream)
        begun = [next(rows) for _ in range(stop)]
        state = json.loads(json.dumps(stream.state_dict()))
        resumed = make()
        resumed.load_state_dict(state)
        assert [(i["input_ids"].tolist(), t.tolist()) for i, t in [*begun, *resumed]] == whole
    assert [(i["input_ids"].tolist(), t.tolist()) for i, t in resumed] == whole  # the next epoch


def test_a_hugging_face_dataset_on_disk_is_packed(tmp_path):
    datasets = pytest.importorskip("datasets")
    given = [{"input_ids": document, "labels": [-100, *document[1:]]} for document in documents()]
    datasets.Dataset.from_list(given).save_to_disk(tmp_path / "stored")
    stored = datasets.load_from_disk(tmp_path / "stored")
    expected = [(i["input_ids"].tolist(), t.tolist()) for i, t in ts.data.pack(documents(), LENGTH)]
    for form in (None, "torch", "numpy"):
        rows = ts.data.pack(stored.with_format(form), LENGTH)
        assert [(i["input_ids"].tolist(), t.tolist()) for i, t in rows] == expected
    stream = ts.data.pack(stored.to_iterable_dataset(), LENGTH)
    rows = iter(stream)
    begun = [next(rows) for _ in range(5)]
    resumed = ts.data.pack(stored.to_iterable_dataset(), LENGTH)
    resumed.load_state_dict(stream.state_dict())
    assert [t.tolist() for _, t in [*begun, *resumed]] == [
        t.tolist() for _, t in ts.data.pack(Documents(documents()), LENGTH)
    ]


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([[1, 2]], {"length": 0}, "length is 0"),
        ([[1, 2]], {"longer": "drop"}, "longer is 'drop'; it must be 'split' or 'cut'"),
        ([[1, 2]], {"lengths": [2, 3]}, "lengths has 2 numbers for 1 documents"),
        ([[1], []], {}, "none of 2 documents has two tokens"),
        ([{"ids": [1]}], {}, "a document has the keys ids; it must have 'input_ids'"),
        (Documents([]), {"lengths": [1]}, "lengths were given for a stream"),
        (Documents([]), {"open_rows": 0}, "open_rows is 0"),
    ],
)
def test_what_cannot_be_packed_is_refused(given, options, message):
    with pytest.raises(ValueError, match=message):
        ts.data.pack(given, **{"length": 4, **options})


def test_a_document_or_its_labels_that_are_shorter_than_said():
    with pytest.raises(ValueError, match="document 0 has 2 tokens, fewer than lengths said"):
        ts.data.pack([[1, 2]], 4, lengths=[3])[0]
    with pytest.raises(ValueError, match=r"tokens of shape \[3\] and labels of shape \[2\]"):
        ts.data.pack([{"input_ids": [1, 2, 3], "labels": [1, 2]}], 4)[0]
