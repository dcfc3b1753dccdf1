"""The "quantized_comm" block: its keys, its presets and what is said about mistakes."""
