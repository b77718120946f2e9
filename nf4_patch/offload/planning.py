"""Plan the memory of a model while it is loaded: which experts modules go to host memory, and which stay on the GPU."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..patching.counters import warn_once
from ..patching.option import ConfigError, size_in_words
from ..patching.switch import switch
from . import host_memory
from .host_memory import ADVICE, HostBlock

gate = switch.gates["offload"]
# The folder and the files of a memory cgroup of version 2 and of version 1
CGROUPS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# For each model that is being loaded, ``plans`` has its host blocks by module path. If the memory of a block could not
# be pinned, ``plans`` has an error message instead: transformers only logs an exception while it loads a model, so
# ``blocks_of`` raises an error with this message when loading ends.
plans: weakref.WeakKeyDictionary[Any, dict[str, HostBlock] | str] = weakref.WeakKeyDictionary()


def packed_size(elements: int, nested: bool) -> int:
    """Return the bytes of a packed stack with its absmax tensors: blocks of 64 elements, if nested in groups of 256 blocks."""
    scales = -(-elements // 64)
    return -(-elements // 2) + (scales + 4 * -(-scales // 256) if nested else 4 * scales)


def free_memory(root: Path = Path("/")) -> float:
    """Return the host memory in bytes that this process may still use, or infinity if Linux does not tell.

    It is the smallest of MemAvailable and each cgroup's limit minus its memory in use, without inactive page cache.
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


def plan(model: Any, stacks: Iterable[tuple[str, Any, int]]) -> None:
    """Decide which experts modules go to host memory, and record their host blocks in ``plans``.

    Args:
        stacks: (full name, device, packed bytes) of each stack that will be packed.

    Raises:
        ConfigError: the size is too small for the two prefetch buffers.
        MemoryError: the modules need more host memory than is free.
    """
    if not gate.on:
        return
    planned: dict[torch.device, Counter[str]] = {}
    for name, place, size in stacks:
        if (device := torch.device(place)).type == host_memory.cuda.kind:
            planned.setdefault(device, Counter())[name.rpartition(".")[0]] += size
        else:
            warn_once(
                f"nf4_patch: offload is ignored for experts on the device {device}, because it moves experts to and from a GPU"
            )
    chosen: dict[str, HostBlock] = {}
    plans[model], budget, wanted = chosen, switch.value("offload"), 0
    for device, sizes in planned.items():
        total, largest = sizes.total(), max(sizes.values())
        if isinstance(budget, int) and total <= budget:
            continue
        on_gpu = budget - 2 * largest if isinstance(budget, int) else 0
        if on_gpu < 0:
            raise ConfigError(
                f"offload={size_in_words(int(budget))!r} is too small for the two prefetch buffers on {device}, which hold one "
                f'experts module each. Give "{-(-2 * largest // 2**20)}MiB" or more, or "all", which keeps only the buffers'
            )
        share, resident = 0, total
        # Spread the modules that stay on the GPU evenly over the layers. While such a module computes, the copy of an
        # offloaded module has time to finish.
        for path, size in sizes.items():
            share += on_gpu * size
            if share >= total * size:
                share -= total * size
            else:
                block = chosen[path] = HostBlock(size)
                resident -= size
        block.resident, wanted = resident, wanted + total - resident
    if wanted > (free := free_memory()):  # Without this error, Linux might kill the process silently.
        raise MemoryError(
            f"offload: {size_in_words(wanted)} of host memory are needed, but {size_in_words(int(free))} are free (also counting the container's limit). "
            f"To go on, {ADVICE}"
        )


def blocks_of(model: Any) -> dict[str, HostBlock]:
    """Return the host blocks planned for a model, by module path. Raise MemoryError if a stack could not be moved there."""
    planned = plans.get(model, {})
    if isinstance(planned, str):
        raise MemoryError(planned)
    return planned


def placed(model: Any, full_name: str, parameter: Any) -> Any:
    """Return ``parameter``, moved to host memory with its absmax tensors if ``plan`` chose its module."""
    block, state = blocks_of(model).get(full_name.rpartition(".")[0]), parameter.quant_state
    if block is None:
        return parameter
    for owner, name in ((parameter, "data"), (state, "absmax"), (state.state2, "absmax"))[: 3 if state.nested else 2]:
        try:
            setattr(owner, name, block.placed(getattr(owner, name)))
        except MemoryError as error:
            plans[model] = str(error)
            raise
    return parameter
