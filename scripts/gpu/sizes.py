"""How large the checks are: whole on a GPU, cut down on a CPU, tiny for tests."""

import dataclasses

from rrfp_jax.models.config import LanguageConfig, VisionConfig

# A layer of Qwen3-1.7B (arXiv:2505.09388): 28 of them make the model.
QWEN3 = LanguageConfig(
    vocab_size=8192,
    num_layers=1,
    width=2048,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    mlp_width=6144,
    max_length=4096,
    qk_norm=True,
    norm_eps=1e-6,
    rope_theta=1e6,
    compute_dtype="bfloat16",
)
_SMALL = LanguageConfig(
    vocab_size=256,
    num_layers=2,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_width=128,
    max_length=64,
    qk_norm=True,
)


@dataclasses.dataclass(frozen=True)
class Text:
    """A language model and its steps.

    Attributes:
      language: the model.
      rows: of a microbatch.
      length: of a row, in tokens.
      num_microbatches: of a step.
    """

    language: LanguageConfig
    rows: int
    length: int
    num_microbatches: int

    def __str__(self) -> str:
        """Its numbers."""
        model = self.language
        return (
            f"{model.num_layers} blocks of width {model.width}, "
            f"{self.num_microbatches} microbatches of {self.rows} x {self.length} "
            "tokens"
        )


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of all checks.

    Attributes:
      name: of them.
      gradients: the language model of the gradient check.
      vision: the tower in front of it, for its vision-language model, whose language
        part has as many blocks less as the tower has.
      layer: the model whose blocks are timed.
      layer_tokens: on rows of how many.
      orders: what BF, BFW and 1F1B run.
      tiny_microbatches: of the step that measures the host.
      repeats: of a timing.
      payload_mib: what is moved.
      memory_gib: what the device must let JAX have; 0 for any.
      host_limit_us: host time of a task.
      time_limit: B and W over the whole backward.
      order_limit: the time of a step over that of a plain loop.
    """

    name: str
    gradients: Text
    vision: VisionConfig
    layer: LanguageConfig
    layer_tokens: tuple[int, ...]
    orders: Text
    tiny_microbatches: int
    repeats: int
    payload_mib: tuple[int, ...]
    memory_gib: float
    host_limit_us: float
    time_limit: float
    order_limit: float

    def __str__(self) -> str:
        """What is run, a line a check."""
        layer = self.layer
        payloads = ", ".join(map(str, self.payload_mib))
        return (
            f"gradients: {self.gradients}, and with images\n"
            f"layer: width {layer.width}, {layer.num_heads} heads and "
            f"{layer.num_kv_heads} key heads of {layer.head_dim}, mlp "
            f"{layer.mlp_width}, {layer.compute_dtype}\n"
            f"orders: {self.orders}, {self.orders.language.compute_dtype}\n"
            f"transfers: {payloads} MiB"
        )


def _vision(image: int, patch: int, width: int, num_layers: int) -> VisionConfig:
    return VisionConfig((image, image), 3, patch, width, num_layers, 4, 2 * width)


GPU = Size(
    name="gpu",
    gradients=Text(
        dataclasses.replace(
            _SMALL, num_layers=4, vocab_size=1024, width=256, head_dim=64,
            mlp_width=512, max_length=256,
        ),
        rows=2,
        length=256,
        num_microbatches=8,
    ),
    vision=_vision(64, 8, 128, 2),
    layer=QWEN3,
    layer_tokens=(1024, 2048, 4096),
    orders=Text(
        dataclasses.replace(QWEN3, num_layers=8),
        rows=1,
        length=1024,
        num_microbatches=16,
    ),
    tiny_microbatches=64,
    repeats=9,
    payload_mib=(1, 16, 256),
    memory_gib=32,
    host_limit_us=300,
    time_limit=1.10,
    order_limit=1.15,
)  # fmt: skip

CPU = Size(
    name="cpu",
    gradients=Text(_SMALL, rows=2, length=32, num_microbatches=8),
    vision=_vision(16, 4, 32, 1),
    layer=dataclasses.replace(
        QWEN3,
        width=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        mlp_width=768,
        compute_dtype="float32",  # a CPU computes in bfloat16 by way of float32
    ),
    layer_tokens=(256, 512),
    orders=Text(
        dataclasses.replace(_SMALL, width=128, head_dim=32, mlp_width=256),
        rows=2,
        length=64,
        num_microbatches=16,
    ),
    tiny_microbatches=64,
    repeats=9,
    payload_mib=(1, 16, 256),
    memory_gib=0,
    host_limit_us=600,  # other processes share the cores
    time_limit=1.25,
    order_limit=2.0,
)

_LEAST = dataclasses.replace(
    _SMALL, num_layers=2, width=16, num_heads=2, num_kv_heads=1, head_dim=8,
    mlp_width=16, vocab_size=64,
)  # fmt: skip

TINY = Size(
    name="tiny",
    gradients=Text(_LEAST, rows=2, length=8, num_microbatches=4),
    vision=_vision(4, 2, 16, 1),
    layer=_LEAST,
    layer_tokens=(32,),
    orders=Text(_LEAST, rows=1, length=16, num_microbatches=4),
    tiny_microbatches=8,
    repeats=3,
    payload_mib=(1,),
    memory_gib=0,
    host_limit_us=1e5,  # a test of the script is none of the machine
    time_limit=100,
    order_limit=100,
)
