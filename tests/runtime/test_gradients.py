"""Loss and gradients equal the reference under every policy on every topology."""

import itertools

import pytest

from rrfp_jax.core import order_csv, orders, policies
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError
from tests.runtime import toys

COUNT = 4
# Where several stages share a rank other than round-robin, and 1F1B does not exist.
WITHOUT_1F1B = ("two_stages_a_rank", "v_shaped", "tower_on_ranks_of_another")
WITHOUT_ZB_H = (*WITHOUT_1F1B, "interleaved")
WITH_A_V = ("v_shaped",)
HINTS = (*policies.RULES, *policies.ORDERS, "csv")
CHOICES = [
    *itertools.product(HINTS, ["readiness"], ["reserving"]),
    *itertools.product(policies.RULES, ["readiness"], ["one_by_one"]),
    *itertools.product(HINTS, ["fixed", "opportunistic"], ["reserving"]),
]


@pytest.fixture
def policy_of(tmp_path):
    """Makes policies; the hint "csv" becomes a file with another legal order."""

    def make(name, hint, **fields):
        if hint == "csv":
            graph = toys.compiled(name).graph([()] * COUNT)
            backwards = [[t for t in o if t.kind == "B"] for o in orders.gpipe(graph)]
            forwards = [[t for t in o if t.kind == "F"] for o in orders.gpipe(graph)]
            hint = str(tmp_path / "order.csv")
            (tmp_path / "order.csv").write_text(
                order_csv.to_csv(
                    [
                        sorted(f, key=lambda t: (-t.microbatch, t.stage))
                        + sorted(b, key=lambda t: (t.microbatch, -t.stage))
                        for f, b in zip(forwards, backwards, strict=True)
                    ]
                )
            )
        return Policy(hint=hint, **fields)

    return make


def is_defined(name, hint, order):
    """Whether the order that the hint names exists for a topology."""
    if hint in policies.RULES and order != "readiness":
        hint = "1f1b"
    match hint:
        case "1f1b" | "deep_1f1b" | "eager_1f1b":
            return name not in WITHOUT_1F1B
        case "zb_h1" | "zb_h2":
            return name not in WITHOUT_ZB_H
        case "zb_v" | "v_half":
            return name in WITH_A_V
    return True


@pytest.mark.parametrize(
    ("hint", "order", "pressure"), CHOICES, ids=["-".join(c) for c in CHOICES]
)
@pytest.mark.parametrize("name", toys.TOYS)
def test_loss_and_gradients_are_those_of_one_process(
    name, hint, order, pressure, policy_of
):
    pipeline, params = toys.compiled(name), toys.TOYS[name].params()
    pipeline.policy = policy_of(name, hint, order=order, back_pressure=pressure)
    microbatches = toys.microbatches_of(COUNT)
    if not is_defined(name, hint, order):
        with pytest.raises(ConfigError, match="is not defined for placement"):
            pipeline.run(params, microbatches)
        return
    loss, grads = pipeline.loss_and_grad(params, microbatches, scale=0.25)
    toys.assert_close((loss, list(grads)), toys.expected(name, COUNT, 0.25))


@pytest.mark.parametrize(
    "fields", [{"split": "always"}, {"deterministic": True}], ids=str
)
@pytest.mark.parametrize(
    ("hint", "order"), [("bf", "readiness"), ("gpipe", "fixed"), ("csv", "fixed")]
)
@pytest.mark.parametrize("name", toys.TOYS)
def test_a_split_backward_gives_the_same_gradients_under_any_hint(
    name, hint, order, fields, policy_of
):
    pipeline, params = toys.compiled(name), toys.TOYS[name].params()
    pipeline.policy = policy_of(name, hint, order=order, **fields)
    result = pipeline.run(params, toys.microbatches_of(COUNT), scale=0.25)
    found = (result.loss, list(result.grads))
    toys.assert_close(found, toys.expected(name, COUNT, 0.25))
    kinds = [span.task.kind for span in result.trace.spans]
    assert kinds.count(Kind.W) == COUNT * len(params)


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("pressure", policies.PRESSURES)
@pytest.mark.parametrize("launch_ahead", [1, 3])
@pytest.mark.parametrize("hint", ["bf", "bfw"])
@pytest.mark.parametrize("name", toys.TOYS)
def test_limits_and_launch_ahead_do_not_change_the_gradients(
    name, hint, limit, pressure, launch_ahead
):
    pipeline = toys.compiled(name)
    pipeline.policy = Policy(
        hint,
        in_flight_limit=limit,
        weight_limit=limit,
        back_pressure=pressure,
        launch_ahead=launch_ahead,
    )
    loss, grads = pipeline.loss_and_grad(
        toys.TOYS[name].params(), toys.microbatches_of(COUNT), scale=0.25
    )
    toys.assert_close((loss, list(grads)), toys.expected(name, COUNT, 0.25))


@pytest.mark.parametrize("hint", ["bf", "bfw", "gpipe"])
@pytest.mark.parametrize("name", ["single_stage", "interleaved", "skip_edges"])
def test_evaluation_has_the_same_losses_and_no_gradient(name, hint):
    pipeline, params = toys.compiled(name), toys.TOYS[name].params()
    pipeline.policy = Policy(hint, deterministic=hint == "gpipe")
    trained = pipeline.run(params, toys.microbatches_of(COUNT), 0.25)
    result = pipeline.run(params, toys.microbatches_of(COUNT), 0.25, backward=False)
    toys.assert_close(result.losses, trained.losses, 1e-6)
    assert result.grads == ()
    assert len(result.trace.spans) == COUNT * len(params)


@pytest.mark.parametrize(
    ("name", "hint"), [("one_each", "zb_h1"), ("v_shaped", "zb_v")]
)
def test_evaluation_runs_the_forwards_of_a_zero_bubble_order(name, hint):
    pipeline, params = toys.compiled(name), toys.TOYS[name].params()
    pipeline.policy = Policy(hint, "fixed")
    result = pipeline.run(params, toys.microbatches_of(COUNT), backward=False)
    assert {span.task.kind for span in result.trace.spans} == {Kind.F}


def test_readiness_and_fixed_order_give_the_same_loss_curve_bit_by_bit():
    """20 steps of gradient descent on a chain, BF against fixed 1F1B."""
    toy, pipeline = toys.TOYS["one_each"], toys.compiled("one_each")
    curves, ends = [], []
    for policy in (Policy("bf"), Policy("1f1b", order="fixed")):
        pipeline.policy, params, curve = policy, toy.params(), []
        for step in range(20):
            microbatches = toys.microbatches_of(COUNT, seed=step % 3)
            loss, grads = pipeline.loss_and_grad(params, microbatches, 1 / 8)
            params = toys.sgd(params, grads, 0.3)
            curve.append(loss)
        curves.append(curve)
        ends.append(params)
    assert curves[0] == curves[1]
    assert curves[0][-3] < 0.8 * curves[0][0]
    toys.assert_same_bits(*ends)
