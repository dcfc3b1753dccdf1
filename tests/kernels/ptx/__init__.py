"""Executes the PTX that NVRTC makes of the CUDA sources, in NumPy, without a GPU.

``program`` parses the text. ``operations`` turns every instruction into a function that reads and
writes registers; ``arithmetic`` has what they compute. ``machine`` runs them with one lane per CUDA
thread, ``memory`` is the memory of a launch, and ``runner`` launches tables of jobs as
ds_quant.kernels.cuda.Runner does.

Covered: the compiler's front end, its optimizations, the arithmetic of every instruction, diverging
branches, shuffles, barriers, and races in shared memory. Not covered: ptxas, races in global
memory, speed.
"""
