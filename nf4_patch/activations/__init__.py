"""Keep the activations of checkpointed decoder layers while memory is spare: ``enable(activations="auto")``.

* A layer is *kept* in a call if it runs without its checkpoint, so that its backward recomputes nothing.
* A layer's *size* is the bytes that a kept call holds until its backward. It is *measured* in a recompute, which holds
  the same tensors, and again in kept calls. For an unmeasured input, it is *estimated* from larger inputs.
* Activations are *waiting* until their backward begins or their autograd graph is freed.
* The *budget* is the most bytes per GPU of waiting activations. With "auto", it is part of the spare memory (memory/).
"""
