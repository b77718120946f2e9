"""The arithmetic of 4-bit weights, with torch and triton. No patched library, environment variable or file is read here."""
