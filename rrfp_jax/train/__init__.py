"""Where models and runtime meet: optimizer, step loop, evaluation, checkpoints."""
