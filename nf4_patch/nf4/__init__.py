"""The arithmetic of 4-bit weights, with torch and triton. It knows no patched library, no environment variable and no file."""
