"""docs/data/*.json as flat records, and how a figure is written. scripts/tables.py makes the tables of README and docs of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

DATA = Path(__file__).resolve().parents[1] / "docs" / "data"
GPUS = ("H200", "H100")  # that figures were taken on, the first where only one is shown
OURS, BITSANDBYTES, UNPATCHED, STOCK = "nf4_patch", "bitsandbytes", "unpatched", "stock"
CALLS, GPU_TIME = "kernel calls a step", "GPU time"  # a note of a step; its clock where it is not the wall's
DENSE = "16-bit weights"
PEFT = "peft, experts in 16 bits"  # what LoRA on experts is compared with
LIMITS = ("ceiling", "device copy", "torch.empty", "read", DENSE)  # what ours is held against
UNITS = {"us": "µs"}


def sources() -> dict[str, str]:
    """Data file -> the command that writes it, as docs/data/README.md says; GPU in a name stands for h200, h100."""
    return dict(re.findall(r"^\| `([\w.-]+\.json)` \| `([^`]+)` \|", (DATA / "README.md").read_text(), re.MULTILINE))


def load(name: str) -> Any:
    file = DATA / name
    return json.loads(file.read_text()) if file.exists() else None


def of_gpus(name: str) -> Iterator[tuple[str, str, Any]]:
    """(GPU, file, data) of a file whose name has GPU in it, for each GPU that has one."""
    for gpu in GPUS:
        file = name.replace("GPU", gpu.lower())
        if data := load(file):
            yield gpu, file, data


def matches(record: Record, where: Record) -> bool:
    """Each field has the value, or one of the values of a tuple."""
    return all(record[name] in (each if isinstance(each, tuple) else (each,)) for name, each in where.items())


def records(*names: str, **where: Any) -> list[Record]:
    """The rows of benchmarks, a record for each side of each row: its time and how many times ours is as fast."""
    found = []
    for name in names:
        for gpu, file, data in of_gpus(name):
            for section, rows in data["sections"].items():
                found += [
                    {"gpu": gpu, "file": file, "machine": data["machine"], "section": shape(section).removesuffix(" bf16"), **row, **side_of(row, side)}
                    for row in rows
                    for side in sorted(row["median"], key=lambda side: (side != OURS, side not in LIMITS))
                ]  # fmt: skip
    return [record for record in found if matches(record, where)]


def row(file: str, subject: str) -> Record:
    """A row of a benchmark, for the anchors of what is written by hand (scripts/render_docs.py)."""
    (found,) = (row for rows in load(file)["sections"].values() for row in rows if row["subject"] == subject)
    return found


def side_of(row: Record, side: str) -> Record:
    """What tables show of a side of a row: ``time``, ``ours``, ``ratio`` and ``times``; ``against`` and ``won`` are the time of
    this side and ours, with how many times ours is as fast (of a limit, the part that ours reaches); italics: not clear."""
    who, length, setting, clock = parts_of(row)
    ratio, is_clear = row["ratio"].get(side), clear(row, side)
    compared = side in row["ratio"]
    times = f"{ratio:.2f}×" if ratio else "check failed" * compared
    time, ours = digits(row["median"][side]), digits(row["median"][OURS])
    shown = f"{100 * ratio:.0f} %" if ratio and side in LIMITS else times
    kept = lambda text: text if is_clear or not ratio or side in LIMITS else f"*{text}*"  # noqa: E731
    memory = row["notes"].get(f"peak memory, {side}", "").removesuffix(" GiB")
    size = row["sizes"].get("batch", 0) * row["sizes"].get("tokens", 0)
    return {
        "side": side, "who": who, "length": length, "setting": setting or "patch", "clock": clock, "size": size,
        "subject": shape(row["subject"]), "what": row["subject"].partition(",")[0], "unit": UNITS.get(row["unit"], row["unit"]),
        "ratio": ratio, "clear": is_clear, "times": times, "marked": kept(times), "time": time, "ours": ours, "memory": memory,
        "against": kept(f"{time} ({shown})" if shown else time), "won": kept(f"{ours} ({times})"),
        "m": row["sizes"].get("m", 0),
    }  # fmt: skip


def parts_of(row: Record) -> tuple[str, str, str, str]:
    """Of a step's subject: who, batch x tokens, the setting of the cache or of checkpointing, the clock."""
    first, *others = row["subject"].split(", ")
    who, _, length = first.rpartition(" ")
    clock = others.pop() if others and others[-1] == GPU_TIME else ""
    return who, shape(length), others[0] if others else "", clock


def clear(row: Record, other: str = UNPATCHED) -> bool:
    """Whether the patch served a step, and made a difference that is more than noise: more than each side differs from
    itself in that run, and the same way in four rounds of five."""
    ratio = row["ratio"].get(other)
    if not ratio or unserved(row):
        return False
    rounds = list(zip(row["times"][OURS], row["times"][other], strict=True))
    median = row["median"]
    same_way = sum((a < b) == (median[OURS] < median[other]) for a, b in rounds)
    noise = max(row["noise"][OURS], row["noise"][other])
    return abs(ratio - 1) > noise and same_way >= 0.8 * len(rounds)


def unserved(row: Record) -> bool:
    """The kernel, or the fused matmul, was not called."""
    return (row["notes"].get(CALLS) == "0" and "cache" not in row["notes"]) or row["notes"].get("fused") == "no"


def peak(row: Record, side: int = 0) -> float:
    """GiB, of a step with the patch (0) or without (1)."""
    return float(re.findall(r"\d+\.\d+", row["notes"]["peak memory"])[side])


def room(memory: float) -> float:
    """GiB of a GPU that training may take: less what cache="auto" leaves free (nf4_patch/patching/cache/auto.py)."""
    return (memory - memory / 24 - 2**29) / 2**30


# --- text ---


def digits(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def span(values: Sequence[float], unit: str = "×") -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}{unit}"
    return high if f"{low}{unit}" == high else f"{low} to {high}"


def shape(text: str) -> str:
    return re.sub(r"(\d)x(\d)", r"\1×\2", text)


def numbers(release: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", release)]
