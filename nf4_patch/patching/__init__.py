"""The core replaces library functions, and decides which calls fall back to the original. It imports no option."""
