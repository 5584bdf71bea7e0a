"""Cases of other people's packages: medical images, graphs, sound and spikes."""

from typing import Any

import torch
from torch import nn

from benchmarks.models.batches import CLASSES, images, number_loss, numbers, several
from benchmarks.models.case import Case
from benchmarks.models.packages import First, Through, case

_FLAT = dict(spatial_dims=2, in_channels=1, out_channels=3)


def _monai(name: str, kind: str, *, size: int = 32, **settings: Any) -> Case:
    def build(nets: Any) -> nn.Module:
        return getattr(nets, kind)(**settings)

    return case(name, "monai.networks.nets", build, images(size=size, channels=1, targets="number"), deep_loss)


def deep_loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Of the last map, if a network gives those of several depths."""
    return number_loss(output[-1] if isinstance(output, list | tuple) else output, targets)


def _edges(nodes: int) -> torch.Tensor:
    """A ring, in both directions."""
    starts = torch.arange(nodes)
    ends = (starts + 1) % nodes
    return torch.stack([torch.cat([starts, ends]), torch.cat([ends, starts])])


class GraphNet(nn.Module):
    """Two of a package's convolutions over one graph, whose edges are a buffer, and a classifier of its mean."""

    def __init__(self, first: nn.Module, second: nn.Module, nodes: int = 6) -> None:
        super().__init__()
        self.first, self.second, self.head = first, second, nn.Linear(32, CLASSES)
        self.register_buffer("edges", _edges(nodes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x, self.edges).relu()
        return self.head(self.second(x, self.edges).relu().mean(1))


def _graph(name: str, kind: str, **settings: Any) -> Case:
    def build(module: Any) -> nn.Module:
        layer = getattr(module, kind)
        return GraphNet(layer(8, 32, **settings), layer(32, 32, **settings))

    return case(name, "torch_geometric.nn", build, numbers(6, 8, targets="classes"), package="torch-geometric")


def _gin(module: Any) -> nn.Module:
    def layer(inputs: int) -> nn.Module:
        return module.GINConv(nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 32)), train_eps=True)

    return GraphNet(layer(8), layer(32))


