"""What torch's own operations are slow at on a CPU, in C: compiled on the machine that runs it, once."""
