"""``enable(graphs="auto")``: decoder layers run as CUDA graphs, so that a training step does not wait for Python."""
