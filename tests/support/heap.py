"""The heap of the process in place of a GPU's memory, so that a CPU test sees what autograd holds."""

from __future__ import annotations

import ctypes

from nf4_patch.nf4 import runtime


class Info(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


libc = ctypes.CDLL("libc.so.6")
libc.mallinfo2.restype = Info


def in_use() -> int:
    """Return the bytes that malloc has given out, which include PyTorch's CPU tensors."""
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


class Memory:
    """A simulated GPU of ``total`` bytes. The bytes by which the heap grows beyond its first size are in use on this GPU.

    As PyTorch does, it reserves the most bytes that were in use since ``empty_cache``. ``peak`` is the most that was
    ever in use, as far as ``look`` saw it.
    """

    DEVICE = -1  # the device of a CPU tensor

    def __init__(self, monkeypatch, total: int, others: int = 0):
        self.total, self.others, self.base = total, others, in_use()
        self.fraction, self.retries = 1.0, 0
        self.reserved = self.peak = 0
        replaced = {
            "memory_allocated": lambda device: self.look(), "memory_reserved": lambda device: self.now(),
            "mem_get_info": lambda device: (self.total - self.now() - self.others, self.total),
            "memory_fraction": lambda device: self.fraction, "empty_cache": self.empty_cache,
            "devices_in_use": lambda: [self.DEVICE], "allocation_retries": lambda device: self.retries,
        }  # fmt: skip
        for name, function in replaced.items():
            monkeypatch.setattr(runtime, name, function)

    def look(self, *_) -> int:
        used = max(in_use() - self.base, 0)
        self.reserved, self.peak = max(self.reserved, used), max(self.peak, used)
        return used

    def now(self) -> int:
        self.look()
        return self.reserved

    def empty_cache(self) -> None:
        self.reserved = 0
        self.look()
