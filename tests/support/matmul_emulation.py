"""The fused matmul in plain torch, which adds in the order of the PTX of matmul/small_m_ptx.py."""

from __future__ import annotations

import torch

from nf4_patch.matmul.tuning import SmallMConfig


def tensor_core(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return ``sums`` [m, n] in fp32, plus left [m, k] @ right [n, k].T, with the bits of one mma of an H200.

    The products are exact. Products and sum are aligned to the largest exponent, where a product's exponent is the sum
    of its factors' exponents. They are cut toward zero two bits below fp32's last bit and added, and the result is cut
    to fp32.
    """
    terms = torch.cat((left[..., :, None, :] * right[..., None, :, :], sums.double()[..., None]), -1)
    a, b, c = (torch.frexp(part).exponent for part in (left, right, sums.double()))
    exponents = torch.cat((a[..., :, None, :] + b[..., None, :, :] - 1, c[..., None]), -1)
    top = torch.where(terms == 0, -200, exponents).amax(-1, keepdim=True)
    unit = torch.ldexp(torch.ones_like(terms[..., :1]), top - 26)
    total = (terms / unit).trunc().sum(-1) * unit[..., 0]
    unit = torch.ldexp(torch.ones_like(total), torch.frexp(total).exponent - 24)
    return ((total / unit).trunc() * unit).float()


def in_order(
    x: torch.Tensor, weight: torch.Tensor, config: SmallMConfig, split_k: int = 1, bias: torch.Tensor | None = None,
    depth: int = 8, step: int = 64,
) -> torch.Tensor:  # fmt: skip
    """Return x [m, k] times weight [n, k], [m, n] in x's dtype. The order is: each mma, then each warp, then each part of K.

    Args:
        depth: how many columns of K one mma takes: 8 on sm_75, and 16 on sm_80 and newer.
        step: the weight's PackedWeight.step(). Below 32, a lane loads 64 bits, whatever the config says.
    """
    config = config._replace(load_128bit=config.load_128bit and step >= 32)
    total = added(partial_sums(x, weight, config, split_k, depth))
    return (total if bias is None else total + bias.float()).to(x.dtype)


def partial_sums(
    x: torch.Tensor, weight: torch.Tensor, config: SmallMConfig, split_k: int, depth: int
) -> list[torch.Tensor]:
    """Return the sums [m, n] in fp32 of each of the ``split_k`` parts of K."""
    (m, k), n, groups = x.shape, weight.shape[0], 2 if config.load_128bit else 4
    chunks = -(-k // 256)
    padded = (torch.nn.functional.pad(side, (0, 256 * chunks - k)).double() for side in (x, weight))
    # a lane's bytes are its fragment: an mma takes one of lanes 0 to 3, two weights each, or that and the next
    x, weight = (
        side.view(-1, chunks, groups, 4, 32 // groups, 2)
        .permute(1, 2, 4, 0, 3, 5)
        .reshape(chunks, 256 // depth, depth // 8, -1, 8)
        .transpose(2, 3)
        .flatten(3)
        for side in padded
    )
    parts = []
    for s in range(split_k):
        first, stop = s * chunks // split_k, (s + 1) * chunks // split_k
        sums = torch.zeros(config.warps_k, n, m, device=x.device)
        for start in range(first, stop, config.warps_k):
            warps = min(config.warps_k, stop - start)
            for q in range(256 // depth):
                sums[:warps] = tensor_core(sums[:warps], weight[start : start + warps, q], x[start : start + warps, q])
        parts.append(added(sums).t())
    return parts


def added(parts) -> torch.Tensor:
    """Add the parts one after another in fp32."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
