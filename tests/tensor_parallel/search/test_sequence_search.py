"""Blocks of many forms are found to compute on parts of a sequence, each checked by its numbers."""

import torch
from torch import nn
from torch.nn import functional as F

from tensorshard.tensor_parallel.apply.local_shapes import full_sizes
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan


class ByHand(nn.Module):
    """A block that holds its layers itself, and reads the length of the sequence from what it is given.

    Its number of heads is no attribute, so that its reshapes ask for all ranks' heads, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        h = self.norm(x)
        q = (self.q(h).view(b, t, 4, 4) * turned[None, :, None]).transpose(1, 2)
        k, v = (layer(h).view(b, t, 4, 4).transpose(1, 2) for layer in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).reshape(b, t, -1))


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(11, 16), nn.ModuleList(ByHand() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        turned = torch.linspace(0.5, 1.5, x.shape[1])[:, None].expand(-1, 4)
        for layer in self.layers:
            x = layer(x, turned)
        return x


def test_a_block_that_reshapes_to_the_length_of_its_input():
    found = find_tensor_plan(Turned(), 2, inputs=torch.zeros(2, 5, dtype=torch.long), sequence_parallel=True)
    assert all(split.reshapes for split in found.sequence.values()) and len(found.sequence) == 2


class Flattened(nn.Module):
    """A block whose layers take samples and positions as one dimension, as OPT's do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.size(-1))
        return (rows + self.down(self.up(self.norm(rows)).relu())).view(x.shape)


def test_a_block_that_makes_one_dimension_of_samples_and_positions():
    model = nn.Sequential(nn.Embedding(11, 16), nn.Sequential(Flattened(), Flattened()))
    found = find_tensor_plan(model, 2, inputs=torch.zeros(3, 5, dtype=torch.long), sequence_parallel=True)
    split = found.sequence["1.0"]
    assert split.dim == 1 and split.columns == {"up": True} and split.rows == ("down",)


def test_sizes_for_all_positions():
    assert full_sizes((2, 6, 8), (2, 3, 2, 4), 3, 6, 1) == [2, 6, 2, 4]
    assert full_sizes((2, 6, 2, 4), (2, 3, -1), 3, 6, 1) == [2, 6, -1]
    assert full_sizes((2, 3, 8), (2, 3, 2, 4), 3, 6, 1) == [2, 3, 2, 4]  # a part already
    assert full_sizes((2, 6, 4, 4), (2, 3, 2, 4, 4), 3, 6, 1) == [2, 3, 2, 4, 4]  # six heads in two groups of three
