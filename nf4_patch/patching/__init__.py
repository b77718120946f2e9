"""The core: which library functions are replaced and when, and which calls fall back to the original. It imports no option."""
