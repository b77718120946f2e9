"""Both dequantizations of a packed weight in one launch: kernel, reference, launch."""
