"""Silent faults of mixtures of experts."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from benchmarks.museum.collectives import copy_to_ranks, gather_parts, own_part, sum_and_scatter, total, whole
from benchmarks.museum.exhibit import Exhibit
from benchmarks.museum.language_model import VOCABULARY, WIDTH, Built, batch, build, cross_entropy, trained

EXPERTS = 4
CLIP = 0.05


class Router(nn.Linear):
    """Two experts for each token: their weights and their numbers, both ``[tokens, 2]``."""

    def __init__(self) -> None:
        super().__init__(WIDTH, EXPERTS, bias=False)

    def scores(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = self.scores(tokens).softmax(-1).topk(2)
        return weights, experts


class Experts(nn.Module):
    """Experts `first` and later, each a linear layer and ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * WIDTH**-0.5)
        self.first = 0

    def keep_own(self) -> None:
        self.weight = nn.Parameter(own_part(self.weight.detach(), 0).clone())
        self.first = dist.get_rank() * len(self.weight)

    def forward(self, tokens: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        shares = [(weights * (experts == self.first + i)).sum(-1, keepdim=True) for i in range(len(self.weight))]
        return sum(share * (tokens @ weight).relu() for share, weight in zip(shares, self.weight, strict=True))


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = Experts()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.experts(tokens, *self.router(tokens))


class ExpertParallel(MixtureOfExperts):
    """Each rank has some experts, and computes them for the tokens of all ranks."""

    def __init__(self, gather_weights: Callable[[Tensor, int], Tensor] = gather_parts) -> None:
        super().__init__()
        self.gather_weights = gather_weights

    def forward(self, tokens: Tensor) -> Tensor:
        weights, experts = self.router(tokens)
        outputs = self.experts(gather_parts(tokens, 0), self.gather_weights(weights, 0), whole(experts, 0))
        return sum_and_scatter(outputs, 0)


class SplitTokens(ExpertParallel):
    """Tokens that are the same on all ranks: each routes a part of them."""

    def forward(self, tokens: Tensor) -> Tensor:
        return _Replicated.apply(super().forward(own_part(copy_to_ranks(tokens), 0)))


class _Replicated(torch.autograd.Function):
    """All ranks' parts, joined along the first dimension, with which all go on computing the same."""

    @staticmethod
    def forward(ctx: object, part: Tensor) -> Tensor:
        return whole(part, 0)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return own_part(gradient, 0)


class ReplicatedRouter(Router):
    """A router whose weight is a DTensor, the same on all ranks, whose gradients are each rank's tokens' own."""

    placements: tuple[Partial, ...] | None = (Partial(),)

    def replicate(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), mesh))

    def scores(self, tokens: Tensor) -> Tensor:
        assert isinstance(self.weight, DTensor)
        return tokens @ self.weight.to_local(grad_placements=self.placements).T


class RouterWithoutPlacements(ReplicatedRouter):
    placements = None


class ExpertModel(nn.Module):
    """Embedding, one block of experts, norm, head."""

    def __init__(self, mixture: Callable[[], MixtureOfExperts] = MixtureOfExperts) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mixture = mixture()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.mixture(hidden.flatten(0, 1)).view_as(hidden)
        return self.head(self.norm(hidden))


def _gather_experts(_name: str, part: Tensor) -> Tensor:
    return whole(part, 0)


def _split(parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that all ranks have, and those of this rank's experts."""
    gradients = [(name, parameter.grad) for name, parameter in parameters if parameter.grad is not None]
    return [g for name, g in gradients if "experts" not in name], [g for name, g in gradients if "experts" in name]


def _reference(clip: bool = False) -> Built:
    model = build(ExpertModel)

    def loss(i: int) -> Tensor:
        tokens, labels = batch(i)
        return cross_entropy(model(tokens), labels)

    def clipped() -> None:
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)

    return trained(model, loss, after_backward=clipped)


