"""The option ``cache``: keep dequantized weights, and return them to callers that only read them."""
