"""The "quantized_comm" block: its keys, its presets and the messages about mistakes."""
