"""The forward and backward of experts that are packed in 4 bits, for the option ``experts="4bit"``."""
