"""What may run, what should run first, what has run. Pure: no JAX, no clock."""
