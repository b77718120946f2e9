"""Train a 4-bit model with LoRA, Unsloth's FastLanguageModel and TRL's SFTTrainer. One line switches the patch on.

    python examples/qlora_unsloth.py                                    # a small random Llama, no network
    python examples/qlora_unsloth.py --model unsloth/Llama-3.2-1B       # a real one
    python examples/qlora_unsloth.py --same-bits                        # plain enable(), whose results are bit-identical
"""  # fmt: skip

import unsloth  # isort: skip (before transformers, peft and trl)

import argparse
import tempfile

from datasets import Dataset
from offline import SIZES, checkpoint, compute_dtype, text
from record import Record
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="random", help="random, random-qwen, random-gemma, or any checkpoint")
parser.add_argument("--size", default="tiny", choices=SIZES, help="size of a random model")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--rows", type=int, default=2)
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--same-bits", action="store_true", help='enable() instead of enable("fast")')
parser.add_argument("--json", metavar="FILE")
parser.add_argument("--plot", metavar="FILE.png")
args = parser.parse_args()
profile = None if args.same_bits else "fast"

import nf4_patch; nf4_patch.enable(profile)  # fmt: skip  # the one line

dtype = compute_dtype()
model, tokenizer = unsloth.FastLanguageModel.from_pretrained(
    checkpoint(args.model, args.size), max_seq_length=args.tokens, load_in_4bit=True, dtype=dtype
)
model = unsloth.FastLanguageModel.get_peft_model(
    model,
    r=16,
    lora_alpha=32,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    use_gradient_checkpointing="unsloth",
    random_state=0,
)
record = Record()
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_dict({"text": [" ".join(text())] * 64}),
    args=SFTConfig(
        output_dir=tempfile.mkdtemp(prefix="nf4-patch-unsloth-"),
        dataset_text_field="text",
        max_steps=args.steps,
        per_device_train_batch_size=args.rows,
        gradient_accumulation_steps=1,
        max_length=args.tokens,
        padding_free=False,
        pad_to_multiple_of=64,  # few lengths, so that CUDA graphs are replayed
        learning_rate=1e-3,
        bf16=str(dtype) == "torch.bfloat16",
        fp16=str(dtype) == "torch.float16",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=0,
    ),
    callbacks=[record],
)
trainer.train()
record.finish(trainer.model, args.json, args.plot)
