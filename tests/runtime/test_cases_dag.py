"""Cases C13 to C15: skip edges, trees between stages, stages that are not visited."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax import Pipeline, Policy, Stage
from rrfp_jax.core import policies
from rrfp_jax.core.task import Kind, parse
from tests.runtime import scripted, toys

SKIP_EDGES = ((0, 1), (1, 2), (2, 3), (0, 3))
WEIGHTS = [{"w": 2.0}, {"w": 3.0}, {"w": -1.0}, {"w": 0.5, "u": 1.0}]


@pytest.fixture(scope="module")
def skip_edge():
    def first(params, inputs, feed):
        return params["w"] * feed["x"]

    def middle(params, inputs, feed):
        return params["w"] * inputs

    def last(params, inputs, feed):
        h2, h0 = inputs
        return 0.5 * (params["w"] * h2 + params["u"] * h0) ** 2

    params = jax.tree.map(np.float32, WEIGHTS)
    return Pipeline([first, middle, middle, last], params, edges=SKIP_EDGES), params


@pytest.mark.parametrize("hint", ["bf", "bfw"])
@pytest.mark.parametrize("late", [("3B0", 0), ("1B0", 0), ("0F0", 3), ("2F0", 3)])
def test_c13_both_ways_around_a_skip_edge_add_up(skip_edge, use_script, late, hint):
    """Whichever of the two cotangents of h0, or inputs of stage 3, comes last."""
    pipeline, params = skip_edge
    pipeline.policy = Policy(hint)
    message = (parse(late[0]), late[1])
    use_script(scripted.last(message))
    result = pipeline.run(params, [{"x": np.float32(1)}])
    assert result.loss == 0.5
    found = [jax.tree.map(float, tree) for tree in result.grads]
    expected = [{"w": 0.5}, {"w": 1.0}, {"w": -3.0}, {"w": 6.0, "u": -2.0}]
    assert found == expected
    to_same = [tuple(e.event) for e in result.trace.log if len(e.event) == 2]
    rivals = [e for e in to_same if e[1] == message[1] and e[0].kind == message[0].kind]
    assert rivals[-1] == message


def test_inputs_come_in_the_order_of_the_edges():
    """Not in the order of the stages; `None` keeps the place of a skipped source."""
    seen = []

    def source(params, inputs, feed):
        return feed["x"] * params["w"]

    def last(params, inputs, feed):
        seen.append([None if i is None else i.shape for i in inputs])
        return sum(jnp.sum(i) for i in inputs if i is not None)

    params = [{"w": np.float32(n)} for n in range(4)]
    pipeline = Pipeline(
        [
            source,
            Stage(source, select=lambda m: {"x": m["y"]}),
            Stage(source, select=lambda m: {"x": m["z"]}),
            last,
        ],
        params,
        edges=((2, 3), (0, 3), (1, 3)),
        skips=lambda m: m["skips"],
    )
    microbatch = {"x": np.ones(1), "y": np.ones(2), "z": np.ones(3)}
    whole = pipeline.run(params, [microbatch | {"skips": ()}])
    assert seen[-1] == [(3,), (1,), (2,)]
    assert whole.loss == 0 * 1 + 1 * 2 + 2 * 3
    part = pipeline.run(params, [microbatch | {"skips": (0,)}])
    assert seen[-1] == [(3,), None, (2,)]
    assert part.loss == 1 * 2 + 2 * 3


@pytest.fixture(scope="module")
def trees():
    """Three stages that hand on a tree; the last returns what it received."""

    def first(params, inputs, feed):
        return {
            "h": params["w"] * feed["x"],
            "mask": feed["x"] > 3,
            "pos": jnp.arange(3, dtype=jnp.int32),
            "aux": None,
            "n": 7,
        }

    def middle(params, inputs, feed):
        assert isinstance(inputs["n"], int)
        assert inputs["aux"] is None
        return inputs | {"h": inputs["h"] * params["w"]}

    def last(params, inputs, feed):
        weight = jnp.where(inputs["mask"], inputs["n"], inputs["pos"])
        return jnp.sum(weight * inputs["h"]), inputs

    return Pipeline([first, middle, last], [{"w": np.float32(2)}] * 2 + [{}])


@pytest.mark.parametrize("hint", ["bf", "bfw"])
def test_c14_a_tree_arrives_unchanged_and_only_floats_have_a_cotangent(
    trees, sent, hint
):
    trees.policy = Policy(hint)
    x = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    result = trees.run([{"w": np.float32(2)}, {"w": np.float32(3)}, {}], [{"x": x}])
    (arrived,) = result.aux
    toys.assert_same_bits(
        arrived,
        {
            "h": 6 * x,
            "mask": x > 3,
            "pos": np.arange(3, dtype=np.int32),
            "aux": None,
            "n": 7,
        },
    )
    assert isinstance(arrived["n"], int)
    weight = np.where(x > 3, 7, np.arange(3))
    assert float(result.grads[0]["w"]) == np.sum(weight * 3 * x)
    assert float(result.grads[1]["w"]) == np.sum(weight * 2 * x)
    shapes = {
        str(message.source): [(a.shape, str(a.dtype)) for a in payload]
        for message, payload in sent.items()
    }
    h = ((2, 3), "float32")
    forward = [h, ((2, 3), "bool"), ((3,), "int32")]
    assert shapes == {"0F0": forward, "1F0": forward, "2B0": [h], "1B0": [h]}


@pytest.mark.parametrize("hint", ["bf", "bfw"])
@pytest.mark.parametrize("payload", [None, 3, "text"])
def test_a_stage_may_hand_on_nothing_that_travels(payload, sent, hint):
    """An empty message still tells that the stage has run."""

    def last(params, inputs, feed):
        assert inputs == payload
        return jnp.sum(params["w"] * feed["x"])

    params = [{"w": np.float32(2)}, {"w": np.float32(3)}]
    stages = [lambda params, inputs, feed: payload, last]
    pipeline = Pipeline(stages, params, policy=Policy(hint))
    loss, grads = pipeline.loss_and_grad(params, [{"x": np.ones(4, np.float32)}])
    assert loss == 12.0
    assert [float(tree["w"]) for tree in grads] == [0.0, 4.0]
    assert list(sent.values()) == [[], []]


def tower(params, inputs, feed):
    return jnp.tanh(feed["image"] @ params["w"])


def projector(params, inputs, feed):
    return inputs @ params["w"]


def text(params, inputs, feed):
    return feed["text"] @ params["w"]


def language(params, inputs, feed):
    from_image, from_text = inputs
    h = from_text if from_image is None else from_image + from_text
    return jnp.sum(jnp.tanh(h @ params["w"]) ** 2)


TOWER_EDGES = ((0, 1), (1, 3), (2, 3))


def vision_language(is_frozen, placement):
    stages = [Stage(tower, frozen=is_frozen), projector, text, language]
    draw = np.random.default_rng(0)
    params = [{"w": draw.normal(size=(4, 4)).astype(np.float32)} for _ in stages]
    pipeline = Pipeline(
        stages,
        params,
        edges=TOWER_EDGES,
        placement=placement,
        skips=lambda m: () if "image" in m else (0, 1),
    )
    return pipeline, params


def microbatches_with(images):
    draw = np.random.default_rng(1)
    found = []
    for j in range(4):
        microbatch = {"text": draw.normal(size=(2, 4)).astype(np.float32)}
        image = draw.normal(size=(2, 4)).astype(np.float32)
        found.append(microbatch | ({"image": image} if j in images else {}))
    return found


def expected_of(params, microbatches):
    def total(params):
        stages = [tower, projector, text, language]
        return sum(
            toys.run_stages(
                stages, TOWER_EDGES, params, m, () if "image" in m else (0, 1)
            )
            for m in microbatches
        )

    return jax.value_and_grad(total)(params)


@pytest.fixture(scope="module", params=[(0, 1, 2, 3), (0, 1, 0, 1)], ids=str)
def trainable(request):
    return vision_language(False, request.param)


@pytest.fixture(scope="module")
def frozen():
    return vision_language(True, (0, 1, 0, 1))


@pytest.mark.parametrize("hint", [*policies.RULES, "gpipe"])
@pytest.mark.parametrize("images", [(0, 2), (), (0, 1, 2, 3)], ids=str)
def test_c15_microbatches_without_images_skip_the_tower(trainable, hint, images):
    pipeline, params = trainable
    pipeline.policy = Policy(hint)
    microbatches = microbatches_with(images)
    result = pipeline.run(params, microbatches)
    toys.assert_close(
        (result.loss, list(result.grads)), expected_of(params, microbatches)
    )
    ran = {span.task for span in result.trace.spans}
    assert {t.microbatch for t in ran if t.stage < 2} == set(images)
    kinds = 3 if pipeline.policy.is_split else 2
    assert len(ran) == kinds * (2 * 4 + 2 * len(images))
    if not images:
        assert not np.any(result.grads[0]["w"])


@pytest.mark.parametrize("hint", ["bf", "bfw"])
def test_c15_a_frozen_tower_has_no_backward_and_no_gradient(frozen, hint):
    pipeline, params = frozen
    pipeline.policy = Policy(hint)
    microbatches = microbatches_with((0, 2))
    result = pipeline.run(params, microbatches)
    assert result.grads[0] == {"w": None}
    loss, grads = expected_of(params, microbatches)
    toys.assert_close((result.loss, list(result.grads[1:])), (loss, grads[1:]))
    ran = {span.task for span in result.trace.spans}
    assert {str(t) for t in ran if t.stage == 0} == {"0F0", "0F2"}
    weights = {"1W0", "1W2"} if hint == "bfw" else set()
    assert {str(t) for t in ran if t.stage == 1} == {
        "1F0",
        "1F2",
        "1B0",
        "1B2",
    } | weights
    cotangents = {t.to for t in result.trace.transfers if t.source.kind is Kind.B}
    assert 0 not in cotangents


@pytest.mark.parametrize("hint", ["bf", "bfw"])
def test_c15_a_frozen_stage_in_between_hands_the_cotangent_on(hint):
    """Trainable, frozen, trainable: the frozen one has a B, and no W."""
    toy = toys.TOYS["one_each"]
    stages = [toys.hidden, Stage(toys.hidden, frozen=True), toys.hidden, toys.loss]
    params = toy.params()
    pipeline = Pipeline(stages, params, policy=Policy(hint))
    result = pipeline.run(params, toys.microbatches_of(2))
    loss, grads = result.loss, result.grads
    weights = {s.task.stage for s in result.trace.spans if s.task.kind is Kind.W}
    assert weights == ({0, 2, 3} if hint == "bfw" else set())
    expected_loss, expected = toys.reference(toy, params, toys.batch_of(4))
    assert grads[1] == {"w": None, "b": None}
    toys.assert_close(loss, expected_loss)
    others = [0, 2, 3]
    toys.assert_close([grads[s] for s in others], [expected[s] for s in others])


def test_frozen_keys_have_no_gradient_and_the_other_keys_theirs():
    toy = toys.TOYS["one_each"]
    params = toy.params()
    stages = [Stage(toys.hidden, frozen={"b"}) for _ in range(3)]
    stages += [Stage(toys.loss, frozen=["w"])]
    grads = Pipeline(stages, params).loss_and_grad(params, toys.microbatches_of(2))[1]
    _, expected = toys.reference(toy, params, toys.batch_of(4))
    for s, frozen_key in enumerate(["b", "b", "b", "w"]):
        trained_key = "w" if frozen_key == "b" else "b"
        assert grads[s][frozen_key] is None
        toys.assert_close(grads[s][trained_key], expected[s][trained_key])


def test_a_pipeline_with_nothing_to_train_only_evaluates():
    toy = toys.TOYS["one_each"]
    stages = [Stage(fn, frozen=True) for fn in toy.stages]
    pipeline = Pipeline(stages, toy.params())
    result = pipeline.run(toy.params(), toys.microbatches_of(2))
    expected, _ = toys.reference(toy, toy.params(), toys.batch_of(4))
    toys.assert_close(result.loss, expected)
    assert all(set(tree.values()) == {None} for tree in result.grads)
    assert {span.task.kind for span in result.trace.spans} == {Kind.F}
