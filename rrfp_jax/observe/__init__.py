"""What people look at: pictures, traces, metrics, progress. No JAX, no training."""
