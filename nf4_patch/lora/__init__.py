"""Run peft's LoRA on 4-bit linear layers as one autograd function, with ``enable(lora="fused")``."""
