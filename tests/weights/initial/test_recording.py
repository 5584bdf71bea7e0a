"""Recording a constructor: each kind of initialisation, replayed exactly."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tensorshard.weights.initial import Recording, TensorSource, record

SEED = 7


class Built(nn.Module):
    """A module that `fill` sets up, in place of a constructor of its own."""

    def __init__(self, fill: Callable[[Any], None]) -> None:
        super().__init__()
        fill(self)


def recorded(fill: Callable[[Any], None], *, seed: int = SEED) -> Recording:
    source = record(lambda: Built(fill), seed=seed)
    assert isinstance(source, Recording), "the constructor was built whole"
    return source


def drawn(draw: Callable[[], Any]) -> Any:
    """What `draw` returns right after torch was seeded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return draw()


def all_values(source: TensorSource) -> dict[str, torch.Tensor]:
    return {name: source.tensor(name) for name in source.names()}


class OperationNames(TorchDispatchMode):
    """The names of the operations that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_module_is_on_the_meta_device_and_otherwise_as_built() -> None:
    def fill(self: Any) -> None:
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)
        self.head.bias.no_decay = True
        self.scale = nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16).t())
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)

    model, built = recorded(fill).module, Built(fill)
    expected = [*built.named_parameters(remove_duplicate=False), *built.named_buffers()]
    found = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])
    assert list(found) == [name for name, _ in expected]
    for name, tensor in expected:
        fake_copy = found[name]
        assert fake_copy.is_meta and type(fake_copy) is type(tensor)
        assert (fake_copy.shape, fake_copy.stride(), fake_copy.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert fake_copy.requires_grad == tensor.requires_grad
    assert model.head.weight is model.embedding.weight
    assert vars(model.head.bias) == {"no_decay": True}
    assert model.state_dict().keys() == built.state_dict().keys()  # so the mask is still not persistent


def test_tied_and_viewed_tensors() -> None:
    def fill(self: Any) -> None:
        packed = torch.randn(6, 4)
        self.top, self.bottom = nn.Parameter(packed[:2]), nn.Parameter(packed[2:])
        self.across = nn.Parameter(packed.t())
        self.same = self.top

    source = recorded(fill)
    values = all_values(source)
    packed = drawn(lambda: torch.randn(6, 4))
    assert torch.equal(values["top"], packed[:2]) and torch.equal(values["bottom"], packed[2:])
    assert torch.equal(values["across"], packed.t()) and values["across"].stride() == (1, 4)
    assert torch.equal(values["same"], values["top"]) and source.module.same is source.module.top
    storages = {tensor.untyped_storage()._cdata for tensor in source.module.parameters()}
    assert len(storages) == 1 and source.module.bottom.storage_offset() == 8


def test_random_initialisation_is_that_of_the_operations() -> None:
    def fill(self: Any) -> None:
        self.scaled = nn.Parameter(torch.randn(5, 3) * 0.02)
        self.linear = nn.Linear(3, 5)  # two draws
        self.truncated = nn.Parameter(torch.empty(50, 20))
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-0.5, b=0.5)
        self.data = nn.Parameter(torch.empty(4, 4))
        self.data.data.normal_(1.0, 0.1)
        self.register_buffer("order", torch.randperm(20))
        self.dropped = nn.Parameter(F.dropout(torch.ones(100), 0.5))

    values, built = all_values(recorded(fill)), drawn(lambda: Built(fill))
    expected = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], value) for name, value in expected.items())
    assert values["truncated"].abs().max() <= 0.5


def test_custom_initialisation_is_honoured() -> None:
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 2.0)
            nn.init.zeros_(module.bias)

    def fill(self: Any) -> None:
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        self.apply(initialise)
        with torch.no_grad():
            self.layers[2].weight.mul_(3).add_(torch.arange(3))
            self.layers[2].bias.copy_(torch.tensor([1.0, 2.0]))
            self.layers[0].weight[1, 1:] = 5
            self.layers[0].weight[self.layers[0].weight > 4] = 9
        self.orthogonal = nn.Parameter(torch.empty(8, 4))
        nn.init.orthogonal_(self.orthogonal)

    values = all_values(recorded(fill))
    assert values["layers.0.weight"].tolist() == [[2, 2, 2], [2, 9, 9], [2, 2, 2]]
    assert values["layers.2.weight"].tolist() == [[6, 7, 8], [6, 7, 8]]
    assert values["layers.2.bias"].tolist() == [1, 2]
    assert values["layers.1.running_var"].tolist() == [1, 1, 1]
    assert values["layers.1.num_batches_tracked"].dtype == torch.int64
    torch.testing.assert_close(values["orthogonal"].t() @ values["orthogonal"], torch.eye(4))


def test_buffers_are_exact() -> None:
    def fill(self: Any) -> None:
        self.register_buffer("mask", torch.tril(torch.ones(5, 5, dtype=torch.bool)).view(1, 5, 5))
        angles = torch.outer(torch.arange(6), 10000 ** -(torch.arange(0, 4, 2).float() / 4))
        self.register_buffer("cosines", torch.cat([angles, angles], dim=-1).cos())
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles))
        table = torch.zeros(6, 4)
        table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
        self.register_buffer("table", table)
        self.register_buffer("grid", torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")))
        self.register_buffer("steps", torch.linspace(0, 1, 7))
        self.register_buffer("number", torch.tensor(3.0))

    built = dict(Built(fill).named_buffers())
    for name, value in all_values(recorded(fill)).items():
        assert torch.equal(value, built[name]) and value.dtype == built[name].dtype, name


def test_values_from_outside_are_kept_as_they_were() -> None:
    scratch = np.arange(6.0).reshape(2, 3)
    outside = torch.full((3,), 4.0)

    def fill(self: Any) -> None:
        self.register_buffer("first", torch.from_numpy(scratch))
        self.weight = nn.Parameter(torch.empty(2, 3))
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(scratch.T.copy()).t())
        scratch[:] = -1  # one array, used again for the next layer
        self.second = nn.Parameter(torch.as_tensor(scratch).float() * 2)
        self.legacy = nn.Parameter(torch.FloatTensor([[1, 2]]))
        self.outside = nn.Parameter(outside)
        with torch.no_grad():
            self.outside[1:].mul_(2)

    values = all_values(recorded(fill))
    expected = np.arange(6.0).reshape(2, 3).tolist()
    assert values["first"].tolist() == expected and values["first"].dtype == torch.float64
    assert values["weight"].tolist() == expected
    assert values["second"].tolist() == [[-2] * 3] * 2
    assert values["legacy"].tolist() == [[1, 2]]
    assert values["outside"].tolist() == [4, 8, 8]
    assert outside.tolist() == [4, 4, 4]  # a fake constructor changes nothing


def test_real_modules_in_the_constructor_keep_their_weights() -> None:
    backbone = nn.Linear(3, 3)
    weight = backbone.weight.detach().clone()

    def fill(self: Any) -> None:
        self.backbone = backbone
        self.copy = copy.deepcopy(backbone)
        self.loaded = nn.Linear(3, 3)
        self.loaded.load_state_dict(backbone.state_dict())

    source = recorded(fill)
    for name in ("backbone.weight", "copy.weight", "loaded.weight"):
        assert torch.equal(source.tensor(name), weight), name


@pytest.mark.parametrize(
    "convert",
    [
        lambda it: it.half(),
        lambda it: it.to(torch.bfloat16),
        lambda it: it.to(torch.bfloat16).to(torch.float64),
        lambda it: it.to(memory_format=torch.channels_last),
    ],
    ids=["half", "bfloat16", "twice", "channels_last"],
)
def test_converted_at_the_end(convert: Callable[[Any], Any]) -> None:
    def fill(self: Any) -> None:
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.tied = nn.ParameterList([self.conv.weight])
        convert(self)

    source = recorded(fill)
    expected = convert(drawn(lambda: torch.empty(4, 2, 3, 3).uniform_(-(18**-0.5), 18**-0.5)))
    value = source.tensor("conv.weight")
    assert value.dtype == expected.dtype and value.stride() == expected.stride()
    assert torch.equal(value, expected)
    assert source.tensor("norm.num_batches_tracked").dtype == torch.int64
    assert source.module.tied[0] is source.module.conv.weight


def test_default_dtype_of_the_moment_counts() -> None:
    def fill(self: Any) -> None:
        torch.set_default_dtype(torch.float64)
        self.register_buffer("halves", torch.arange(3) / 2)
        torch.set_default_dtype(torch.float32)
        self.register_buffer("thirds", torch.arange(3) / 3)

    source = recorded(fill)
    torch.testing.assert_close(source.tensor("halves"), torch.tensor([0, 0.5, 1], dtype=torch.float64))
    assert source.tensor("thirds").dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    "wrap",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.spectral_norm,
    ],
)
def test_parametrised_weights(wrap: Callable[[nn.Module], nn.Module]) -> None:
    source = record(lambda: wrap(nn.Linear(6, 4)), seed=SEED)
    assert isinstance(source, Recording)
    weight = drawn(lambda: torch.empty(4, 6).uniform_(-(6**-0.5), 6**-0.5))
    values = all_values(source)
    original = [name for name, value in values.items() if value.shape == weight.shape]
    assert len(original) == 1 and torch.equal(values[original[0]], weight)
    if wrap is nn.utils.parametrizations.weight_norm:
        magnitudes = values["parametrizations.weight.original0"]
        torch.testing.assert_close(magnitudes, weight.norm(dim=1, keepdim=True))
    else:  # the vectors of a power iteration
        assert sum(value.ndim == 1 and value.norm().sub(1).abs() < 1e-5 for value in values.values()) == 2


def test_copied_layers() -> None:
    layer = nn.TransformerEncoderLayer
    source = record(lambda: nn.TransformerEncoder(layer(8, 2, 16), 2, enable_nested_tensor=False), seed=SEED)
    assert isinstance(source, Recording)
    values = all_values(source)
    for name, value in values.items():
        if name.startswith("layers.0."):
            assert torch.equal(value, values[name.replace("layers.0.", "layers.1.")])
    assert isinstance(source.module.layers[1].linear1.weight, nn.Parameter)


def test_plain_attributes_are_real() -> None:
    def fill(self: Any) -> None:
        self.linear = nn.Linear(2, 2)
        self.table = torch.arange(3) * 2
        self.nested = {"scales": [torch.ones(2), 1], "same": self.table}
        self.weights = [self.linear.weight]
        self.lstm = nn.LSTM(2, 2)

    model = recorded(fill).module
    assert model.table.tolist() == [0, 2, 4] and not isinstance(model.table, FakeTensor)
    assert model.nested["scales"][0].tolist() == [1, 1] and model.nested["scales"][1] == 1
    assert model.nested["same"] is model.table
    assert model.weights[0] is model.linear.weight
    assert model.lstm._flat_weights[0] is model.lstm.weight_ih_l0


def test_overwritten_initialisation_does_not_run() -> None:
    def fill(self: Any) -> None:
        self.linear = nn.Linear(3, 3)
        nn.init.normal_(self.linear.weight)
        with torch.no_grad():
            self.linear.bias[1:] = 0  # not the whole: what was there before counts

    source = recorded(fill)
    with OperationNames() as operations:
        value = source.tensor("linear.weight")
    # The two draws of the constructor are made, for those that follow, and that is all.
    assert operations.seen.count("uniform_") == 2 and "normal_" in operations.seen and "zero_" not in operations.seen
    built = drawn(lambda: Built(fill))
    assert torch.equal(value, built.linear.weight)
    bias = source.tensor("linear.bias")
    assert bias[1:].tolist() == [0, 0] and torch.equal(bias, built.linear.bias)


def test_a_copy_of_what_was_overwritten_later() -> None:
    def fill(self: Any) -> None:
        self.first = nn.Parameter(torch.randn(4))
        self.second = nn.Parameter(self.first.detach().clone())
        nn.init.zeros_(self.first)
        self.third = nn.Parameter(self.first.detach() + self.second.detach())
        with torch.no_grad():
            self.first.copy_(self.second.flip(0))
            self.first.copy_(self.first.flip(0))  # reads what it overwrites

    values = all_values(recorded(fill))
    first = drawn(lambda: torch.randn(4))
    for name in ("first", "second", "third"):
        assert torch.equal(values[name], first), name


def test_uninitialised_memory_is_zero() -> None:
    def fill(self: Any) -> None:
        self.bare = nn.Parameter(torch.empty(3))
        self.partly = nn.Parameter(torch.empty(4))
        with torch.no_grad():
            self.partly[::2] = 1
        self.none = nn.Parameter(torch.randn(0, 3))

    source = recorded(fill)
    assert source.tensor("none").shape == (0, 3)
    assert source.tensor("bare").tolist() == [0, 0, 0]
    assert source.tensor("partly").tolist() == [1, 0, 1, 0]


def test_independent_of_order_and_repetition() -> None:
    def fill(self: Any) -> None:
        self.linear = nn.Linear(5, 5)
        self.copy = nn.Parameter(self.linear.weight.detach() * 2)
        self.extra = nn.Parameter(torch.randn(3))

    values = all_values(recorded(fill))
    other = recorded(fill)
    for name in [*reversed(other.names()), "copy", "linear.weight"]:
        assert torch.equal(other.tensor(name), values[name]), name
    other.tensor("copy").zero_()  # the caller's own memory
    assert torch.equal(other.tensor("copy"), values["copy"])
    assert not torch.equal(recorded(fill, seed=SEED + 1).tensor("extra"), values["extra"])


@pytest.mark.parametrize("seeds", [False, True])
def test_global_random_state_is_left_alone(seeds: bool) -> None:
    def fill(self: Any) -> None:
        if seeds:
            torch.manual_seed(3)
        self.numbers = (random.random(), np.random.rand())
        self.linear = nn.Linear(2, 2)

    torch.manual_seed(11), random.seed(11), np.random.seed(11)
    source = record(lambda: Built(fill), seed=SEED)
    source.tensor("linear.weight")
    found = (torch.rand(()).item(), random.random(), np.random.rand())
    torch.manual_seed(11), random.seed(11), np.random.seed(11)
    assert found == (torch.rand(()).item(), random.random(), np.random.rand())
    assert record(lambda: Built(fill), seed=SEED).module.numbers == source.module.numbers


def _fork(seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.rand(1)


SEEDING = {
    "manual_seed": torch.manual_seed,
    "generator": torch.default_generator.manual_seed,
    "state": lambda seed: torch.set_rng_state(torch.Generator().manual_seed(seed).get_state()),
    "fork": _fork,
    "seed": lambda seed: torch.seed(),
}


@pytest.mark.parametrize("draw", [nn.init.normal_, nn.init.trunc_normal_])
@pytest.mark.parametrize("way", SEEDING)
def test_a_constructor_that_seeds_torch_gets_the_numbers_that_follow(way: str, draw: Any, caplog: Any) -> None:
    def fill(self: Any) -> None:
        SEEDING[way](3)
        self.weight = nn.Parameter(draw(torch.empty(4, 4)))

    source = record(lambda: Built(fill), seed=3)
    assert "seeds torch's random numbers itself" in caplog.text
    if way in ("manual_seed", "generator", "state"):
        assert torch.equal(source.tensor("weight"), Built(fill).weight)


def test_explicit_and_default_devices() -> None:
    def fill(self: Any) -> None:
        with torch.device("cpu"):
            self.linear = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.ones(2, device="cpu"))
        self.skipped = nn.utils.skip_init(nn.Linear, 2, 2)

    values = all_values(recorded(fill))
    assert values["weight"].tolist() == [1, 1] and values["skipped.weight"].tolist() == [[0, 0], [0, 0]]


def test_under_a_fake_mode_values_are_fake() -> None:
    def fill(self: Any) -> None:
        self.linear = nn.Linear(2, 3)
        self.table = torch.arange(3)

    with FakeTensorMode() as mode:
        source = recorded(fill)
        value = source.tensor("linear.weight")
        assert isinstance(value, FakeTensor) and value.fake_mode is mode and value.shape == (3, 2)
        assert not isinstance(source.module.linear.weight, FakeTensor)
        assert isinstance(source.module.table, FakeTensor) and source.module.table.fake_mode is mode
    assert source.tensor("linear.weight").abs().max() > 0


def test_unknown_name() -> None:
    source = record(lambda: nn.Linear(2, 2), seed=SEED)
    with pytest.raises(KeyError, match=r"no parameter or buffer is called 'wieght'; .* weight, bias"):
        source.tensor("wieght")


def test_a_recording_can_be_had_again_with_a_module_of_its_own():
    def fill(self: Any) -> None:
        self.layer = nn.Linear(3, 2)
        self.layer.weight.mark = "kept"
        self.tied = self.layer.weight
        self.register_buffer("table", torch.arange(3.0))

    first = recorded(fill)
    second = first.again()
    assert second is not None
    assert not set(first.module.modules()) & set(second.module.modules())
    assert second.module.tied is second.module.layer.weight is not first.module.tied
    assert second.module.layer.weight.is_meta and second.module.layer.weight.mark == "kept"
    values = all_values(first)
    first.module.layer = nn.Identity()  # laid out
    assert {name: value.tolist() for name, value in all_values(second).items()} == {
        name: value.tolist() for name, value in values.items()
    }


def test_a_recording_is_had_once_where_code_refers_to_its_modules():
    def hooked(self: Any) -> None:
        self.layer = nn.Linear(3, 2)
        self.layer.register_forward_hook(lambda *_: self.layer.weight)

    def called(self: Any) -> None:
        self.layer = nn.Linear(3, 2)
        self.weight_of = lambda: self.layer.weight

    assert recorded(hooked).again() is None
    assert recorded(called).again() is None
