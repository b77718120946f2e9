"""Dequantized weights kept between calls, for callers that only read them."""
