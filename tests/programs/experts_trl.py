"""Thirty steps of TRL's SFTTrainer with LoRA on packed experts: experts_trl.py FOLDER."""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from tiny_experts import STACKS, dense_of, ids_of, model_of

import nf4_patch

folder = Path(sys.argv[1])
nf4_patch.enable(experts="4bit")
model = model_of("qwen3", lora=False)
dense_of(model).save_pretrained(folder / "dense")
words = {str(number): number for number in range(96)}
trainer = SFTTrainer(
    model,
    args=SFTConfig(
        folder, max_steps=30, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, report_to=[],
        gradient_checkpointing=True, bf16=False, use_cpu=not torch.cuda.is_available(), save_strategy="no",
    ),
    train_dataset=Dataset.from_list([{"input_ids": row} for row in ids_of().tolist()] * 30),
    peft_config=LoraConfig(r=8, target_modules=["q_proj"], target_parameters=[f"experts.{stack}" for stack in STACKS]),
    processing_class=PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "0")), pad_token="0", eos_token="1"
    ),
)  # fmt: skip
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
assert len(losses) == 30 and losses[-1] < losses[0] - 0.1, losses
trainer.model.save_pretrained(folder / "adapters")
with torch.no_grad():
    output = trainer.model.eval()(input_ids=ids_of(), labels=ids_of())
torch.save((output.loss.cpu(), output.logits.cpu()), folder / "ours")
