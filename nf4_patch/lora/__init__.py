"""Run peft's LoRA on 4-bit linear layers as one autograd function, with ``enable(lora="fused")``.

* The *base product* is x [rows, in] times the base weight [out, in], transposed.
* The *factors* of an adapter are A [rank, in] and B [out, rank]. *z* is the adapter's input: x, or x after dropout.
* LoRA's product is scale * inner @ B.T, where *inner* is z @ A.T, [rows, rank].
* Factors are *wide* if they and their products are fp32 although x has 16 bits. In the kernels, a factor is WIDE if its
  layout is [rank, width], as that of A, and not [width, rank], as that of B.
* A *decision* is whether peft's forward or nf4_patch's function runs. The two save different tensors, so a recompute has
  to repeat the decision of its forward.
"""
