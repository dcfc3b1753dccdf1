"""Parts that DeepSpeed's front (zero) and FSDP2's (fsdp2) share; knows neither."""
