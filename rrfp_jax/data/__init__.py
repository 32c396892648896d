"""From users' files to the padded arrays of one microbatch: grain, numpy, no JAX.

`dataset.open_data` is the entry; `config.DataConfig` is what it reads. Nothing here
knows a model, a stage or a device.
"""
