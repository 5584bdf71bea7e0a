from typing import Protocol
import torch
from torch import nn


class TensorSource(Protocol):
    module: nn.Module
    def tensor(self, name: str) -> torch.Tensor: ...


class Held:
    def __init__(self, module):
        self._v = {n: t.detach() for n, t in [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]}
        self.module = module.to("meta") if False else _meta(module)
    def tensor(self, name):
        return self._v[name]

def _meta(m):
    import copy
    memo = {}
    for t in [*m.parameters(), *m.buffers()]:
        x = torch.empty_like(t, device="meta")
        if isinstance(t, nn.Parameter): x = nn.Parameter(x, requires_grad=t.requires_grad)
        memo[id(t)] = x
    return copy.deepcopy(m, memo)


def tensor_source(model, seed):
    if not isinstance(model, nn.Module):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed); model = model()
    return Held(model)
