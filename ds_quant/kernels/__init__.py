"""Kernels of the codecs: the torch reference, which is the specification, and its fast twins."""
