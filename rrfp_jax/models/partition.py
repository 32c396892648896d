"""How parameters are split over the mesh axis "model": Megatron's scheme.

A column-parallel map splits its outputs, the row-parallel map after it splits its
inputs, and one all-reduce follows the pair; embedding and head split the vocabulary
(arXiv:1909.08053 §3). XLA inserts the communication; here are only the names.
"""

from jax.sharding import PartitionSpec

REPLICATED = PartitionSpec()
ROWS = PartitionSpec("model", None)
COLUMNS = PartitionSpec(None, "model")
FEATURES = PartitionSpec("model")
