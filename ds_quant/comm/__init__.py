"""Quantized collectives over torch process groups; nothing here knows DeepSpeed's optimizers."""
