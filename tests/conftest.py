"""What every test starts from: eight CPU devices, set before JAX is first used."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
