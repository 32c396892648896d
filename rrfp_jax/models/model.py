"""From a config to a model: names, global indices, towers and ties."""

from rrfp_jax.models import blueprint, config, language, layer, vision


def build(
    language_config: config.LanguageConfig, vision_config: config.VisionConfig | None
) -> layer.Model:
    """Builds a language model, with a vision tower in front of it if configured.

    The vision tower is "vision/patch_embed", "vision/block_00", ..., "projector" and
    feeds into "language"; that one is "language/embed", "language/block_00", ...,
    "language/head". Nothing is allocated.
    """
    towers = []
    num_layers = 0
    if vision_config is not None:
        named = vision.blueprints(vision_config, language_config.width)
        towers.append(layer.Tower("vision", _layers(named, 0), "language"))
        num_layers = len(named)
    named = language.blueprints(language_config, vision_config is not None)
    towers.append(layer.Tower("language", _layers(named, num_layers), None))
    tie = ("language/embed", "embedding"), ("language/head", "embedding")
    return layer.Model(tuple(towers), (tie,) if language_config.tied else ())


def _layers(
    named: list[tuple[str, blueprint.Blueprint]], first_index: int
) -> tuple[layer.Layer, ...]:
    return tuple(
        plan.to_layer(name, index)
        for index, (name, plan) in enumerate(named, start=first_index)
    )
