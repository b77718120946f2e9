"""Results of PyTorch's ops, and writes into these results."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Results(TorchDispatchMode):
    """Keep the result of every op, its version and a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[str, torch.Tensor, int, torch.Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.kept.append((str(function), tensor, tensor._version, tensor.clone()))
        return result

    def written_into(self, unnoticed: bool = False) -> list[str]:
        """Return the ops whose results changed. With ``unnoticed``, return only those whose version did not rise."""
        return [
            name for name, result, version, copy in self.kept if not (unnoticed and result._version != version)
            and not torch.allclose(result.double(), copy.double(), rtol=0, atol=0, equal_nan=True)
        ]  # fmt: skip
