"""Description of the machine, wall-clock time, and GPU time of each kernel from PyTorch's profiler."""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import nf4_patch
from nf4_patch.tools.report import answer, provenance_data
from nf4_patch.tools.timing import Call


@dataclass(frozen=True)
class Machine:
    """The machine and releases that every number depends on."""

    gpu: str
    capability: str
    driver: str
    clocks: str
    releases: dict[str, str]
    date: str = ""
    commit: str | None = None  # of the package's checkout, with "-dirty" if it has changes, None without a checkout
    host: str = ""  # name of the host, its processor and number of cores

    def __str__(self) -> str:
        releases = ", ".join(f"{name} {release}" for name, release in self.releases.items())
        return f"{self.gpu} (sm_{self.capability}), driver {self.driver}, {self.clocks}\n{self.host}\n{releases}"


SMI = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")


def host() -> str:
    """Return the host's name, its processor and the number of cores that this process may use."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processor = found[1] if found else platform.machine()
    return f"{platform.node()}, {processor}, {len(os.sched_getaffinity(0))} cores"


def machine() -> Machine:
    """Describe the current CUDA device, its current clocks and the installed releases."""
    device = torch.cuda.current_device()
    # by UUID, because nvidia-smi orders GPUs differently from CUDA and ignores CUDA_VISIBLE_DEVICES
    uuid = torch.cuda.get_device_properties(device).uuid
    query = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader"]
    fields = answer(*query).split(",")
    if len(fields) == len(SMI):
        driver, sm, sm_max, memory, power, temperature = (field.strip() for field in fields)
        clocks = f"SM clock {sm} of {sm_max}, memory clock {memory}, power limit {power}, {temperature} C"
    else:
        driver, clocks = "unknown", "clocks unknown (nvidia-smi did not answer)"
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    known = provenance_data()
    installed = {"python": platform.python_version(), **known["releases"], "nf4-patch": nf4_patch.__version__}
    known["releases"] = installed | {"torch": torch.__version__}  # with the CUDA that it was built for
    return Machine(name, f"{major}{minor}", driver, clocks, host=host(), **known)


def synchronize() -> None:
    """Synchronize the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wall_ms(call: Call) -> float:
    """Return the wall-clock milliseconds of a call, with the device synchronized before and after."""
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - begin) * 1e3


def kernels(call: Call) -> list[tuple[str, float]]:
    """Return (name, milliseconds) of each kernel and copy that a call launches, from PyTorch's profiler."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()  # .events() would build a tree, which takes 0.3 s per step
    on_gpu = (e for e in events if e.device_type() == DeviceType.CUDA and not e.is_user_annotation())
    return [(event.name(), event.duration_ns() / 1e6) for event in on_gpu]
