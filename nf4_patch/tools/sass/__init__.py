"""The machine code of the kernels, for a GPU that need not be here."""
