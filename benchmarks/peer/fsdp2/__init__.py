"""torch's tests of FSDP2: the pytest plugin, the files, the explanations."""
