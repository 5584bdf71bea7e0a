"""Models that cannot be recorded, that are already built, or that are on the meta device."""

import copy
import functools
import logging
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorshard as ts
from peak_memory import in_a_new_process, peak_memory_of
from rank_pool import RankPool
from tensorshard.weights.initial import HeldTensors, Recording, TensorSource, from_meta, from_module, record


class Reader(nn.Module):
    """A constructor that does with random numbers whatever `read` does."""

    def __init__(self, read: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.value = read(torch.rand(3))


class Cached:
    """Keeps its tensors where no attribute of a module leads to."""

    kept: list[torch.Tensor] = []

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kept.append(tensor)


def swallow(tensor: torch.Tensor) -> float:
    try:
        return tensor.sum().item()
    except RuntimeError:
        return 0.0


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda tensor: tensor[0].item(), r"reads a tensor's value \(aten._local_scalar_dense"),
        (lambda tensor: bool(tensor[0] > 0.5), "reads a tensor's value"),
        (lambda tensor: tensor.tolist(), "reads a tensor's value"),
        (swallow, "reads a tensor's value"),
        (lambda tensor: tensor.numpy(), r"reads a tensor's memory \(torch.Tensor.numpy\)"),
        (lambda tensor: tensor.data_ptr(), "reads a tensor's memory"),
        (lambda tensor: tensor.nonzero(), "calls aten.nonzero.default, whose result has no shape"),
        (
            lambda tensor: torch.rand(2, generator=torch.Generator()),
            "draws from a torch.Generator of its own",
        ),
        (lambda tensor: torch.polar(tensor, tensor).conj(), "conjugated"),
        (Cached, r"keeps a tensor of shape \(3,\) in a cache"),
    ],
)
def test_built_whole_with_a_reason(
    read: Callable[[torch.Tensor], object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, logger="tensorshard"):
        source = record(lambda: Reader(read), seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert isinstance(source, HeldTensors)
    assert re.search(reason + ".*cannot be recorded: every process builds the whole model", caplog.text)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        built = Reader(read)
    assert source.names() == ["linear.weight", "linear.bias"]
    assert torch.equal(source.tensor("linear.weight"), built.linear.weight)
    assert not source.tensor("linear.weight").requires_grad
    assert source.module.linear.weight.is_meta and source.module.linear.weight.requires_grad


def test_files_are_read_for_real(tmp_path: object) -> None:
    path = f"{tmp_path}/weights.pt"
    weights = nn.Linear(3, 3).state_dict()
    torch.save(weights, path)

    def build() -> nn.Module:
        model = nn.Linear(3, 3)
        model.load_state_dict(torch.load(path))
        return model

    assert torch.equal(record(build, seed=0).tensor("weight"), weights["weight"])


def test_the_constructors_own_errors_surface() -> None:
    def broken() -> nn.Module:
        raise LookupError("no such layer")

    with pytest.raises(LookupError, match="no such layer") as caught:
        record(broken, seed=0)
    assert caught.value.__context__ is None  # the user sees one traceback, of the real run
    with pytest.raises(TypeError, match=r"returned a dict, where an nn.Module was expected"):
        record(dict, seed=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'weight' has no shape yet.*run one batch"):
        record(lambda: nn.LazyLinear(3), seed=0)
    with pytest.raises(ValueError, match=r"'x' is a torch.sparse_coo tensor"):
        model = nn.Module()
        model.register_buffer("x", torch.eye(2).to_sparse())
        from_module(model)
    for script in (torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 2))):
        model = nn.Sequential(nn.Linear(2, 2), script(nn.Linear(2, 2)))
        with pytest.raises(ValueError, match=r"module '1' is a torch.jit.ScriptModule.*Plan\(compile=True\)"):
            from_module(model)

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(2, 2)

    with pytest.raises(ValueError, match=r"leaves 'weight' on the meta device.*without torch.device\('meta'\)"):
        record(on_meta, seed=0)


def test_a_built_module_is_held() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    weight, original = model[0].weight.detach().clone(), model[0].weight
    source = from_module(model)
    assert source.module is model and model[0].weight.is_meta and model[2].weight is model[0].weight
    assert model[1]._flat_weights[0] is model[1].weight_ih_l0  # no copy of the real weights stays behind
    assert torch.equal(source.tensor("2.weight"), weight)
    assert source.tensor("0.weight").data_ptr() == original.data_ptr()  # handed out, not copied
    with pytest.raises(ValueError, match=r"'0.weight' is on the meta device and has no values"):
        from_module(model)


class MetaModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, padding_idx=0)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def meta_model() -> MetaModel:
    with torch.device("meta"):
        return MetaModel()


