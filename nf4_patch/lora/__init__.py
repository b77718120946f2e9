"""peft's LoRA on 4-bit linear layers in one function, with ``enable(lora="fused")``."""