def _expert_parallel(
    *,
    expert_scale: float = 0.5,
    mixture: Callable[[], MixtureOfExperts] = ExpertParallel,
    clip: Callable[[nn.Module], object] = lambda model: None,
) -> Built:
    """Two ranks with half of the batch each. A rank's experts see the tokens, and get the gradients, of both."""
    model = build(partial(ExpertModel, mixture))
    model.mixture.experts.keep_own()

    def loss(i: int) -> Tensor:
        tokens, labels = (own_part(tensor, 0) for tensor in batch(i))
        return cross_entropy(model(tokens), labels)

    def reduce() -> None:
        shared, local = _split(model.named_parameters())
        for gradient in shared:
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())
        for gradient in local:
            gradient.mul_(expert_scale)
        clip(model)

    return trained(model, loss, after_backward=reduce)


def _clip_by_averaged_norm(model: nn.Module) -> None:
    """The norm of what a rank has, averaged over the ranks."""
    norm = total(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])) / dist.get_world_size()
    nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)


def _clip_by_norm_of_all(model: nn.Module) -> None:
    shared, local = _split(model.named_parameters())
    norm = (nn.utils.get_total_norm(shared) ** 2 + total(nn.utils.get_total_norm(local) ** 2)).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)


def _replicated_router(router: type[ReplicatedRouter]) -> Built:
    """Two tensor-parallel ranks with the same batch, whose experts are split and whose router is not."""
    model = build(partial(ExpertModel, SplitTokens))
    weight = model.mixture.router.weight
    model.mixture.router = router().double()
    model.mixture.router.weight = weight
    model.mixture.router.replicate()
    model.mixture.experts.keep_own()

    def loss(i: int) -> Tensor:
        tokens, labels = batch(i)
        return cross_entropy(model(tokens), labels)

    return trained(model, loss)


EXHIBITS = [
    Exhibit(
        name="expert gradients that are too large by the expert-parallel degree",
        report="NVIDIA/Megatron-LM#5956",
        said="An expert gets tokens of all expert-parallel ranks, so that its gradient is already a sum over them. It"
        " was averaged over the expert's few replicas, not over all ranks.",
        reference=_reference,
        parallel=partial(_expert_parallel, expert_scale=1.0),
        correct=_expert_parallel,
        kinds=frozenset({"scaled"}),
        module="mixture.experts",
        gather=_gather_experts,
    ),
    Exhibit(
        name="a router cut off by a gather without gradient",
        report="NVIDIA-NeMo/Automodel#2995",
        said="Routing weights were gathered over the expert-parallel ranks by a collective that autograd does not know:"
        " the router got no gradient of the loss.",
        reference=_reference,
        parallel=partial(_expert_parallel, mixture=partial(ExpertParallel, whole)),
        correct=_expert_parallel,
        kinds=frozenset({"gradient"}),
        module="mixture.router",
        gather=_gather_experts,
    ),
    Exhibit(
        name="a norm averaged over ranks with other experts",
        report="deepspeedai/DeepSpeed#8475",
        said="The norm for clipping was the mean of the ranks' norms, each of which had other experts in it, in place"
        " of the root of the sum of squares of each expert once.",
        reference=partial(_reference, clip=True),
        parallel=partial(_expert_parallel, clip=_clip_by_averaged_norm),
        correct=partial(_expert_parallel, clip=_clip_by_norm_of_all),
        kinds=frozenset({"norm"}),
        gather=_gather_experts,
    ),
    Exhibit(
        name="a replicated router whose gradients are partial sums",
        report="pytorch/torchtitan#2416",
        said="A router's DTensor weight was used by its local tensor without saying that the gradient is a partial sum,"
        " while each tensor-parallel rank routed its own tokens. The ranks' routers grew apart.",
        reference=_reference,
        parallel=partial(_replicated_router, RouterWithoutPlacements),
        correct=partial(_replicated_router, ReplicatedRouter),
        kinds=frozenset({"not reduced"}),
        module="mixture.router",
        gather=_gather_experts,
    ),
]
