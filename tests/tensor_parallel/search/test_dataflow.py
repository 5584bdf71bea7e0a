"""Which layers of a block could be split together: sources through parameters, writes in place, and shapes."""

import torch
from torch import nn

from tensorshard.tensor_parallel.search.dataflow import Dataflow, follow
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.verify.block_calls import as_call

WIDTH, INNER = 8, 16


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, WIDTH)


def flow_of(block: nn.Module) -> Dataflow:
    return follow(block, as_call(torch.zeros(2, 3, WIDTH)), set())


class Scaled(Mlp):
    """Applies its parameters as Gemma's norms do: one is added to a weight first."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.zeros(WIDTH))
        self.between = nn.Parameter(torch.zeros(4))
        self.after = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x * (1 + self.before))
        hidden = (hidden.unflatten(-1, (-1, 4)) * (1 + self.between.float())).flatten(-2)
        return self.out(torch.relu(self.down(torch.relu(hidden)) * (1 + self.after)))


def test_parameters_are_followed_until_they_are_applied():
    (region,) = flow_of(Scaled()).regions
    assert (region.columns, region.rows, region.between) == (("up",), ("down",), ("between",))
    found = find_tensor_plan(nn.Sequential(Scaled(), Scaled()), 2, inputs=torch.zeros(2, 3, WIDTH))
    assert found.plan.to_dict()["*.between"] == "replicate(sum_grad)"
    assert {"*.up", "*.down"} <= set(found.plan.to_dict())


class WritesInPlace(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(*x.shape[:-1], INNER)
        torch._foreach_add_([hidden], [self.up(x)])
        return self.down(hidden)


def test_what_is_written_in_place_is_followed():
    (region,) = flow_of(WritesInPlace()).regions
    assert (region.columns, region.rows) == (("up",), ("down",))


class LooksAtShapes(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        ones = torch.ones_like(hidden[..., :WIDTH])
        return self.down(torch.relu(hidden)) + self.out(x * ones)


def test_the_shape_of_a_split_output_makes_no_row_of_a_layer():
    (region,) = flow_of(LooksAtShapes()).regions
    assert (region.columns, region.rows) == (("up",), ("down",))


class Biased(Mlp):
    def forward(self, x: torch.Tensor, bias: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) + bias.sum() + mixed.sum())


class TakesBiases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mix = Biased(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return self.inner(x.exp(), bias[:, 1:], self.mix(x))


def test_inputs_are_followed_until_a_layer():
    flow = follow(TakesBiases(), as_call((torch.zeros(2, 3, WIDTH), torch.zeros(2, 3))), set())
    (region,) = flow.regions
    assert region.inputs == (1,)
    assert region.columns == ("inner.up", "mix") and region.rows == ("inner.down",)
    found = {key: sorted(argument.origins) for key, argument in flow.arguments["inner"].items()}
    assert found == {"x": [0], "bias": [1], "mixed": []}


class Adapted(nn.Module):
    """A linear layer with two low-rank pairs of which one is in use, as peft names them."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.base_layer = inner
        sizes = inner.in_features, inner.out_features
        self.lora_A = nn.ModuleDict({key: nn.Linear(sizes[0], 2, bias=False) for key in ("default", "unused")})
        self.lora_B = nn.ModuleDict({key: nn.Linear(2, sizes[1], bias=False) for key in ("default", "unused")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class AdaptedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Adapted(nn.Linear(WIDTH, INNER)), Adapted(nn.Linear(INNER, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def test_a_low_rank_pair_is_split_with_its_layer_and_never_by_its_rank():
    model = nn.Sequential(AdaptedMlp(), AdaptedMlp())
    found = find_tensor_plan(model, 2, inputs=torch.zeros(2, 4, WIDTH))
    assert found.plan.to_dict() == {
        "*.up.base_layer": "colwise",
        "*.up.lora_B.default": "colwise",
        "*.up.lora_B.unused": "colwise",
        "*.down.base_layer": "rowwise",
        "*.down.lora_A.default": "rowwise",
        "*.down.lora_A.unused": "rowwise",
    }
    reason = "half of a low-rank pair beside down.base_layer, of which the other half is split"
    assert found.whole["*.down.lora_B.default"] == reason
