"""Products of bf16 matrices with narrow fp32 ones, at fp32's precision on tensor cores."""
