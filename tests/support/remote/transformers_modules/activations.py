"""Activations as in remote code of transformers. graphs="auto" treats this code as a library's."""

import random
import warnings
from typing import Any

import torch


class Factors(torch.nn.Module):
    """An activation with state of several kinds, none of which is a parameter or a buffer."""

    def __init__(self, size, device):
        super().__init__()
        self.lists = {"default": [1.0]}
        self.tensor = torch.full((size,), 1.0, dtype=torch.bfloat16, device=device)
        self.tensors = {"default": torch.ones_like(self.tensor)}
        self.number = torch.tensor(1.0)

    def forward(self, x):
        tensor = self.tensor * self.tensors["default"]
        return torch.nn.functional.silu(x) * tensor * self.lists["default"][0] * self.number


class Configured(torch.nn.SiLU):
    """An activation that reads a dict in its config, and reads an attribute under another name."""

    def __init__(self):
        super().__init__()
        from transformers import GPT2Config

        self.config = GPT2Config(n_embd=1, factors={"default": 1.0})

    def forward(self, x):
        return super().forward(x) * self.config.factors["default"] * self.config.hidden_size


class Inheriting(torch.nn.SiLU):
    """An activation that inherits its forward."""


class Scaled(torch.nn.SiLU):
    """An activation that reads an attribute of its parameter."""

    def __init__(self, size, device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16, device=device))
        self.weight.factor = 1.5

    def forward(self, x):
        return super().forward(x) * self.weight * getattr(self.weight, "factor", 1.0)


class Reversed(torch.nn.SiLU):
    """An activation that scales the gradient in a hook."""

    factor = 1.0

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * Reversed.factor)
        return y


class Promoting(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(x.float())


class Writing(torch.nn.Module):
    """An attention that writes into a dict among its arguments."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, written, **kwargs):
        written["calls"] = written.get("calls", 0) + 1
        return self.inner(*args, **kwargs)


def never(tensor):
    return False


ROUTED: list[torch.Tensor] = []


class Router(torch.nn.Module):
    """An MLP that appends an auxiliary loss to a list outside of the layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        ROUTED.append(x.float().square().mean())
        return self.inner(x)


GRADIENTS: list[torch.Tensor] = []


class Listing(torch.autograd.Function):
    """An activation that appends to a list in its backward, as a statistic of gradients does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        GRADIENTS.append(gradient.float())
        return gradient


class Warning(torch.nn.SiLU):
    def forward(self, x):
        warnings.warn("an activation warns", stacklevel=1)
        return super().forward(x)


class Altered(torch.nn.Module):
    """An MLP that does additional work."""

    def __init__(self, inner: Any, kind: str):
        super().__init__()
        self.inner, self.kind, self.calls = inner, kind, 0

    def forward(self, x):
        if self.kind == "synchronizes":
            x = x * (1 + 0 * int(x.sum().isnan().item()))
        if self.kind == "waits":
            torch.cuda.synchronize()
        if self.kind == "random":
            x = x * (1 + random.random() / 8)
        if self.kind == "counts":
            self.calls += 1
            x = x * (1 + self.calls / 64)
        if self.kind == "keeps":
            return Keeping.apply(self.inner(x))
        if self.kind == "lists":
            return Listing.apply(self.inner(x))
        return self.inner(x)


captured: list[bool] = []  # an element for each call of Interrupting inside of a capture


class Interrupting(torch.nn.Module):
    """Raises KeyboardInterrupt while the second graph, the one of the recompute, is captured."""

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        if torch.cuda.is_current_stream_capturing():
            captured.append(True)
            if len(captured) == 2:
                raise KeyboardInterrupt
        return self.inner(x)


class Keeping(torch.autograd.Function):
    """An activation that keeps a tensor on ctx without save_for_backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = x.sigmoid()
        return x * ctx.kept

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.kept