class Dense(nn.Module):
    """A graph given as a matrix."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.first, self.second = module.DenseSAGEConv(8, 32), module.DenseGCNConv(32, 32)
        self.pool, self.head = module.Linear(32, 3), nn.Linear(32, CLASSES)
        self.module = module.dense_diff_pool

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        adjacency = adjacency.sigmoid()
        x = self.first(x, adjacency).relu()
        x, adjacency, *_ = self.module(x, adjacency, self.pool(x))
        return self.head(self.second(x, adjacency).mean(1))


def _stack(module: Any) -> nn.Module:
    return GraphNet(
        module.GCN(8, 16, num_layers=2, out_channels=32), module.GraphSAGE(32, 16, num_layers=2, out_channels=32)
    )


def _egnn(module: Any) -> nn.Module:
    return Equivariant(module.EGNN_Network(num_tokens=8, num_positions=6, dim=16, depth=2, num_nearest_neighbors=3))


class Equivariant(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(16, CLASSES)

    def forward(self, kinds: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(kinds, places)[0].mean(1))


def _molecules(samples: int, generator: torch.Generator) -> Any:
    kinds = torch.randint(0, 8, (samples, 6), generator=generator)
    places = torch.randn(samples, 6, 3, generator=generator)
    return (kinds, places), torch.randint(0, CLASSES, (samples,), generator=generator)


class Points(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 16), nn.Linear(16, CLASSES)
        self.part = module.PointTransformerLayer(dim=16, pos_mlp_hidden_dim=16, attn_mlp_hidden_mult=2)

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(self.embed(places), places).mean(1))


class Irreps(nn.Module):
    """Tensor products of vectors and scalars, whose code the package generates."""

    def __init__(self, o3: Any) -> None:
        super().__init__()
        self.mix = o3.FullyConnectedTensorProduct("4x0e + 4x1o", "4x0e + 4x1o", "8x0e + 4x1o")
        self.last = o3.Linear("8x0e + 4x1o", f"{CLASSES}x0e")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.mix(x, x))


def _snac(module: Any) -> nn.Module:
    return module.SNAC(
        sampling_rate=1000, encoder_dim=8, encoder_rates=[2, 2], latent_dim=None, decoder_dim=16, decoder_rates=[2, 2],
        attn_window_size=None, codebook_size=16, codebook_dim=4, vq_strides=[2, 1], noise=False,
    )  # fmt: skip


def _conformer(module: Any) -> nn.Module:
    part = module.Conformer(dim=32, depth=2, dim_head=8, heads=4, conv_kernel_size=5)
    return Through(nn.Linear(8, 32), part, nn.Linear(32, CLASSES), pool=(1,))


def _filters(module: Any) -> nn.Module:
    encoder = module.Encoder(module.FreeFB(n_filters=16, kernel_size=8, stride=4))
    return Through(encoder, nn.Sequential(nn.ReLU(), nn.Conv1d(16, 16, 3)), nn.Linear(16, CLASSES), pool=(2,))


class Spikes(nn.Module):
    """Leaky neurons over five steps. Their membrane starts anew in every forward."""

    def __init__(self, package: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, CLASSES)
        self.hidden, self.last = package.Leaky(beta=0.9, learn_beta=True), package.Leaky(beta=0.8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, last = self.hidden.init_leaky(), self.last.init_leaky()
        potentials = []
        for _ in range(5):
            spikes, hidden = self.hidden(self.first(x), hidden)
            _, last = self.last(self.second(spikes), last)
            potentials.append(last)
        return torch.stack(potentials).sum(0)


class Membranes(nn.Module):
    """Neurons with a state of their own, reset in every forward."""

    def __init__(self, neuron: Any) -> None:
        super().__init__()
        from spikingjelly.activation_based import functional

        self.net = nn.Sequential(nn.Linear(8, 32), neuron.LIFNode(tau=2.0, detach_reset=True), nn.Linear(32, CLASSES))
        self.reset = functional.reset_net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.reset(self.net)
        return torch.stack([self.net(x) for _ in range(4)]).mean(0)


_HIGH_RES = (
    {"name": "conv_0", "n_features": 8, "kernel_size": 3},
    {"name": "res_1", "n_features": 8, "kernels": (3, 3), "repeat": 2},
    {"name": "res_2", "n_features": 16, "kernels": (3, 3), "repeat": 2},
    {"name": "conv_1", "n_features": 16, "kernel_size": 1},
    {"name": "conv_2", "kernel_size": 1},
)

CASES = [
    _monai("U-Net", "UNet", **_FLAT, channels=(8, 16, 24), strides=(2, 2), num_res_units=1),
    _monai("BasicUNet", "BasicUNet", **_FLAT, features=(8, 8, 16, 16, 16, 8)),
    _monai("attention U-Net", "AttentionUnet", **_FLAT, channels=(8, 16, 24), strides=(2, 2)),
    _monai("DynUNet", "DynUNet", **_FLAT, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2],
           filters=[8, 16, 24]),
    _monai("SegResNet", "SegResNet", **_FLAT, init_filters=8, blocks_down=(1, 1), blocks_up=(1,)),
    _monai("UNETR", "UNETR", **_FLAT, img_size=(32, 32), feature_size=8, hidden_size=16, mlp_dim=32, num_heads=2),
    _monai("Swin UNETR", "SwinUNETR", **_FLAT, feature_size=12, depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2),
        window_size=4, size=64),
    _monai("HighResNet", "HighResNet", **_FLAT, layer_params=_HIGH_RES),
    _monai("DenseNet", "DenseNet", **_FLAT, init_features=8, growth_rate=8, block_config=(1, 1)),
    case("ViT", "monai.networks.nets", lambda m: First(m.ViT(
        in_channels=1, img_size=(32, 32), patch_size=(8, 8), hidden_size=32, mlp_dim=64, num_layers=2, num_heads=4,
        spatial_dims=2, classification=True, num_classes=CLASSES, post_activation="")), images(channels=1),
        is_sequence=True),
    _monai("autoencoder", "AutoEncoder", **_FLAT, channels=(8, 16), strides=(2, 2)),
    _monai("MedNeXt", "MedNeXt", **_FLAT, init_filters=8, blocks_down=(1, 1), blocks_bottleneck=1, blocks_up=(1, 1),
           encoder_expansion_ratio=2, decoder_expansion_ratio=2, bottleneck_expansion_ratio=2),
    case("diffusion U-Net", "monai.networks.nets", lambda m: m.DiffusionModelUNet(
        **_FLAT, channels=(8, 16), num_res_blocks=1, attention_levels=(False, True), norm_num_groups=4,
        num_head_channels=8), several({"x": (1, 16, 16)}, indices={"timesteps": ((), 1000)}), number_loss),
    _graph("GCN", "GCNConv", add_self_loops=True),
    _graph("GraphSAGE", "SAGEConv"),
    _graph("TAG", "TAGConv", K=2),
    _graph("Chebyshev", "ChebConv", K=2),
    case("GIN", "torch_geometric.nn", _gin, numbers(6, 8, targets="classes"), package="torch-geometric"),
    case("GCN and GraphSAGE of its models", "torch_geometric.nn", _stack, numbers(6, 8, targets="classes"),
         package="torch-geometric"),
    case("dense, pooled", "torch_geometric.nn", Dense, several(
        {"x": (6, 8), "adjacency": (6, 6)}, targets="classes"), package="torch-geometric"),
    case("EGNN", "egnn_pytorch", _egnn, _molecules),
    case("point transformer", "point_transformer_pytorch", Points, numbers(6, 3, targets="classes")),
    case("tensor products", "e3nn.o3", Irreps, numbers(16, targets="classes")),
    case("SNAC", "snac", _snac, numbers(1, 64), number_loss),
    case("Conformer", "conformer", _conformer, numbers(10, 8, targets="classes"), is_sequence=True),
    case("learned filters", "asteroid_filterbanks", _filters, numbers(1, 64, targets="classes")),
    case("leaky neurons", "snntorch", Spikes),
    case("LIF neurons", "spikingjelly.activation_based.neuron", Membranes),
]  # fmt: skip
