"""The six workloads of the RRFP paper, from their real dimensions.

    configs/bench/workloads.py:gpt3_large    (and the other variants, below)

Sources of the dimensions: GPT-3 Large, arXiv:2005.14165 table 2.1; Qwen3,
arXiv:2505.09388 table 1 and the models' published configs; LLaMA 3, arXiv:2407.21783
table 3; ViT-L and ViT-H/14, arXiv:2010.11929 table 1; ViT-g, arXiv:2106.04560 table 2;
"ViT-Big" taken as ViT-bigG/14, github.com/mlfoundations/open_clip; InternViT-6B,
arXiv:2312.14238 table 2; ViT-22B, arXiv:2302.05442 table 1. "ViT-5B" is nobody's
published model: taken as 44 blocks of width 3072.

Assumed, since the paper does not say: rows of 2048 tokens for GPT-3; images of 224 x
224 pixels, whose patches take a quarter as many places in a row; all layers trained,
none recomputed; stages cut evenly by FLOPs, never across towers.

The machine and its variation are one for all rows, fitted to the 1F1B and ZB columns of
the paper's Tables 1 and 2 and to nothing else, `scripts/bench/fit_workloads.py`; its
transfers block both ranks, as those systems' do. RRFP's columns took no part.
"""

import ml_collections

_ROWS = {  # (table, tensor, ranks, replicas, batch)
    "gpt3_large": (
        (1, 1, 8, 1, 64),
        (1, 1, 16, 1, 64),
        (1, 2, 8, 1, 64),
        (1, 2, 16, 1, 64),
    ),
    "qwen3_1_7b_vit_h": (
        (1, 1, 8, 1, 192),
        (1, 1, 16, 1, 192),
        (1, 2, 8, 1, 192),
        (1, 2, 16, 1, 192),
    ),
    "qwen3_4b_vit_big": (
        (1, 1, 8, 1, 192),
        (1, 1, 16, 1, 192),
        (1, 2, 8, 1, 96),
        (1, 2, 16, 1, 96),
    ),
    "llama3_8b_vit_5b": ((2, 1, 32, 1, 64), (2, 2, 16, 1, 64), (2, 2, 8, 2, 64)),
    "qwen3_32b_internvit": (
        (2, 1, 64, 1, 64),
        (2, 2, 32, 1, 64),
        (2, 2, 16, 2, 64),
    ),
    "llama3_70b_vit_22b": ((2, 2, 64, 1, 64), (2, 2, 32, 2, 64)),
}
_NAMES = {
    "gpt3_large": "GPT3-Large",
    "qwen3_1_7b_vit_h": "Qwen3-1.7B+ViT-H",
    "qwen3_4b_vit_big": "Qwen3-4B+ViT-Big",
    "llama3_8b_vit_5b": "LLaMA3-8B+ViT-5B",
    "qwen3_32b_internvit": "Qwen3-32B+InternViT",
    "llama3_70b_vit_22b": "LLaMA3-70B+ViT-22B",
}

VARIANTS = tuple(_ROWS)


def get_config(variant: str = "gpt3_large") -> ml_collections.ConfigDict:
    """Returns the workload: one of VARIANTS, or another language model and tower."""
    name = next((n for n in _LANGUAGE if variant.startswith(n)), "")
    tower = variant[len(name) :].removeprefix("_")
    if not name or tower not in ("", *_VISION):
        raise ValueError(
            f"{variant!r} is none of {', '.join(VARIANTS)}, nor another language model "
            f"of {', '.join(_LANGUAGE)} with a tower of {', '.join(_VISION)}"
        )
    config = ml_collections.ConfigDict()
    config.name = _NAMES.get(variant, variant)
    config.rows = _ROWS.get(variant, ())
    config.machine = {
        "tflops": 109.0,  # of an RTX 4090 in float16, of 165 at the most
        "layer_ms": 1.05,
        "tensor_gb_per_s": 7.2,  # all-reduce over PCIe, without peer-to-peer
        "link_gb_per_s": 3.2,  # between ranks, through the hosts
        "link_ms": 1.45,
    }
    config.variation = {
        "compute_cv": 0.22,
        "transfer_cv": 2.4,
        "image_cv": 0.68,
    }
    config.model = {
        "language": _LANGUAGE[name],
        "vision": None,
        "tokens": 2048,
        "images": 1.0,
    }
    if tower:
        image = {"image_size": (224, 224), "channels": 3, "patch_size": 14}
        config.model.vision = ml_collections.ConfigDict(_VISION[tower] | image)
        config.model.update({"tokens": 832, "images": 3.25})
    return config


def _language(
    layers: int, width: int, heads: int, kv_heads: int, head: int, mlp: int, vocab: int
) -> dict[str, int]:
    return {
        "num_layers": layers,
        "width": width,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head,
        "mlp_width": mlp,
        "vocab_size": vocab,
        "max_length": 2048,
    }


def _vision(layers: int, width: int, heads: int, mlp: int) -> dict[str, int]:
    return {"num_layers": layers, "width": width, "num_heads": heads, "mlp_width": mlp}


_LANGUAGE = {
    "gpt3_large": {
        "kind": "gpt3",
        **_language(24, 1536, 16, 16, 96, 6144, 50_257),
    },
    "qwen3_1_7b": _language(28, 2048, 16, 8, 128, 6144, 151_936),
    "qwen3_4b": _language(36, 2560, 32, 8, 128, 9728, 151_936),
    "qwen3_32b": _language(64, 5120, 64, 8, 128, 25_600, 151_936),
    "llama3_8b": _language(32, 4096, 32, 8, 128, 14_336, 128_256),
    "llama3_70b": _language(80, 8192, 64, 8, 128, 28_672, 128_256),
}
_VISION = {
    "vit_l": _vision(24, 1024, 16, 4096),
    "vit_h": _vision(32, 1280, 16, 5120),
    "vit_g": _vision(40, 1408, 16, 6144),
    "vit_big": _vision(48, 1664, 16, 8192),
    "vit_5b": _vision(44, 3072, 24, 12_288),
    "internvit": _vision(48, 3200, 25, 12_800),
    "vit_22b": _vision(48, 6144, 48, 24_576),
}