def test_meta_modules_reset_their_parameters() -> None:
    model = meta_model()
    source = from_meta(model, seed=2)
    assert isinstance(source, Recording) and source.module is model
    assert model.head.weight is model.embedding.weight and model.head.weight.is_meta
    assert not model.frozen.weight.requires_grad
    embedding = source.tensor("embedding.weight")
    assert embedding[0].tolist() == [0] * 4 and 0.5 < embedding[1:].std() < 1.5  # not the head's initialisation
    assert torch.equal(source.tensor("head.weight"), embedding)
    assert source.tensor("norm.running_var").tolist() == [1] * 4
    assert source.tensor("attention.out_proj.bias").tolist() == [0] * 4
    assert 0 < source.tensor("attention.in_proj_weight").abs().max() <= (6 / 16) ** 0.5
    again = from_meta(meta_model(), seed=2)
    for name in reversed(again.names()):
        assert torch.equal(again.tensor(name), source.tensor(name)), name
    assert not torch.equal(from_meta(meta_model(), seed=3).tensor("frozen.weight"), source.tensor("frozen.weight"))


def test_meta_modules_keep_what_is_real() -> None:
    model = meta_model()
    model.frozen.bias = nn.Parameter(torch.arange(4.0), requires_grad=False)
    model.register_buffer("table", torch.arange(3))
    source = from_meta(model, seed=2)
    assert source.tensor("table").tolist() == [0, 1, 2]
    assert source.module.table.is_meta


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class HalfReset(NoReset):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def test_meta_modules_without_initialisation_are_refused() -> None:
    with torch.device("meta"):
        without, half = nn.Sequential(nn.Linear(2, 2), NoReset()), nn.Sequential(HalfReset())
    with pytest.raises(ValueError, match=r"module '1' \(NoReset\) holds 'scale'.*pass the callable"):
        from_meta(without, seed=0)
    assert without[0].weight.is_meta
    with pytest.raises(ValueError, match=r"no reset_parameters\(\) of the model sets '0.shift'; pass the callable"):
        from_meta(half, seed=0)


class ReadingReset(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.weight.is_meta:
            self.largest = self.weight.max().item()


def test_meta_modules_that_read_values_are_built_whole() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), ReadingReset(2, 2))
    source = from_meta(model, seed=0)
    assert isinstance(source, HeldTensors) and source.module is model
    assert source.tensor("1.weight").max() == model[1].largest
    assert source.tensor("0.weight").abs().max() > 0 and model[0].weight.is_meta


def values_on_this_rank(build: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    torch.rand(torch.distributed.get_rank())  # the ranks' own random states differ
    source = record(build, seed=1)
    return {name: source.tensor(name) for name in source.names()}


def recordable() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16)


def unrecordable() -> nn.Module:
    return Reader(lambda tensor: tensor[0].item())


@pytest.mark.parametrize("build", [recordable, unrecordable])
def test_every_rank_has_the_same_values(ranks: RankPool, build: Callable[[], nn.Module]) -> None:
    first, second = ranks(2, values_on_this_rank, build)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


class Wide(nn.Module):
    """Two tables of `size` bytes, initialised twice."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size // 4096, 1024) for _ in range(2))
        for table in self.tables:
            nn.init.uniform_(table.weight)


_SIZE = 64 << 20


def _memory_of_recordings() -> tuple[int, int]:
    record(lambda: Wide(4096), seed=0)  # what the first recording imports is not its memory
    huge: list[TensorSource] = []
    recorded = peak_memory_of(lambda: huge.append(record(lambda: Wide(2 << 30), seed=0)))
    assert huge[0].module.tables[0].weight.numel() * 4 == 2 << 30
    large = record(lambda: Wide(_SIZE), seed=0)
    return recorded, peak_memory_of(lambda: [large.tensor(name).sum() for name in large.names()])


def test_memory_is_one_tensor() -> None:
    recorded, computed = in_a_new_process(_memory_of_recordings)
    assert recorded < 50 << 20
    assert 0.9 * _SIZE < computed < 1.2 * _SIZE


class Drawing(nn.Module):
    """Random operations of all kinds; some take more or fewer numbers by what they are given, or by what they draw."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.dropped = nn.Parameter(nn.functional.dropout(self.table.weight.detach(), 0.5))
        nn.init.trunc_normal_(self.table.weight, std=0.5)  # takes those in its bounds
        rates = self.table.weight.detach().exp() * 20
        self.counts = nn.Parameter(torch.poisson(rates) * torch.rand_like(rates))  # takes more for larger rates
        self.across = nn.Parameter(torch.empty(6, 5).t().normal_())  # in the order of memory
        self.small = nn.Parameter(torch.randn(3))  # keeps the second half of a pair for the next one
        self.lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.5)
        self.order = nn.Buffer(torch.randperm(9))
        self.picked = nn.Buffer(torch.multinomial(torch.rand(8), 20, replacement=True))
        self.head = nn.Linear(4, 7)
        self.head.weight = self.table.weight
        nn.init.orthogonal_(self.lstm.weight_hh_l1)
        self.plain = torch.randn(17)


