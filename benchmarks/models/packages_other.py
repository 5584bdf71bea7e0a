"""Cases of other people's packages: tables, densities, differential equations, policies."""

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.models.batches import CLASSES, images, number_loss, numbers, several
from benchmarks.models.case import Case
from benchmarks.models.packages import case, own_loss

_TABLE = several({"numbers": (6,)}, indices={"kinds": ((3,), 5)}, targets="classes", positional=True)


def _kinds_first(samples: int, generator: torch.Generator) -> Any:
    (values, kinds), targets = _TABLE(samples, generator)
    return (kinds, values), targets


def _revisited(module: Any) -> nn.Module:
    return module.FTTransformer(
        n_cont_features=6, cat_cardinalities=[5, 5, 5], d_out=CLASSES, n_blocks=2, d_block=32, attention_n_heads=4,
        attention_dropout=0.0, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip


class Periodic(nn.Module):
    """Embeddings of numbers under a network."""

    def __init__(self, package: Any) -> None:
        super().__init__()
        self.embed = package.PeriodicEmbeddings(8, 8, n_frequencies=6, frequency_init_scale=0.1, lite=False)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.embed(x))


def _ensemble(module: Any) -> nn.Module:
    return Averaged(
        module.TabM(
            n_num_features=8, d_out=CLASSES, n_blocks=2, d_block=32, dropout=0.0, k=4, start_scaling_init="normal"
        )
    )


class Averaged(nn.Module):
    """The mean over a part's members."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x).mean(1)


def _tabnet(module: Any) -> nn.Module:
    return Sparse(
        module.TabNet(8, CLASSES, n_d=8, n_a=8, n_steps=2, virtual_batch_size=8, group_attention_matrix=torch.eye(8))
    )


class Sparse(nn.Module):
    """Logits and, with a small weight, the loss of sparsity that goes with them."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits, sparsity = self.part(x)
        return logits + 1e-3 * sparsity


def _recommender(name: str, kind: str, **settings: Any) -> Case:
    """A model of deepctr: columns of numbers and of kinds, whose constructor seeds torch."""

    def build(models: Any) -> nn.Module:
        from deepctr_torch.inputs import DenseFeat, SparseFeat

        columns = [SparseFeat(f"kind{n}", 5, embedding_dim=4) for n in range(3)]
        columns += [DenseFeat(f"number{n}", 1) for n in range(3)]
        return getattr(models, kind)(columns, columns, device="cpu", init_std=0.1, **settings)

    return case(name, "deepctr_torch.models", build, _columns, _probability_loss, package="deepctr-torch")


def _columns(samples: int, generator: torch.Generator) -> Any:
    kinds = torch.randint(0, 5, (samples, 3), generator=generator).float()
    values = torch.randn(samples, 3, generator=generator)
    return torch.cat([kinds, values], 1), torch.randint(0, 2, (samples, 1), generator=generator).float()


def _probability_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy(output, targets.to(output.dtype))


class Flow(nn.Module):
    """The negative log-likelihood of every sample under a flow whose forward gives a distribution."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.flow().log_prob(x)


class Density(nn.Module):
    """The same for flows with a method of their own for it."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.flow.log_prob(x)


def _normflows(module: Any) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(2):
        layers += [
            module.flows.AffineCouplingBlock(module.nets.MLP([3, 16, 16, 6], init_zeros=False)),
            module.flows.Permute(6, mode="swap"),
        ]
    return Density(module.NormalizingFlow(module.distributions.base.DiagGaussian(6), layers))


