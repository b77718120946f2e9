"""docs/data/*.json as flat records, and how a figure is written. scripts/tables.py makes the tables of README and docs of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

DATA = Path(__file__).resolve().parents[1] / "docs" / "data"
GPUS = ("H100", "H200")  # that figures were taken on, the first where only one is shown
OURS, BITSANDBYTES, UNPATCHED, STOCK = "nf4_patch", "bitsandbytes", "unpatched", "stock"
GPU_TIME = "GPU time"  # the clock of a step where it is not the wall's
DENSE = "16-bit weights"
LIMITS = ("ceiling", "device copy", "torch.empty", "read", DENSE)  # what ours is held against


def sources() -> dict[str, str]:
    """Data file -> the command that writes it, as docs/data/README.md says; GPU in a name stands for h200, h100."""
    return dict(re.findall(r"^\| `([\w.-]+\.json)` \| `([^`]+)` \|", (DATA / "README.md").read_text(), re.MULTILINE))


def load(name: str) -> Any:
    file = DATA / name
    return json.loads(file.read_text()) if file.exists() else None


def of_gpus(name: str) -> Iterator[tuple[str, str, Any]]:
    """(GPU, file, data) of NAME-GPU.json, for each GPU that has one."""
    for gpu in GPUS:
        file = f"{name}-{gpu.lower()}.json"
        if data := load(file):
            yield gpu, file, data


def matches(record: Record, where: Record) -> bool:
    """Each field has the value, or one of the values of a tuple."""
    return all(record[name] in (each if isinstance(each, tuple) else (each,)) for name, each in where.items())


def records(*names: str, **where: Any) -> list[Record]:
    """A record for each side of each row of these benchmarks (NAME-GPU.json): ours, the limits, the others."""
    found = []
    for gpu, file, data in (each for name in names for each in of_gpus(name)):
        for section, rows in data["sections"].items():
            place = {"gpu": gpu, "file": file, "machine": data["machine"], "section": section.removesuffix(" bf16")}
            for row in rows:
                sides = sorted(row["median"], key=lambda side: (side != OURS, side not in LIMITS))
                found += [place | row | side_of(row, side) for side in sides]
    return [record for record in found if matches(record, where)]


def compared(name: str, ours: str, other: str, **where: Any) -> list[Record]:
    """How many times as fast one side of NAME-GPU.json is as another, by tokens and clock: a file with a list of rows."""
    found = []
    for gpu, file, data in of_gpus(name):
        rows = {(row["side"], row["tokens"]): row for row in data["rows"]}
        for clock, field in ((GPU_TIME, "gpu"), ("", "wall")):
            for tokens in dict.fromkeys(tokens for _, tokens in rows):
                sides = [rows.get((side, tokens), {}) for side in (ours, other)]
                if not all(side.get(f"{field}_ms") for side in sides):
                    continue
                ratio = sides[1][f"{field}_ms"] / sides[0][f"{field}_ms"]
                found.append({
                    "gpu": gpu, "file": file, "machine": data["machine"], "size": tokens, "clock": clock, "ratio": ratio,
                    # by the clock two runs differ by more than the rounds of one
                    "clear": abs(ratio - 1) > (1 if clock else 2) * max(side[f"{field}_spread"] for side in sides),
                    "times": f"{ratio:.2f}×",
                })  # fmt: skip
    return [record for record in found if matches(record, where)]


def row(file: str, subject: str) -> Record:
    """A row of a benchmark, for the anchors of what is written by hand (scripts/render_docs.py)."""
    (found,) = (row for rows in load(file)["sections"].values() for row in rows if row["subject"] == subject)
    return found


def side_of(row: Record, side: str) -> Record:
    """What tables show of a side: ``against`` and ``won`` are its time and ours, with how many times ours is as fast (of a
    limit, the part that ours reaches); in italics where that is not clear. A step's subject is who, batch x tokens, the
    setting of the cache, and the clock."""
    what, *others = row["subject"].split(", ")
    clock = others.pop() if others and others[-1] == GPU_TIME else ""
    ratio, is_clear, is_limit = row["ratio"].get(side), clear(row, side), side in LIMITS
    times = f"{ratio:.2f}×" if ratio else "check failed" * (side in row["ratio"])
    shown = f"{100 * ratio:.0f} %" if ratio and is_limit else times
    time, ours = digits(row["median"][side]), digits(row["median"][OURS])
    italic = "" if is_clear or is_limit or not ratio else "*"
    return {
        "side": side, "who": what.rpartition(" ")[0], "length": what.rpartition(" ")[2], "what": what, "clock": clock,
        "setting": others[0] if others else "patch", "unit": row["unit"].replace("us", "µs"), "ratio": ratio, "clear": is_clear,
        "size": row["sizes"].get("batch", 0) * row["sizes"].get("tokens", 0), "m": row["sizes"].get("m"), "times": times,
        "time": time, "won": f"{italic}{ours} ({times}){italic}",
        "against": f"{italic}{time} ({shown}){italic}" if shown else time,
        "memory": row["notes"].get(f"peak memory, {side}", "").removesuffix(" GiB"),
    }  # fmt: skip


def clear(row: Record, other: str = UNPATCHED) -> bool:
    """Whether the fused matmul ran where it was to, and made a difference that is more than noise: more than each side differs
    from itself in that run, and the same way in four rounds of five."""
    ratio = row["ratio"].get(other)
    if not ratio or row["notes"].get("fused") == "no":
        return False
    rounds = list(zip(row["times"][OURS], row["times"][other], strict=True))
    median = row["median"]
    same_way = sum((a < b) == (median[OURS] < median[other]) for a, b in rounds)
    noise = max(row["noise"][OURS], row["noise"][other])
    return abs(ratio - 1) > noise and same_way >= 0.8 * len(rounds)


def total(file: str, *fields: str) -> tuple[float, ...]:
    """Of all rows."""
    return tuple(sum(row[field] for row in load(file)["rows"]) for field in fields)


def peak(row: Record) -> float:
    """GiB, of a step with the patch."""
    return float(row["notes"]["peak memory"].split()[0])


def room(memory: float) -> float:
    """GiB of a GPU that training may take: less what cache="auto" leaves free (nf4_patch/cache/auto.py)."""
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
