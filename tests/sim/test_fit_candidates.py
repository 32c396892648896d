"""What is tried on the steps that a trace tells of, and what is advised."""

import collections
import dataclasses

import pytest

from rrfp_jax.core import memory
from rrfp_jax.core.policies import Policy
from rrfp_jax.errors import ConfigError
from rrfp_jax.sim import (
    fit_candidates,
    fit_cut,
)
from rrfp_jax.sim.fit_candidates import Candidate, Prediction, Search
from tests.sim.traced import (
    BF,
    BFW,
    FIXED,
    chain,
    constant,
    disturbed,
    fitted_on,
    predicted,
    ran,
)


def test_a_limit_in_bytes_holds_in_every_draw_and_refuses_orders_beyond_it():
    fitted = fitted_on(ran(chain(), BFW, disturbed(chain(), 0)))
    limit_gb = 2000 / memory.GIB
    limited = dataclasses.replace(BFW, memory_limit_gb=limit_gb)
    assert 1000 < predicted(fitted, limited).peak_bytes <= 2000
    fixed = dataclasses.replace(FIXED, memory_limit_gb=limit_gb)
    with pytest.raises(ConfigError, match="fixed order 1f1b keeps"):
        predicted(fitted, fixed)


def test_every_candidate_exists_and_hints_without_a_place_are_no_candidates():
    fitted = fitted_on(ran(chain(), BFW, disturbed(chain(), 0)))
    chosen = fit_candidates.candidates(fitted, Search(launch_ahead=(1,)), 0.0)
    assert len(set(chosen)) == len(chosen)
    hints = collections.defaultdict(set)
    for each in chosen:
        if each.policy.order == "readiness":
            hints[each.cut.name].add(each.policy.hint)
        if each.policy.in_flight_taper:
            assert (each.policy.hint, each.cut.name) == ("bfw_memory", "v_shaped")
            assert each.policy.in_flight_limit == 7
    assert "zb_v" in hints["v_shaped"]
    assert {"zb_h1", "1f1b"} <= hints["one_each"]
    assert "1f1b" in hints["interleaved"]
    assert "zb_v" not in hints["one_each"] | hints["interleaved"]
    limits = {each.policy.in_flight_limit for each in chosen if each.cut.name != ""}
    assert limits == {4, 7, 8, 16}  # 32 is capped at 8; 16 is a bound that never binds


def test_a_deterministic_run_is_advised_deterministic_policies():
    policy = dataclasses.replace(BFW, deterministic=True)
    fitted = fitted_on(ran(chain(), policy, constant(chain())))
    chosen = fit_candidates.candidates(fitted, Search(), 0.0)
    assert all(each.policy.deterministic for each in chosen)
    assert "--config.pipeline.deterministic=True" in chosen[0].flags()


def test_the_best_holds_least_among_those_within_one_percent():
    fitted = fitted_on(ran(chain(), BFW, constant(chain())))
    (cut, *_) = fit_cut.cuts(fitted)

    def made(hint, step_s, peak_bytes):
        return Prediction(Candidate(cut, Policy(hint)), (step_s,), peak_bytes, 4)

    found = [made("bf", 1.0, 90), made("bfw", 1.009, 50), made("fb", 1.02, 10)]
    assert fit_candidates.recommended(found) is found[1]


def test_limits_that_do_not_bind_are_told_once_with_the_lowest():
    fitted = fitted_on(ran(chain(), BFW, disturbed(chain(), 0)))
    found = [
        predicted(fitted, dataclasses.replace(BFW, in_flight_limit=limit), num_draws=3)
        for limit in (64, 8, 2)
    ]
    kept = fit_candidates.distinct(found)
    assert [p.candidate.policy.in_flight_limit for p in kept] == [8, 2]


def test_an_interval_is_between_the_5th_and_95th_hundredth():
    fitted = fitted_on(ran(chain(), BFW, constant(chain())))
    steps = tuple(float(s) for s in range(101))
    candidate = Candidate(fit_cut.cuts(fitted)[0], BF)
    assert Prediction(candidate, steps, 0, 1).interval_s == pytest.approx((5.0, 95.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hints": ()}, "hints=() leaves nothing"),
        ({"hints": ("bfx",)}, "hints='bfx' is not known"),
        ({"limits": (0,)}, "in_flight_limit=0"),
        ({"launch_ahead": (0,)}, "launch_ahead=0"),
        ({"weight_fraction": 1.5}, "weight_fraction=1.5 is no fraction"),
    ],
)
def test_a_search_for_nothing_is_refused(change, message):
    with pytest.raises(ConfigError) as caught:
        Search(**change)
    assert message in str(caught.value)
