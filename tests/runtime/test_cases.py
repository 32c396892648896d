"""Cases C01 to C12 of shared/cases/README.md, as far as one process can show them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax import Pipeline, Policy, Stage, split
from rrfp_jax.core import policies
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime import placing
from tests.runtime import toys

V_ORDERS = ("zb_v", "v_half")
HINTS = tuple(h for h in policies.RULES + policies.ORDERS if h not in V_ORDERS)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_c01_few_microbatches_are_enough_for_every_hint(count):
    toy, four = toys.TOYS["one_each"], toys.compiled("one_each")
    expected = toys.expected("one_each", count)
    for hint, order in itertools.product(HINTS, policies.MODES):
        in_flight = 2 if order == "readiness" else 32
        four.policy = Policy(hint, order, in_flight)
        result = four.run(toy.params(), toys.microbatches_of(count))
        toys.assert_close((result.loss, list(result.grads)), expected)
        assert max(result.trace.peak_in_flight()) <= min(count, in_flight)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("hint", [*policies.RULES, "gpipe"])
def test_c02_interleaved_ranks_take_any_number_of_microbatches(count, hint):
    toy, interleaved = toys.TOYS["interleaved"], toys.compiled("interleaved")
    interleaved.policy = Policy(hint)
    loss, grads = interleaved.loss_and_grad(toy.params(), toys.microbatches_of(count))
    toys.assert_close((loss, list(grads)), toys.expected("interleaved", count))


@pytest.mark.parametrize(
    ("count", "legal"), [(1, "2 or 4"), (3, "2 or 4"), (5, "4 or 6")]
)
def test_c02_a_fixed_order_that_cannot_says_so_before_it_compiles(count, legal):
    pipeline = toys.TOYS["interleaved"].pipeline(policy=Policy("1f1b", "fixed"))
    message = f"{count} microbatches on 2 ranks x 2 chunks(.|\n)*to {legal}"
    if count == 1:
        message = message.replace("2 or 4", "2")
    with pytest.raises(ConfigError, match=message):
        pipeline.run(toys.TOYS["interleaved"].params(), toys.microbatches_of(count))
    with pytest.raises(ConfigError, match=message):
        pipeline.check(count)
    assert pipeline.compiler.num_programs == 0


@pytest.mark.parametrize("hint", ["bf", "bfw"])
def test_c04_a_first_stage_without_parameters_gets_no_backward(hint):
    """And no gradient, no cotangent; the others have theirs."""
    toy = toys.TOYS["one_each"]
    params = [{}, *toy.params()[1:]]

    def double(params, inputs, feed):
        return 2 * feed["x"]

    stages = [double, *toy.stages[1:]]
    pipeline = Pipeline(stages, params, policy=Policy(hint))
    batch = toys.batch_of(8)
    result = pipeline.run(params, split(batch, 4))
    ran = {span.task for span in result.trace.spans}
    assert {task.kind for task in ran if task.stage == 0} == {Kind.F}
    assert len(ran) == 4 * (4 + (6 if hint == "bfw" else 3))
    assert not [t for t in result.trace.transfers if t.source.stage > 0 and t.to == 0]
    assert result.grads[0] == {}

    def total(params):
        return toys.run_stages(stages, toy.edges, params, batch)

    toys.assert_close(
        (result.loss, list(result.grads)), jax.value_and_grad(total)(params)
    )


def embed(params, inputs, feed):
    return params["table"][feed["token"]]


def predict(params, inputs, feed):
    """Cross-entropy of logits = table x hidden, summed over the rows."""
    logits = inputs @ params["head"]["table"].T
    picked = jnp.take_along_axis(logits, feed["target"][:, None], axis=1)[:, 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=1) - picked)


TABLE = np.array([[1.0], [2.0]], np.float32)
TIED = [[(0, "table"), (1, "head", "table")]]


@pytest.mark.parametrize("hint", ["bf", "bfw"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("placement", [(0, 1), (0, 0)], ids=["two_ranks", "one_rank"])
def test_c05_copies_of_a_tied_parameter_share_one_total_gradient(
    hint, replicas, placement
):
    """The sample of the case, once in each of three microbatches of each replica."""
    params = [{"table": TABLE}, {"head": {"table": TABLE}}]
    pipeline = Pipeline(
        [embed, predict],
        params,
        placement=placement,
        ranks=placing.make_ranks(max(placement) + 1, data=replicas),
        tied=TIED,
        policy=Policy(hint),
    )
    rows = replicas * 3
    batch = {"token": np.zeros(rows, np.int32), "target": np.ones(rows, np.int32)}
    loss, grads = pipeline.loss_and_grad(params, split(batch, 3), 1 / rows)
    assert loss == pytest.approx(0.313262, rel=1e-5)
    first, second = grads[0]["table"], grads[1]["head"]["table"]
    np.testing.assert_allclose(first, [[0], [-0.268941]], rtol=1e-5, atol=1e-6)
    toys.assert_same_bits(first, second)
    after = toys.sgd(params, grads, 1.0)
    np.testing.assert_allclose(after[0]["table"], [[1], [2.268941]], rtol=1e-5)
    toys.assert_same_bits(after[0]["table"], after[1]["head"]["table"])


def test_c05_without_the_tie_each_copy_has_its_own_part():
    """The control: what each stage contributes."""
    params = [{"table": TABLE}, {"head": {"table": TABLE}}]
    batch = {"token": np.zeros(1, np.int32), "target": np.ones(1, np.int32)}
    _, grads = Pipeline([embed, predict], params).loss_and_grad(params, [batch])
    part = 0.268941
    np.testing.assert_allclose(grads[1]["head"]["table"], [[part], [-part]], rtol=1e-5)
    np.testing.assert_allclose(grads[0]["table"], [[-part], [0]], rtol=1e-5)


def scale_x(params, inputs, feed):
    return params["w"] * feed["x"]


def masked_square(params, inputs, feed):
    return jnp.sum(0.5 * inputs**2 * feed["mask"])


@pytest.fixture(scope="module")
def masked():
    """Loss 0.5 (w x)^2 a token, w = 1; one replica and two."""
    return [
        Pipeline(
            [scale_x, masked_square],
            [{"w": jnp.float32(1)}, {}],
            ranks=placing.make_ranks(2, data=replicas),
        )
        for replicas in (1, 2)
    ]


@pytest.mark.parametrize(
    ("case", "masks", "loss", "grad"),
    [
        ("c06_token_mean", [[1, 0, 0, 0], [1, 1, 1, 1]], 3.1, 6.2),
        ("c07_one_masked", [[0, 0, 0, 0], [1, 1, 1, 1]], 3.75, 7.5),
        ("c07_all_masked", [[0, 0, 0, 0], [0, 0, 0, 0]], 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("cut", ["two_microbatches", "one", "two_replicas"])
def test_c06_c07_the_loss_is_a_mean_over_tokens_however_they_are_cut(
    masked, case, masks, loss, grad, cut
):
    """Never a mean of means, and no division by zero where all is masked."""
    x, mask = np.tile(np.float32([1, 2, 3, 4]), (2, 1)), np.float32(masks)
    scale = 1 / max(int(mask.sum()), 1)
    pipeline = masked[cut == "two_replicas"]
    microbatches = split({"x": x, "mask": mask}, 2 if cut == "two_microbatches" else 1)
    found, grads = pipeline.loss_and_grad(
        [{"w": jnp.float32(1)}, {}], microbatches, scale
    )
    assert found == pytest.approx(loss, rel=1e-6)
    assert float(grads[0]["w"]) == pytest.approx(grad, rel=1e-6)


def pull_to_target(params, inputs, feed):
    return jnp.sum(0.5 * (inputs - feed["t"]) ** 2)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_c08_a_label_stays_with_its_microbatch_in_any_order(order, use_script, pairing):
    """The last stage gets its inputs in the given order, and runs them in it."""
    x, t = np.float32([1, 2, 3, 4]), np.float32([0, 10, -1, 2])
    w = np.float32(1)
    rank = {j: i for i, j in enumerate(order)}

    def choose(events):
        """Finishes the first stage, then delivers by the order, one at a time."""
        stage = [e.task.stage if hasattr(e, "task") else 9 for e in events]
        if 0 in stage:
            return events[stage.index(0)]
        if 1 in stage:
            return events[stage.index(1)]
        return min(events, key=lambda e: (e.to == 0, rank[e.source.microbatch]))

    use_script(choose)
    microbatches = split({"x": x, "t": t}, 4)
    result = pairing.run([{"w": w}, {}], microbatches)
    launched = [a.microbatch for a in result.trace.launches()[1] if a.kind is Kind.F]
    assert launched == list(order)
    assert result.losses == tuple((0.5 * (w * x - t) ** 2).tolist())
    assert float(result.grads[0]["w"]) == float(np.sum((w * x - t) * x))


@pytest.fixture(scope="module")
def pairing():
    return Pipeline(
        [scale_x, pull_to_target],
        [{"w": jnp.float32(1)}, {}],
        policy=Policy("f_priority"),
    )


def test_c08_two_labels_in_reverse_order_give_the_losses_of_the_case(
    use_script, pairing
):
    use_script(lambda events: events[-1])
    batch = {"x": np.float32([1, 2]), "t": np.float32([0, 10])}
    result = pairing.run([{"w": np.float32(1)}, {}], split(batch, 2))
    assert dict(enumerate(result.losses)) == {0: 0.5, 1: 32.0}
    assert float(result.grads[0]["w"]) == -15.0


def test_c11_rows_that_do_not_divide_count_once_each():
    """8 rows in microbatches of 3, 3 and 2."""
    pipeline = Pipeline(
        [scale_x, lambda params, inputs, feed: jnp.sum(0.5 * inputs**2)],
        [{"w": jnp.float32(1)}, {}],
    )
    microbatches = split({"x": np.arange(1, 9, dtype=np.float32)}, 3)
    assert [len(m["x"]) for m in microbatches] == [3, 3, 2]
    loss, grads = pipeline.loss_and_grad(
        [{"w": np.float32(1)}, {}], microbatches, 1 / 8
    )
    assert (loss, float(grads[0]["w"])) == (12.75, 25.5)
    assert pipeline.compiler.num_programs == 4  # two stages x two row counts


def test_c12_lengths_that_differ_compile_once_a_length_and_stage():
    """Nothing is truncated; the second step compiles only what is new, here nothing."""
    toy = toys.chain_of([0, 1])
    pipeline, params = toy.pipeline(), toy.params()
    for lengths, num_shapes in (([5, 3, 8, 1], 4), ([3, 8, 8, 3], 4)):
        whole = toys.batch_of(sum(lengths), seed=sum(lengths))
        cuts = np.cumsum(lengths)[:-1]
        x, t = np.split(whole["x"], cuts), np.split(whole["t"], cuts)
        microbatches = [{"x": a, "t": b} for a, b in zip(x, t, strict=True)]
        loss, grads = pipeline.loss_and_grad(params, microbatches)
        toys.assert_close((loss, list(grads)), toys.reference(toy, params, whole))
        assert pipeline.compiler.num_programs == 2 * num_shapes


def test_a_stage_gets_only_the_feed_that_it_selects():
    """What `select` leaves out neither reaches the stage nor distinguishes programs."""
    stages = [
        Stage(scale_x, select=lambda m: {"x": m["x"]}),
        Stage(pull_to_target, select=lambda m: {"t": m["t"]}),
    ]
    pipeline = Pipeline(stages, [{"w": np.float32(1)}, {}])
    microbatches = [
        {"x": np.float32([1]), "t": np.float32([0]), "note": np.zeros(n)}
        for n in (1, 2)
    ]
    assert pipeline.loss_and_grad([{"w": np.float32(1)}, {}], microbatches)[0] == 1.0
    assert pipeline.compiler.num_programs == 2
