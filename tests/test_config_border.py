"""A ConfigDict becomes a frozen dataclass, or one message that says what to change."""

import dataclasses
import enum

import ml_collections
import pytest

from rrfp_jax import config_border, errors


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise errors.ConfigError(
                f"inner.rate={self.rate} is negative.\n"
                "  Set --config.inner.rate to 0 or more."
            )


@dataclasses.dataclass(frozen=True)
class Outer:
    count: int
    inner: Inner
    is_on: bool = True
    colour: Colour = Colour.RED
    size: tuple[int, int] = (1, 1)
    path: str | None = None
    spare: Inner | None = None


def config(**changes: object) -> ml_collections.ConfigDict:
    values: dict[str, object] = {"count": 3, "inner": {"rate": 0.5}, **changes}
    return ml_collections.ConfigDict(values)


def test_a_whole_config_becomes_dataclasses():
    given = config(
        inner={"rate": 2, "names": ["a", "b"]},
        is_on=False,
        colour="blue",
        size=[8, 16],
        path="x",
        spare={"rate": 1.0},
    )
    made = config_border.from_config_dict(Outer, given)
    assert made == Outer(
        3, Inner(2.0, ("a", "b")), False, Colour.BLUE, (8, 16), "x", Inner(1.0)
    )
    assert type(made.inner.rate) is float
    assert isinstance(made.colour, Colour)


def test_absent_keys_keep_the_defaults_of_the_dataclass():
    made = config_border.from_config_dict(Outer, config(path=None, spare=None))
    assert made == Outer(3, Inner(0.5))


FIELDS = "count, inner, is_on, colour, size, path, spare."


@pytest.mark.parametrize(
    ("changes", "problem", "remedy"),
    [
        (
            {"count": "three"},
            "pipeline.count='three' is of type str.",
            "Set --config.pipeline.count to an int.",
        ),
        (
            {"count": True},
            "pipeline.count=True is of type bool.",
            "Set --config.pipeline.count to an int.",
        ),
        (
            {"count": 3.0},
            "pipeline.count=3.0 is of type float.",
            "Set --config.pipeline.count to an int.",
        ),
        (
            {"is_on": 1},
            "pipeline.is_on=1 is of type int.",
            "Set --config.pipeline.is_on to True or False.",
        ),
        (
            {"inner": {"rate": False}},
            "pipeline.inner.rate=False is of type bool.",
            "Set --config.pipeline.inner.rate to a float.",
        ),
        (
            {"inner": {"rate": 1.0, "names": ("a", 2)}},
            "pipeline.inner.names[1]=2 is of type int.",
            "Make that entry of --config.pipeline.inner.names a str.",
        ),
        (
            {"inner": {"rate": 1.0, "names": "ab"}},
            "pipeline.inner.names='ab' is of type str.",
            "Set --config.pipeline.inner.names to a tuple, each entry a str.",
        ),
        (
            {"inner": 3},
            "pipeline.inner=3 is of type int.",
            "Set --config.pipeline.inner to a group of settings (a ConfigDict).",
        ),
        (
            {"inner": {"rate": -1.0}},
            "inner.rate=-1.0 is negative.",
            "Set --config.inner.rate to 0 or more.",
        ),
        (
            {"inner": {}},
            "pipeline.inner.rate is missing.",
            "Add it to the config file, or set --config.pipeline.inner.rate.",
        ),
        (
            {"colour": "green"},
            "pipeline.colour='green' is unknown.",
            "Set --config.pipeline.colour to one of red, blue.",
        ),
        (
            {"size": (1, 2, 3)},
            "pipeline.size=(1, 2, 3) has 3 entries, not 2.",
            "Set --config.pipeline.size to a tuple of (an int, an int).",
        ),
        (
            {"path": 3},
            "pipeline.path=3 is of type int.",
            "Set --config.pipeline.path to a str.",
        ),
        (
            {"cuont": 3},
            "pipeline.cuont is not a setting.",
            "Did you mean --config.pipeline.count? Settings of config.pipeline: "
            + FIELDS,
        ),
    ],
)
def test_each_mistake_has_its_message(changes, problem, remedy):
    with pytest.raises(errors.ConfigError) as raised:
        config_border.from_config_dict(Outer, config(**changes), "pipeline")
    assert str(raised.value) == f"{problem}\n  {remedy}"


def test_the_whole_config_has_no_path():
    with pytest.raises(errors.ConfigError) as raised:
        config_border.from_config_dict(Outer, config(q=3))
    assert str(raised.value) == f"q is not a setting.\n  Settings of config: {FIELDS}"
    with pytest.raises(errors.ConfigError, match=r"^config=3 .*\n  Set --config to a"):
        config_border.from_config_dict(Outer, 3)


def test_a_field_that_no_config_can_give_is_our_bug():
    @dataclasses.dataclass
    class Odd:
        when: complex = 0j

    with pytest.raises(TypeError, match="when is declared"):
        config_border.from_config_dict(Odd, {"when": 1})
