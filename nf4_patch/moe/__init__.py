"""Mixtures of experts: how a packed stack is read, multiplied by, and trained on with LoRA."""