@pytest.mark.parametrize("order", [1, -1])
def test_values_are_those_of_the_seeded_constructor(order: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        built = from_module(Drawing())
    source = record(Drawing, seed=4)
    assert isinstance(source, Recording)
    for name in source.names()[::order] * 2:
        assert torch.equal(source.tensor(name), built.tensor(name)), name
    assert torch.equal(source.module.plain, built.module.plain)


class Counter:
    """Neither a module nor a container."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.count, self.tensor = 0, tensor


class Sharing(nn.Module):
    def __init__(self, shared: dict[str, object]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        vars(self).update(shared)


def _sharing() -> nn.Module:
    table = torch.arange(3.0)
    counter = Counter(table)
    shared = {"list": [table, 0], "dict": {"table": [table]}, "tuple": (table, counter), "object": counter}
    return nn.Sequential(Sharing(shared), Sharing(shared))


@pytest.mark.parametrize("source", [lambda: record(_sharing, seed=0), lambda: from_module(_sharing())])
def test_what_modules_share_they_share_when_laid_out(source: Callable[[], TensorSource]) -> None:
    first, second = source().module.children()
    for name in ("list", "dict", "tuple", "object"):
        assert getattr(first, name) is getattr(second, name)
    table = first.object.tensor
    assert table.tolist() == [0.0, 1.0, 2.0]
    assert first.list[0] is table
    assert first.dict["table"][0] is table
    assert first.tuple == (table, first.object)


def test_caches_outside_of_the_model_keep_no_fake_tensors() -> None:
    kept: dict[str, torch.Tensor] = {}

    @functools.lru_cache
    def table(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(size).float(), torch.ones(size)

    def build() -> nn.Module:
        module = nn.Linear(3, 3)
        vars(module).update(table=kept.setdefault("table", torch.arange(3.0)), tables=table(2))
        return module

    module = record(build, seed=0).module
    assert module.table.tolist() == [0.0, 1.0, 2.0]
    assert module.tables[0].tolist() == [0.0, 1.0]
    assert kept["table"] is module.table


def test_a_view_of_a_parameter_in_an_attribute_is_refused() -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    module[0].held = [module[0].weight[0].detach()]
    with pytest.raises(ValueError, match=r"attribute '0.held\[0\]' \(of a list\) .* parameter '0.weight'"):
        from_module(module)
    assert not module[0].weight.is_meta


class WithSparseBuffer(nn.Module):
    """Mixes the features by a constant sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        self.register_buffer("mix", torch.eye(6).roll(1, 0).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net((self.mix @ x.T).T)


def _sparse_buffer(fields: dict) -> float:
    torch.manual_seed(0)
    model = WithSparseBuffer()
    alone = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    plan = ts.Plan(**fields)
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = ts.parallelize(model, plan, optimizer=sgd, loss_fn=F.mse_loss, sample_inputs=(x,))
    index, n = engine.mesh.dp_rank, engine.mesh.dp_size
    optimizer, gap = sgd(alone.parameters()), 0.0
    for _ in range(3):
        loss = F.mse_loss(alone(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gap = max(gap, abs(engine.step(x.chunk(n)[index], y.chunk(n)[index]).item() - loss.item()))
    return gap


@pytest.mark.parametrize("fields", [dict(zero=1), dict(zero=3), dict(tp=2), dict(pp=2, micro_batches=2)], ids=str)
def test_a_sparse_buffer_that_is_in_no_state_dict_stays_as_it_is(ranks, fields):
    assert max(ranks(2, _sparse_buffer, fields)) < 2e-6
