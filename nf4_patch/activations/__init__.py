"""Keep the activations of checkpointed decoder layers while memory is spare: ``enable(activations="auto")``."""
