"""Generate with a 4-bit model, batch 1 to 32, and compare the tokens with and without the patch.

    python examples/generate.py                                    # a small random Llama, no network
    python examples/generate.py --model meta-llama/Llama-3.2-1B    # a real one

The prompt runs through the patched dequantization. For each later token, bitsandbytes dequantizes only if the batch is large enough
(5 to 64 rows, depending on GPU and dtype). For smaller batches bitsandbytes' own kernel runs, which is not patched.
"""  # fmt: skip

import argparse

import torch
from offline import SIZES, checkpoint, compute_dtype, text, tokenizer_of
from record import Record, now
from tqdm import tqdm
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import nf4_patch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="random", help="random, random-qwen, random-gemma, or any checkpoint")
parser.add_argument("--size", default="tiny", choices=SIZES, help="size of a random model")
parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
parser.add_argument("--new-tokens", type=int, default=32)
parser.add_argument("--json", metavar="FILE")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
path = checkpoint(args.model, args.size)
tokenizer = tokenizer_of(path, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # Llama has no token for padding
quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=compute_dtype(),
)
model = AutoModelForCausalLM.from_pretrained(
    path, quantization_config=quantization, dtype=compute_dtype(), device_map={"": device}
)
model.eval()


def generate(batch: int) -> tuple[torch.Tensor, float]:
    """Generate greedily, twice. Return the tokens [batch, prompt + new] and the new tokens per second of the second run."""
    lines = (text() * (batch // len(text()) + 1))[:batch]
    prompt = tokenizer(lines, return_tensors="pt", padding=True).to(device)
    settings = {"do_sample": False, "min_new_tokens": args.new_tokens, "max_new_tokens": args.new_tokens}
    model.generate(**prompt, **settings)  # compiles and warms up
    start = now()
    tokens = model.generate(**prompt, **settings)
    return tokens, batch * args.new_tokens / (now() - start)


record = Record()
rows = []
for batch in tqdm(args.batches):
    nf4_patch.disable()
    expected, _ = generate(batch)
    repeated, stock = generate(batch)
    nf4_patch.enable()
    tokens, patched = generate(batch)
    row = {"batch": batch, "stock": stock, "patched": patched, "equal": torch.equal(tokens, expected)}
    rows.append(row | {"repeats": torch.equal(repeated, expected)})

for row in rows:
    verdict = "the same tokens" if row["equal"] else "OTHER TOKENS"
    if not row["repeats"]:  # bitsandbytes' kernel may add partial sums in any order
        verdict = "two runs without the patch differ, so there is nothing to compare"
    rates = f"{row['stock']:8.1f} -> {row['patched']:8.1f} tokens per second, "
    print(f"batch {row['batch']:3}: {rates if device == 'cuda' else ''}{verdict}")  # on a CPU, both run the same code
record.extra["generation"] = rows
record.finish(json_file=args.json)
if not all(row["equal"] for row in rows if row["repeats"]):
    raise SystemExit("the patch changed the tokens: please report it")
