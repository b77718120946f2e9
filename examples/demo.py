"""Train with peft, without the patch and with it, and show that losses and adapter are bit-identical.

    scripts/demo               # installs the libraries, then runs the demo
    python examples/demo.py    # trains four layers of Llama-3.1-8B on a GPU, or a tiny Llama without one

The model has random weights and the text is text.txt, so nothing is downloaded. Each training runs qlora_peft.py in a new process.
The exit code is 1 if losses or adapters differ.
"""  # fmt: skip

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure

GPU = torch.cuda.is_available()
# With 2048 rows, bitsandbytes 0.50 dequantizes in the forward on every GPU. For fewer rows, its fused kernel may run.
BATCH = ("--rows", "4", "--tokens", "512") if GPU else ("--rows", "1", "--tokens", "64")
NAMES = {False: "without the patch", True: "with the patch"}
# NF4_* variables of the user must not switch the patch. Without a GPU, the kernel runs in Triton's interpreter.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("NF4_")}
ENVIRONMENT |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
ENVIRONMENT |= {} if GPU else {"PYTHONPATH": str(Path(__file__).parents[1] / "tests" / "support" / "interpreted")}


def pack(folder: str) -> None:
    """Save a random Llama in 4 bits."""
    from offline import checkpoint, compute_dtype
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    path, dtype = checkpoint("random", "8b-4layers" if GPU else "tiny"), compute_dtype()
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype, "bnb_4bit_use_double_quant": True}
    how = {"dtype": dtype, "quantization_config": BitsAndBytesConfig(load_in_4bit=True, **options)}
    AutoModelForCausalLM.from_pretrained(path, device_map={"": 0 if GPU else "cpu"}, **how).save_pretrained(folder)
    AutoTokenizer.from_pretrained(path).save_pretrained(folder)


def train(folder: str, steps: int, patched: bool) -> dict:
    """Run qlora_peft.py. Return its record: losses, seconds, a digest of the adapter, hits and fallbacks."""
    print(f"training {NAMES[patched]}", flush=True)
    script, file = Path(__file__).with_name("qlora_peft.py"), Path(folder, "record.json")
    # eager, because the backward of a fused attention does not always add in the same order
    options = (
        "--model",
        folder,
        "--steps",
        str(steps),
        *BATCH,
        "--same-bits",
        "--attention",
        "eager",
        "--json",
        str(file),
    )
    environment = ENVIRONMENT | ({} if patched else {"NF4_PATCH": "0"})
    if subprocess.run([sys.executable, script, *options], env=environment, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"Failed: the training {NAMES[patched]} ended with an error")
    return dict(json.loads(file.read_text()))


def problems(off: list[dict], on: list[dict]) -> list[str]:
    """Return a sentence for each check that failed. ``off`` are trainings without the patch, ``on`` with it."""
    learned = [{(*record["losses"], record["adapter"]) for record in records} for records in (off, on)]
    targets = [target for record in on for target in record["nf4_patch"]["targets"]]
    found = {
        "without the patch the training gives other bits when it is repeated": len(learned[0]) > 1,
        "with the patch the training gives other bits when it is repeated": len(learned[1]) > 1,
        "losses or adapter differ": learned[0] != learned[1],
        "the kernel never ran": not any(target["hits"] for target in targets),
        "calls fell back to the original": any(target["fallbacks"] for target in targets),
    }
    return [sentence for sentence, holds in found.items() if holds]


def draw(png: str, sides: dict[bool, list[dict]]) -> None:
    """Plot the loss of every step of each side's first training. On a GPU, plot the time of every step too."""
    shown = ("losses", "seconds") if GPU else ("losses",)
    figure = Figure(figsize=(5 * len(shown), 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for patched, (record, *_) in sides.items():
            axes.plot(record[name], "x--" if patched else "o-", label=NAMES[patched])
        axes.set(xlabel="step", ylabel=name)
        axes.legend()
    figure.savefig(png, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--png", metavar="FILE", default="nf4-patch-demo.png", help="file of the plot")
    args = parser.parse_args()
    if not Path(args.png).absolute().parent.is_dir():
        parser.error(f"--png {args.png}: there is no folder for it")
    if not GPU:
        print(
            "No NVIDIA GPU, so Triton's interpreter runs the kernel in Python. This proves the bits; the it/s say nothing about speed."
        )
    sides: dict[bool, list[dict]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(prefix="nf4-patch-demo-") as folder:
        pack(folder)
        # In this order, both sides are affected alike if the machine gets faster or slower.
        for patched in (False, True, True, False) if GPU else (False, True):
            sides[patched].append(train(folder, args.steps, patched))
    off, on = sides.values()
    print("\nstep  loss without the patch  with the patch")
    for step, (a, b) in enumerate(zip(off[0]["losses"], on[0]["losses"], strict=True), 1):
        print(f"{step:4}  {a:22.9f}  {b:14.9f}  {'the same bits' if a == b else 'THEY DIFFER'}")
    for target in on[0]["nf4_patch"]["targets"]:
        if target["hits"] or target["fallbacks"]:
            print(f"{target['name']}: {target['hits']} calls in the kernel, fallbacks: {target['fallbacks'] or 'none'}")
    for patched, records in sides.items() if GPU else ():
        seconds = statistics.mean(record["seconds_per_step"] for record in records)
        peak = max(record["peak_bytes"] for record in records) / 2**30
        print(f"{NAMES[patched]}: {1e3 * seconds:.1f} ms per step, {peak:.2f} GiB at the peak")
    draw(args.png, sides)
    failed = problems(off, on)
    print(f"picture: {args.png}")
    print("\n".join(f"Failed: {problem}" for problem in failed) or "Passed: the same losses and adapter, to the bit.")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
