"""fp32 numbers as sums of three in bf16, whose products tensor cores add in fp32."""
