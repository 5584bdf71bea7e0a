"""Small optimizers of the kinds that there are, as people bring them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn


class Own(torch.optim.Optimizer):
    """Updates each parameter that has a gradient by :meth:`update`."""

    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Muon(Own):
    """Jordan et al. 2024: momentum, and the nearest orthogonal matrix (cubic Newton-Schulz, in the gradient's type)."""

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        u = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(g)
        if p.ndim == 2:
            wide = len(u) <= u.size(1)
            u = (u if wide else u.T) / (u.norm() + 1e-7)
            for _ in range(5):
                u = 1.5 * u - 0.5 * (u @ u.T) @ u
            u = u if wide else u.T
        p.mul_(1 - 0.1 * group["lr"]).sub_(u * group["lr"])


class UncheckedMuon(Muon):
    """As some write it: every parameter has to have a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.update(p, p.grad.clone(), self.state[p], self.param_groups[0])


class Lamb(Own):
    """You et al. 2020: Adam, with a rate by the norms of each tensor."""

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        u = _adam(p, g, state)
        p.sub_(u * (group["lr"] * p.norm() / (u.norm() + 1e-6)))


class Lars(Own):
    """You et al. 2017."""

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        rate = p.norm() / (g.norm() + 0.1 * p.norm() + 1e-6)
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        p.sub_(momentum.mul_(0.9).add_((g + 0.1 * p) * rate * group["lr"]))


class Shampoo(Own):
    """Gupta et al. 2018: sums of gradients by rows and columns, to the power of -1/4. Vectors by themselves."""

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.ndim < 2:
            p.sub_(g, alpha=group["lr"])
            return
        flat = g.reshape(len(g), -1)
        left = state.setdefault("left", torch.eye(len(flat), dtype=p.dtype, device=p.device)).add_(flat @ flat.T)
        size = flat.size(1)
        right = state.setdefault("right", torch.eye(size, dtype=p.dtype, device=p.device)).add_(flat.T @ flat)
        p.sub_((_root(left) @ flat @ _root(right)).view_as(p), alpha=group["lr"])


class LateShampoo(Shampoo):
    """Gathers statistics for so long that no short trial sees them at work."""

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["steps"] = state.get("steps", 0) + 1
        if state["steps"] > 15:
            super().update(p, g, state, group)
            return
        if p.ndim == 2:
            state.setdefault("left", torch.eye(len(g), dtype=p.dtype)).add_(g @ g.T)
            state.setdefault("right", torch.eye(g.size(1), dtype=p.dtype)).add_(g.T @ g)
        p.sub_(g, alpha=group["lr"])


class Soap(Own):
    """Vyas et al. 2024, in short: Adam in the eigenbasis of the rows' statistics, which is renewed every fifth step."""

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.ndim < 2:
            p.sub_(_adam(p, g, state), alpha=group["lr"])
            return
        rows = state.setdefault("rows", torch.zeros(len(g), len(g), dtype=p.dtype, device=p.device))
        rows.lerp_(g @ g.T, 0.1)
        state["count"] = state.get("count", -1) + 1
        if state["count"] % 5 == 0:
            # Well apart, so that rounding does not turn the basis.
            apart = torch.diag(torch.linspace(0, 1, len(g), dtype=p.dtype, device=p.device))
            basis = torch.linalg.eigh(rows + apart)[1]
            state["basis"] = basis * basis.diagonal().sign()  # its signs are any, and rounding would choose them
        p.sub_(state["basis"] @ _adam(p, state["basis"].T @ g, state), alpha=group["lr"])


class ScheduleFree(Own):
    """Defazio et al. 2024: SGD at an interpolation of iterates and their average. Counts in its group."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr, k=0, train_mode=False)

    @torch.no_grad()
    def train(self) -> None:
        self._interpolate(True, 1 - 1 / 0.9)

    @torch.no_grad()
    def eval(self) -> None:
        self._interpolate(False, 1 - 1 / 0.9)

    def _interpolate(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] != training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 0.1 if training else weight)
                group["train_mode"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("call train() before step()")
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    z.sub_(self.scaled(p.grad), alpha=group["lr"])
                    p.lerp_(z, 1 / group["k"])

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class NormalizedScheduleFree(ScheduleFree):
    """The same with each gradient by its norm."""

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / (gradient.norm() + 1e-6)


class EightBits(Own):
    """Dettmers et al. 2022, in short: large tensors have a momentum of 8 bits, in blocks of 256 elements."""

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.numel() < 4096:
            momentum = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(g)
        else:
            blocks = -(-p.numel() // 256)
            codes = state.setdefault("codes", torch.zeros(blocks, 256, dtype=torch.int8, device=p.device))
            scales = state.setdefault("scales", torch.zeros(blocks, 1, dtype=p.dtype, device=p.device))
            before = (codes.to(p.dtype) * scales).view(-1)[: p.numel()].view_as(p)
            momentum = before * 0.9 + g
            padded = nn.functional.pad(momentum.reshape(-1), (0, blocks * 256 - p.numel())).view(blocks, 256)
            scales.copy_(padded.abs().amax(1, keepdim=True) / 127)
            codes.copy_((padded / scales.clamp(min=1e-30)).round())
        p.sub_(momentum, alpha=group["lr"])


class Lion(Own):
    """Chen et al. 2023, with a smooth sign: each element by itself."""

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        average = state.setdefault("average", torch.zeros_like(p))
        p.sub_(torch.tanh(average * 0.9 + g * 0.1), alpha=group["lr"])
        average.lerp_(g, 0.01)


class LionByHand(Lion):
    """The same in a way that DTensors do not know."""

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if type(p.data) is not torch.Tensor:
            raise TypeError("a kernel of its own takes plain tensors")
        super().update(p, g, state, group)


class OneRate(Own):
    """Mishchenko and Defazio 2023 (Prodigy), in short: one rate for all parameters, from all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        rate = 0.1 / sum(p.grad.abs().sum() for p in trained)
        for p in trained:
            p.sub_(p.grad * rate)


class ClippedLamb(Lamb):
    """Divides by the norm of all gradients where that is above 1."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if gradients:
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for g in gradients:
                g.div_(norm.clamp(min=1))
        super().step()


class Rounded(Own):
    """Rounds stochastically."""

    def update(self, p: nn.Parameter, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g + torch.rand_like(g) * 1e-3, alpha=group["lr"])


def muon_and_adamw(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """torch's Muon for the matrices of blocks, AdamW with two groups for the rest."""
    given = list(named_parameters)
    matrices = [(n, p) for n, p in given if p.ndim == 2 and "embed" not in n and "head" not in n]
    others = [(n, p) for n, p in given if not any(p is q for _, q in matrices)]
    groups = [
        {"params": [p for _, p in others if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for _, p in others if p.ndim != 2], "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon([p for _, p in matrices], lr=0.01),
        torch.optim.AdamW(groups, lr=1e-3, eps=1e-4),
    ]


COUPLING: dict[str, Callable[..., Any]] = {
    "muon": Muon,
    "unchecked_muon": UncheckedMuon,
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "lamb": Lamb,
    "lars": Lars,
    "shampoo": Shampoo,
    "late_shampoo": LateShampoo,
    "soap": Soap,
    "schedule_free_normalized": NormalizedScheduleFree,
    "eight_bits": partial(EightBits, lr=0.004),  # so small that a code which rounds the other way is within bounds
}
"""They couple the elements of a tensor."""

ELEMENTWISE: dict[str, Callable[..., Any]] = {"lion": Lion, "lion_by_hand": LionByHand, "schedule_free": ScheduleFree}


def _adam(p: nn.Parameter, g: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    first = state.setdefault("first", torch.zeros_like(p)).lerp_(g, 0.1)
    second = state.setdefault("second", torch.zeros_like(p)).lerp_(g.square(), 0.05)
    return first / (second.sqrt() + 1e-3)


def _root(statistics: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(statistics)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T
