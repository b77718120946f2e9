"""The fused matmul, which multiplies by a packed 4-bit weight without a dequantized copy of the weight.

* A *size* is the number m of rows of x [m, k], and the shape of the weight [n, k].
* A *config* says how a kernel divides the work of a size. The shipped *table* (tuning.py) names the config for a size.
  On a GPU without a table, a measurement chooses it. Within a process, the choice for a size never changes.
* A *plan* applies a config to one GPU. A *CTA* is a thread block. With *split K*, each CTA computes a part of K, and a
  second launch adds up the partial sums.
* A *launch* has the compiled kernels and all their arguments, except x, out and the adapter, which each call passes.
* An *adapter* is LoRA's A [rank, k], B [n, rank] and scaling. Its *inner product* is scale * x @ A.T, [m, rank].
* The *originals* are the library functions that the fused matmul replaces.
"""