class Invertible(nn.Module):
    def __init__(self, package: Any) -> None:
        super().__init__()
        self.net = package.framework.SequenceINN(6)
        for _ in range(2):
            self.net.append(package.modules.AllInOneBlock, subnet_constructor=_subnet, permute_soft=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z, log_determinant = self.net(x)
        return 0.5 * z.square().sum(1) - log_determinant


def _subnet(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * (1 + t)


class Solved(nn.Module):
    """A field integrated by fixed steps; with the adjoint method the backward solves another equation."""

    def __init__(self, package: Any, solver: str) -> None:
        super().__init__()
        self.field, self.head, self.solve = Field(), nn.Linear(8, CLASSES), getattr(package, solver)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = torch.tensor([0.0, 1.0], dtype=x.dtype, device=x.device)
        return self.head(self.solve(self.field, x, times, method="rk4", options={"step_size": 0.25})[-1])


class Controlled(nn.Module):
    """A differential equation that a path drives."""

    def __init__(self, package: Any) -> None:
        super().__init__()
        self.package = package
        self.start, self.field, self.head = nn.Linear(3, 8), PathField(), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        path = self.package.CubicSpline(self.package.hermite_cubic_coefficients_with_backward_differences(x))
        start = self.start(path.evaluate(path.interval[0]))
        solved = self.package.cdeint(
            X=path, z0=start, func=self.field, t=path.interval, adjoint=False, method="rk4", options={"step_size": 1.0}
        )
        return self.head(solved[:, -1])


class PathField(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 24)

    def forward(self, t: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return self.net(z).tanh().unflatten(-1, (8, 3))


class Forecast(nn.Module):
    """The predictions of the one length that was asked for."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.part(x)
        return next(iter(output.values())) if isinstance(output, dict) else output


def _keras_dense(keras: Any) -> nn.Module:
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((8,)), layers.Dense(32, activation="relu"), layers.LayerNormalization(), layers.Dense(CLASSES)]
    )


def _keras_images(keras: Any) -> nn.Module:
    layers = keras.layers
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    x = layers.Add()([x, layers.Conv2D(8, 3, padding="same")(x)])
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def _keras_tokens(keras: Any) -> nn.Module:
    layers = keras.layers
    inputs = keras.Input((10, 8))
    x = layers.Dense(16)(inputs)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 8)(x, x)])
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


CASES = [
    case("TabTransformer", "tab_transformer_pytorch", lambda m: m.TabTransformer(
        categories=(5, 5, 5), num_continuous=6, dim=16, depth=2, heads=2, dim_head=8, dim_out=CLASSES,
        mlp_act=nn.ReLU()), _kinds_first),
    case("FT-Transformer", "tab_transformer_pytorch", lambda m: m.FTTransformer(
        categories=(5, 5, 5), num_continuous=6, dim=16, depth=2, heads=2, dim_head=8, dim_out=CLASSES), _kinds_first),
    case("MLP", "rtdl_revisiting_models", lambda m: m.MLP(d_in=8, d_out=CLASSES, n_blocks=2, d_block=32, dropout=0.0)),
    case("ResNet", "rtdl_revisiting_models", lambda m: m.ResNet(
        d_in=8, d_out=CLASSES, n_blocks=2, d_block=32, d_hidden=48, d_hidden_multiplier=None, dropout1=0.0,
        dropout2=0.0)),
    case("FT-Transformer", "rtdl_revisiting_models", _revisited, _TABLE),
    case("periodic embeddings", "rtdl_num_embeddings", Periodic),
    case("TabM", "tabm", _ensemble),
    case("TabNet", "pytorch_tabnet.tab_network", _tabnet),
    _recommender("DeepFM", "DeepFM", dnn_hidden_units=(32, 16)),
    _recommender("xDeepFM", "xDeepFM", dnn_hidden_units=(32, 16), cin_layer_size=(8, 8)),
    _recommender("DCN", "DCN", dnn_hidden_units=(32, 16)),
    _recommender("AutoInt", "AutoInt", dnn_hidden_units=(32, 16)),
    _recommender("Wide and Deep", "WDL", dnn_hidden_units=(32, 16)),
    _recommender("NFM", "NFM", dnn_hidden_units=(32, 16)),
    case("iTransformer", "iTransformer", lambda m: Forecast(m.iTransformer(
        num_variates=4, lookback_len=12, depth=2, dim=32, pred_length=(3,), dim_head=8, heads=4, num_residual_streams=1,
        use_reversible_instance_norm=True)), numbers(12, 4), number_loss, is_sequence=True),
    case("SIREN", "siren_pytorch", lambda m: m.SirenNet(dim_in=2, dim_hidden=32, dim_out=3, num_layers=3),
         numbers(16, 2), number_loss),
    case("spline flow", "zuko.flows", lambda m: Flow(m.NSF(features=4, transforms=2, hidden_features=(16, 16))),
         numbers(4), own_loss),
    case("masked autoregressive flow", "zuko.flows", lambda m: Flow(m.MAF(
        features=4, transforms=2, hidden_features=(16, 16))), numbers(4), own_loss),
    case("masked autoregressive flow", "nflows.flows", lambda m: Density(m.MaskedAutoregressiveFlow(
        features=4, hidden_features=16, num_layers=2, num_blocks_per_layer=1)), numbers(4), own_loss),
    case("RealNVP", "nflows.flows", lambda m: Density(m.SimpleRealNVP(
        features=4, hidden_features=16, num_layers=2, num_blocks_per_layer=1)), numbers(4), own_loss),
    case("affine couplings", "normflows", _normflows, numbers(6), own_loss),
    case("soft permutations", "FrEIA", Invertible, numbers(6), own_loss, package="FrEIA"),
    case("neural ODE", "torchdiffeq", partial(Solved, solver="odeint")),
    case("neural ODE, adjoint", "torchdiffeq", partial(Solved, solver="odeint_adjoint")),
    case("neural CDE", "torchcde", Controlled, numbers(6, 3, targets="classes")),
    case("MLP", "torchrl.modules", lambda m: m.MLP(in_features=8, out_features=CLASSES, num_cells=[32, 32])),
    case("dueling network", "torchrl.modules", lambda m: m.DuelingCnnDQNet(
        CLASSES, cnn_kwargs=dict(in_features=3, num_cells=[8, 16], kernel_sizes=3, strides=2),
        mlp_kwargs=dict(in_features=144, num_cells=[32])), images(size=16)),
    case("dense layers", "keras", _keras_dense),
    case("convolutions", "keras", _keras_images, numbers(16, 16, 3, targets="classes")),
    case("attention", "keras", _keras_tokens, numbers(10, 8, targets="classes"), is_sequence=True),
    case("KAN", "kan", lambda m: m.KAN(
        width=[4, 5, CLASSES], grid=3, k=3, seed=1, auto_save=False, symbolic_enabled=False, save_act=False),
        numbers(4, targets="classes"), package="pykan"),
]  # fmt: skip
