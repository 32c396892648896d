"""What could be run instead of what was traced, and how long a step of it would take.

Candidates are hints on each placement that can be derived, at several depths, and the
baseline, fixed 1F1B. A limit in bytes binds the hints, which adapt to it; an order that
exceeds it is left out.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence

from rrfp_jax.core import policies
from rrfp_jax.core.policies import Policy
from rrfp_jax.errors import ConfigError, check_choice
from rrfp_jax.sim import fit_host
from rrfp_jax.sim.fit import Fit
from rrfp_jax.sim.fit_cut import ONE_EACH, V_SHAPED, Cut, cuts
from rrfp_jax.sim.fit_draws import Draw

HINTS = (
    "bf",
    "fb",
    "b_priority",
    "bfw",
    "bfw_memory",
    "1f1b",
    "zb_h1",
    "zb_v",
)
_COVERAGE = 0.9  # of the interval of a prediction
_AS_FAST = 1.01  # over the fastest: what saves memory may cost


@dataclasses.dataclass(frozen=True)
class Search:
    """What to try.

    Attributes:
      hints: for readiness first; those that a placement does not have are left out.
      limits: microbatches in flight; empty for P, 7P/4, 2P and 32, of P ranks.
      launch_ahead: unfinished launches of a rank.
      weight_fraction: of an unsplit traced backward that weight gradients would take.

    Raises:
      ConfigError: a value is unknown or out of range, or there is none.
    """

    hints: tuple[str, ...] = HINTS
    limits: tuple[int, ...] = ()
    launch_ahead: tuple[int, ...] = (1, 2)
    weight_fraction: float = 0.5

    def __post_init__(self) -> None:
        for name in ("hints", "launch_ahead"):
            if not getattr(self, name):
                raise ConfigError(
                    f"{name}=() leaves nothing to try.\n  Set --config.{name}."
                )
        for hint in self.hints:
            check_choice("hints", hint, HINTS)
        for limit in self.limits or (1,):
            for ahead in self.launch_ahead:
                Policy(in_flight_limit=limit, launch_ahead=ahead)  # checks them
        if not 0 <= self.weight_fraction <= 1:
            raise ConfigError(
                f"weight_fraction={self.weight_fraction} is no fraction.\n"
                "  Set --config.weight_fraction between 0 and 1."
            )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A policy on a placement."""

    cut: Cut
    policy: Policy

    @property
    def name(self) -> str:
        """In tables."""
        policy = self.policy
        words = [policy.hint]
        if policy.order == "fixed":
            words.append("fixed")
        else:
            words.append(f"limit {policy.in_flight_limit}")
            if policy.in_flight_taper:
                words.append(f"taper {policy.in_flight_taper:g}")
        words += [self.cut.name or "as traced", f"ahead {policy.launch_ahead}"]
        return ", ".join(words)

    def flags(self) -> list[str]:
        """Returns the flags that set all of it, one each."""
        policy = self.policy
        chosen: dict[str, object] = {}
        if self.cut.name:
            chosen["placement"] = self.cut.name
            if self.cut.name == "interleaved":
                chosen["num_chunks"] = self.cut.num_chunks
        chosen |= {
            "order": policy.order,
            "hint": policy.hint,
            "in_flight_limit": policy.in_flight_limit,
            "in_flight_taper": policy.in_flight_taper,
            "memory_limit_gb": policy.memory_limit_gb,
            "launch_ahead": policy.launch_ahead,
        }
        if policy.deterministic:
            chosen["deterministic"] = True
        return [f"--config.pipeline.{name}={value}" for name, value in chosen.items()]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a candidate's steps would be like.

    Attributes:
      candidate: which.
      step_s: of each draw.
      peak_bytes: the most residuals on a rank in any draw; 0 if not known.
      peak_in_flight: the most microbatches likewise.
    """

    candidate: Candidate
    step_s: tuple[float, ...]
    peak_bytes: int
    peak_in_flight: int

    @property
    def mean_s(self) -> float:
        """The expected step time."""
        return statistics.fmean(self.step_s)

    @property
    def interval_s(self) -> tuple[float, float]:
        """Between which nine of ten steps lie."""
        tail = (1 - _COVERAGE) / 2
        return _quantile(self.step_s, tail), _quantile(self.step_s, 1 - tail)

    def speedup(self, over: "Prediction") -> float:
        """Returns the mean of the ratios, draw by draw."""
        pairs = zip(over.step_s, self.step_s, strict=True)
        return statistics.fmean(a / b for a, b in pairs)


def predict(candidate: Candidate, draws: Iterable[Draw]) -> Prediction:
    """Simulates a candidate on every draw.

    Raises:
      ConfigError: the policy does not exist here, or exceeds its limit in bytes.
    """
    traces = [draw.run(candidate.cut, candidate.policy) for draw in draws]
    return Prediction(
        candidate,
        tuple(map(fit_host.step_s, traces)),
        max(max(trace.peak_bytes()) for trace in traces),
        max(max(trace.peak_in_flight()) for trace in traces),
    )


def candidates(fitted: Fit, search: Search, memory_gb: float) -> list[Candidate]:
    """Returns the baselines, then all that may be tried.

    Args:
      fitted: the traced run.
      search: what to try.
      memory_gb: residuals on each device, GiB; 0 for any number.
    """
    return [
        Candidate(cut, policy)
        for cut in cuts(fitted)
        for policy in _policies(fitted, cut, search, memory_gb)
        if _exists(fitted, cut, policy)
    ]


def _exists(fitted: Fit, cut: Cut, policy: Policy) -> bool:
    """Whether the hint or order is defined on the placement."""
    visits_all = [frozenset[int]()] * fitted.graph.num_microbatches
    graph = policy.applied_to(cut.graph(fitted.graph, visits_all))
    try:
        policies.check(graph, policy)
    except ConfigError:
        return False
    return True


def _policies(
    fitted: Fit, cut: Cut, search: Search, memory_gb: float
) -> Iterator[Policy]:
    graph = fitted.graph
    count, num_ranks = graph.num_microbatches, graph.num_ranks
    common = Policy(memory_limit_gb=memory_gb, deterministic=graph.in_order)
    wanted = search.limits or (num_ranks, 7 * num_ranks // 4, 2 * num_ranks, 32)
    limits = sorted({max(1, min(limit, count)) for limit in wanted})
    for ahead in search.launch_ahead:
        common = dataclasses.replace(common, launch_ahead=ahead)
        # A fixed order brings its own depth; the limit is no business of its.
        yield dataclasses.replace(
            common, hint="1f1b", order="fixed", in_flight_limit=count * cut.num_chunks
        )
        for hint in search.hints:
            for limit in limits:
                yield dataclasses.replace(common, hint=hint, in_flight_limit=limit)
            if hint == "bfw_memory" and cut.name == V_SHAPED:
                tapered = max(1, min(7 * num_ranks // 4, count))
                yield dataclasses.replace(
                    common, hint=hint, in_flight_limit=tapered, in_flight_taper=0.5
                )


def baseline(found: Sequence[Prediction]) -> Prediction | None:
    """Returns fixed 1F1B: the fastest on one stage a rank, else on another placement;
    None if it exists nowhere, or not within the memory.
    """
    fixed = [p for p in found if p.candidate.policy.order == "fixed"]
    plain = [p for p in fixed if p.candidate.cut.name == ONE_EACH]
    return min(plain or fixed, key=lambda p: p.mean_s, default=None)


def distinct(found: Iterable[Prediction]) -> list[Prediction]:
    """Leaves out candidates that run exactly as one with a lower limit does."""
    kept: dict[object, Prediction] = {}
    for each in found:
        policy = dataclasses.replace(each.candidate.policy, in_flight_limit=1)
        key = each.candidate.cut, policy, each.step_s
        other = kept.get(key)
        limit = each.candidate.policy.in_flight_limit
        if other is None or limit < other.candidate.policy.in_flight_limit:
            kept[key] = each
    return list(kept.values())


def recommended(found: Sequence[Prediction]) -> Prediction:
    """Returns what holds the least of those within 1 % of the fastest."""
    fastest_s = min(p.mean_s for p in found)
    close = [p for p in found if p.mean_s <= _AS_FAST * fastest_s]
    return min(close, key=lambda p: (p.peak_bytes, p.peak_in_flight, p.mean_s))


def _quantile(values: Sequence[float], at: float) -> float:
    """Returns a quantile, interpolated between order statistics."""
    ranked = sorted(values)
    place = at * (len(ranked) - 1)
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (place - below) * (ranked[above] - ranked[below])
