"""What may run, what should run first, and what has run. Pure Python, no JAX, no clock."""
