"""Decoder layers as CUDA graphs, with ``enable(graphs="auto")``: a training step that does not wait for Python."""
