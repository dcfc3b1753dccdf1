"""DeepSpeed's tests of ZeRO: the pytest plugin, the ranks, the files, the explanations."""
