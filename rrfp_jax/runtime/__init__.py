"""Where the core meets JAX: stage programs, executor, devices, the pipeline object."""
