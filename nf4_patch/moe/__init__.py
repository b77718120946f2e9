"""The forward and backward of experts that are packed in 4 bits, for the option ``experts="4bit"``.

* A *stack* holds one weight, such as down_proj, of all experts in a layer, [experts, ...]. It is packed or dense.
* A *row* is one token at one of its ``top_k`` experts. Rows are sorted by expert.
* A row's *slot*, token * top_k + k, is its index before sorting, and the index of its router weight.
* A *grouped product* multiplies the rows of each expert by the expert's weight.
* The *frozen product* is the grouped product with the stack itself, without LoRA. LoRA's product, with its *factors*
  left and right, is added to it.
* A *wrapper* holds the LoRA factors of one stack. The wrappers whose forward is running are *active*.
"""
