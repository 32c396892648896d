"""Configs that no model can be built from are refused, with the flag to change."""

import pytest

from rrfp_jax import errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, r"vocab_size=0 is not positive"),
        ({"num_layers": -1}, r"num_layers=-1 is not positive"),
        ({"norm_eps": 0.0}, r"norm_eps=0.0 is not positive"),
        ({"num_kv_heads": 3}, r"num_kv_heads=3 does not divide num_heads=4"),
        ({"head_dim": 5}, r"head_dim=5 is odd"),
        ({"dropout": 1.0}, r"dropout=1.0 is not a rate"),
        ({"compute_dtype": "float16"}, r"compute_dtype='float16' is unknown"),
        ({"kind": "gpt3", "num_kv_heads": 2}, r"num_kv_heads=2 differs from"),
        ({"kind": "gpt3", "qk_norm": True}, r"qk_norm=True is for kind=llama only"),
    ],
)
def test_a_bad_language_config_names_its_flag(make_language, changes, message):
    field = message.split("=")[0]
    with pytest.raises(errors.ConfigError, match=message) as caught:
        make_language(**changes)
    assert f"Set --config.model.language.{field} to " in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 0}, r"patch_size=0 is not positive"),
        ({"num_heads": 3}, r"num_heads=3 does not divide width=8"),
        ({"image_size": (4, 5)}, r"image_size=\(4, 5\) is not two positive multiples"),
        ({"image_size": (4,)}, r"image_size=\(4,\) is not two positive multiples"),
        ({"dropout": -0.1}, r"dropout=-0.1 is not a rate"),
    ],
)
def test_a_bad_vision_config_names_its_flag(make_vision, changes, message):
    field = message.split("=")[0]
    with pytest.raises(errors.ConfigError, match=message) as caught:
        make_vision(**changes)
    assert f"Set --config.model.vision.{field} to " in str(caught.value)


def test_an_unknown_kind_lists_the_known_ones(make_language):
    spec = make_language()
    with pytest.raises(errors.ConfigError, match="one of 'llama', 'gpt3'"):
        type(spec)(**{**vars(spec), "kind": "mamba"})
