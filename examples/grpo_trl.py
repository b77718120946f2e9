"""Train a 4-bit model with LoRA and TRL's GRPO. The model itself generates the rollouts. One line switches the patch on.

    python examples/grpo_trl.py                                  # a small random Llama, no network
    python examples/grpo_trl.py --model meta-llama/Llama-3.2-1B  # a real one
    python examples/grpo_trl.py --same-bits                      # plain enable(), whose results are bit-identical
    NF4_PATCH=0 python examples/grpo_trl.py --same-bits          # the same training without the patch

For each new token, generation multiplies one row per completion by every weight. The fused matmul supports up to 64 rows, so it can
speed up generation. Training steps and rollouts replay CUDA graphs, so that the GPU does not wait for Python. The rollouts use a
static key-value cache for this. Results are as accurate as without the patch, but not bit-identical, so other tokens may be sampled.

Every completion has --tokens tokens, so every run does the same work. TRL computes its loss in a Triton kernel, which needs a GPU.
"""  # fmt: skip

import argparse
import statistics
import tempfile

import torch
from datasets import Dataset
from offline import SIZES, checkpoint, compute_dtype, require_triton, text, tokenizer_of
from peft import LoraConfig
from record import Record, now
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="random", help="random, random-qwen, random-gemma, or any checkpoint")
parser.add_argument("--size", default="tiny", choices=SIZES, help="size of a random model")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--prompts", type=int, default=2, help="prompts per step")
parser.add_argument("--generations", type=int, default=8, help="completions per prompt")
parser.add_argument("--tokens", type=int, default=64, help="tokens per completion")
parser.add_argument("--same-bits", action="store_true", help='enable() instead of enable("fast")')
parser.add_argument("--json", metavar="FILE")
args = parser.parse_args()
require_triton(parser)
profile = None if args.same_bits else "fast"

import nf4_patch; nf4_patch.enable(profile)  # fmt: skip  # the one line

device = "cuda" if torch.cuda.is_available() else "cpu"
path = checkpoint(args.model, args.size)
tokenizer = tokenizer_of(path, padding_side="left")
quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=compute_dtype(),
)
model = AutoModelForCausalLM.from_pretrained(
    path, quantization_config=quantization, dtype=compute_dtype(), device_map={"": device}
)


def lower_case(completions: list[str], **_) -> list[float]:
    """Return the reward of each completion: its share of lower-case letters."""
    return [sum(map(str.islower, completion)) / max(1, len(completion)) for completion in completions]


record = Record()
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=lower_case,
    train_dataset=Dataset.from_dict({"prompt": [line[:32] for line in text() if len(line) >= 32] * args.prompts}),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    args=GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="nf4-patch-grpo-"),
        max_steps=args.steps,
        per_device_train_batch_size=args.prompts * args.generations,
        gradient_accumulation_steps=1,
        num_generations=args.generations,
        max_completion_length=args.tokens,
        generation_kwargs={"min_new_tokens": args.tokens},  # no completion ends early
        cache_implementation=None if args.same_bits else "static",
        use_vllm=False,
        gradient_checkpointing=True,
        learning_rate=1e-3,
        use_cpu=device == "cpu",
        bf16=compute_dtype() is torch.bfloat16,
        fp16=compute_dtype() is torch.float16,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=0,
    ),
    callbacks=[record],
)

generate, seconds = trainer.model.generate, []  # seconds of generation per step


def timed(**inputs) -> torch.Tensor:
    begin = now()
    completions = generate(**inputs)
    seconds.append(now() - begin)
    return completions


trainer.model.generate = timed
trainer.train()

log = [entry for entry in trainer.state.log_history if "reward" in entry]
rests = [whole - part for whole, part in zip(record.seconds, seconds, strict=True)]
# the first half compiles and warms up
generation, rest, step = (statistics.median(each[args.steps // 2 :]) for each in (seconds, rests, record.seconds))
rows = args.prompts * args.generations
record.extra["rollouts"] = {
    "tokens": round(sum(rows * entry["completions/mean_length"] for entry in log)),
    "tokens_per_second": rows * args.tokens / generation,
    "steps_per_second": 1 / step,
    "step": step,  # seconds, median
    "generation": generation,
    "rest": rest,
    "rewards": [entry["reward"] for entry in log],
}
print(f"{rows * args.tokens / generation:.1f} tokens per second in generation, {1 / step:.2f} steps per second")
print(f"{1e3 * generation:.1f} ms of a step in generation, {1e3 * rest:.1f} ms in the rest")
print(f"reward {log[0]['reward']:.4f} -> {log[-1]['reward']:.4f}")
record.finish(trainer.model, args.json)
