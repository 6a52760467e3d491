"""The cost of a plan before anything is trained: parameters, bytes, FLOPs, memory and time."""
