"""The option ``graphs="auto"``: run decoder layers as CUDA graphs, so that the GPU does not wait for Python."""
