"""Keep dequantized weights between calls, for callers that only read them."""
