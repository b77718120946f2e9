"""Plan the memory of a model while it is loaded: which decoder layers go to host memory, and which stay on the GPU."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..patching.counters import warn_once
from ..patching.option import ConfigError, size_in_words
from ..patching.switch import switch
from . import host_memory
from .host_memory import ADVICE, ALIGNMENT, HostBlock

# The folder and the files of a memory cgroup of version 2 and of version 1
CGROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
Place = tuple[str, torch.device]  # a decoder layer, and the GPU of its weights
# For each model that is being loaded, ``plans`` has its host blocks.
plans: weakref.WeakKeyDictionary[Any, dict[Place, HostBlock]] = weakref.WeakKeyDictionary()


def layer_of(full_name: str) -> str:
    """Return the path of a parameter's decoder layer, such as "model.layers.3", or "" if the parameter is in none."""
    parts = full_name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), -1)
    return ".".join(parts[: number + 1])


def packed_size(elements: int, nested: bool) -> int:
    """Return the bytes of a packed weight and its scales, with quantization blocks of 64 elements.

    With ``nested``, the scales are 8-bit, and each group of 256 scales has an fp32 scale.
    """
    scales = -(-elements // 64)
    return -(-elements // 2) + (scales + 4 * -(-scales // 256) if nested else 4 * scales)


def spread(sizes: Sequence[int], budget: int) -> list[bool]:
    """Return for each layer whether it stays on the GPU. The layers that stay take at most ``budget`` bytes.

    These layers are spread evenly over the model. While one of them computes, the copy of the next offloaded layer has time
    to finish.
    """
    total, share, stays = sum(sizes), 0, []
    for size in sizes:
        share += budget * size
        stays.append(share >= total * size)
        share -= total * size * stays[-1]
    return stays


def free_memory(root: Path = Path("/")) -> float:
    """Return how many bytes of host memory this process may still use, or infinity if unknown.

    The result is the smallest of MemAvailable and, for each cgroup, the limit minus the memory in use. Inactive page cache
    does not count as memory in use.
    """
    found = float("inf")
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found = 1024 * int(dict(line.split(":") for line in lines)["MemAvailable"].split()[0])
    lines = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version, limit, usage, inactive = CGROUPS[bool(controllers)]
        mount = root / "sys/fs/cgroup" / version
        own = mount / path.strip("/")
        # Inside a container, ``path`` may be the host's. The mount then is the container's own cgroup.
        for folder in (own, *own.parents):
            with contextlib.suppress(OSError, KeyError, ValueError):
                stat = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / usage).read_text()) - int(stat[inactive])
                found = min(found, int((folder / limit).read_text()) - used)  # "max" raises: there is no limit
            if folder == mount:
                break
    return max(found, 0)


def plan(model: Any, weights: Iterable[tuple[str, Any, int]]) -> None:
    """Decide which decoder layers go to host memory, and record their host blocks in ``plans``.

    Args:
        weights: (full name, device, packed bytes) of each weight that will be packed.

    Raises:
        ConfigError: the option's size is too small for the two prefetch buffers.
        MemoryError: the layers need more host memory than is free or can be pinned.
    """
    planned: dict[torch.device, Counter[str]] = {}
    tensors: Counter[str] = Counter()
    for name, place, size in weights:
        layer, device = layer_of(name), torch.device(place)
        if device.type != host_memory.cuda.kind:
            warn_once(
                f"nf4_patch: offload is ignored for weights on the device {device}, because it moves weights to and from a GPU"
            )
        elif layer:
            planned.setdefault(torch.empty(0, device=place).device, Counter())[layer] += size
            tensors[layer] += 3  # packed, absmax and absmax2
    chosen: list[list[tuple[Place, int]]] = []
    budget, wanted, residents = switch.value("offload"), 0, []
    for device, sizes in planned.items():
        total, largest = sizes.total(), max(sizes.values())
        if isinstance(budget, int) and total <= budget:
            continue
        on_gpu = budget - 2 * largest if isinstance(budget, int) else 0
        if on_gpu < 0:
            raise ConfigError(
                f"offload={size_in_words(int(budget))!r} is too small for the two prefetch buffers on {device}, which hold the "
                f'packed weights of one layer each. Give "{-(-2 * largest // 2**20)}MiB" or more, or "all", which keeps only the buffers'
            )
        resident, here = total, list[tuple[Place, int]]()
        for (layer, size), stays in zip(sizes.items(), spread(list(sizes.values()), on_gpu), strict=True):
            if not stays:
                here.append(((layer, device), size + tensors[layer] * ALIGNMENT))
                resident -= size
        wanted += total - resident
        chosen.append(here)
        residents.append(resident)
    if wanted > (free := free_memory()):  # Without this error, Linux might kill the process silently.
        raise MemoryError(
            f"offload: {size_in_words(wanted)} of host memory are needed, but {size_in_words(int(free))} are free (also counting the container's limit). "
            f"To go on, {ADVICE}"
        )
    pinned: dict[Place, HostBlock] = {}
    for here, resident in zip(chosen, residents, strict=True):
        for place, size in here:
            pinned[place] = block = HostBlock(size, place[1])
        block.resident = resident
    plans[model] = pinned


def placed(model: Any, full_name: str, parameter: Any) -> Any:
    """Return ``parameter``, moved to host memory with its absmax tensors if ``plan`` chose its layer."""
    state = getattr(parameter, "quant_state", None)
    if state is None or model not in plans:
        return parameter
    block = plans[model].get((layer_of(full_name), parameter.device))
    if block is not None:
        for owner, name in ((parameter, "data"), (state, "absmax"), (state.state2, "absmax"))[
            : 3 if state.nested else 2
        ]:
            setattr(owner, name, block.placed(getattr(owner, name)))
    return parameter
