"""Chrome traces are what Perfetto expects: complete events, flows, named threads."""

import collections
import itertools
import json

from rrfp_jax.core import graph, memory, placement, policies, task, trace
from rrfp_jax.observe import chrome_trace
from rrfp_jax.sim import costs, simulator


def test_a_small_step_is_written_in_full(tmp_path):
    steps = graph.chain(1, placement.one_each(2))
    drawn = costs.constant(steps, 1e-6, 2e-6, 0.5e-6)
    chrome_trace.write(
        simulator.simulate(steps, policies.Policy(), drawn), tmp_path / "trace.json"
    )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = [
        (e["ph"], e["pid"], e["tid"], e["name"], round(e["ts"], 6), e.get("dur", 0.0))
        for e in events
        if e["ph"] != "M"
    ]
    rounded = [(*rest, round(duration, 6)) for *rest, duration in shown]
    assert rounded == [
        ("X", 0, 0, "0F0", 0.0, 1.0),
        ("X", 1, 0, "1F0", 1.5, 1.0),
        ("X", 1, 0, "1B0", 2.5, 2.0),
        ("X", 0, 0, "0B0", 5.0, 2.0),
        ("X", 0, 1, "0F0 to stage 1", 1.0, 0.5),
        ("s", 0, 0, "0F0", 0.999, 0.0),
        ("t", 0, 1, "0F0", 1.0, 0.0),
        ("f", 1, 0, "0F0", 1.5, 0.0),
        ("X", 1, 1, "1B0 to stage 0", 4.5, 0.5),
        ("s", 1, 0, "1B0", 4.499, 0.0),
        ("t", 1, 1, "1B0", 4.5, 0.0),
        ("f", 0, 0, "1B0", 5.0, 0.0),
    ]
    args = [e["args"] for e in events if e["ph"] == "X" and e["name"] == "0F0"]
    assert args == [{"kind": "F", "stage": 0, "microbatch": 0}]
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    assert names == {
        (0, 0): "compute",
        (1, 0): "compute",
        (0, 1): "link to rank 1",
        (1, 1): "link to rank 0",
    }


def test_events_of_a_thread_never_overlap_and_flows_go_forward(simulate):
    events = chrome_trace.to_chrome(simulate(4, 16, placed=placement.v_shaped(4)))
    threads, flows = collections.defaultdict(list), collections.defaultdict(dict)
    for event in events["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
        elif event["ph"] in "stf":
            flows[event["id"]][event["ph"]] = event["ts"]
    for spans in threads.values():
        spans.sort()
        for (start, duration), (following, _) in itertools.pairwise(spans):
            assert start + duration <= following + 1e-6
    assert len(flows) == 2 * 16 * 6
    assert all(flow["s"] <= flow["t"] <= flow["f"] for flow in flows.values())


def test_weight_gradients_are_slices_and_live_residuals_a_counter():
    """Each F keeps 100 bytes for its B, and B keeps 60 of them for its W."""
    steps = graph.chain(1, placement.one_each(2), is_split=True)
    drawn = costs.constant(steps, 1e-6, 2e-6, 0.5e-6, weight_s=4e-6)
    kept = memory.constant(steps, 100, 0.6)
    ran = simulator.simulate(steps, policies.Policy("bfw"), drawn, residuals=kept)
    events = chrome_trace.to_chrome(ran)["traceEvents"]
    weights = [e for e in events if e["ph"] == "X" and e["name"].startswith("0W")]
    assert [(e["name"], e["cat"], e["tid"]) for e in weights] == [("0W0", "compute", 0)]
    assert weights[0]["args"] == {"kind": "W", "stage": 0, "microbatch": 0}
    counters = [
        (e["name"], e["pid"], round(e["ts"], 6), e["args"])
        for e in events
        if e["ph"] == "C"
    ]
    assert counters == [
        ("live residuals", 0, 0.0, {"bytes": 100}),
        ("live residuals", 0, 5.0, {"bytes": 60}),
        ("live residuals", 0, 7.0, {"bytes": 0}),
        ("live residuals", 1, 1.5, {"bytes": 100}),
        ("live residuals", 1, 2.5, {"bytes": 60}),
        ("live residuals", 1, 4.5, {"bytes": 0}),
    ]


def test_transfers_that_overlap_on_a_link_get_threads_of_their_own():
    found = trace.Trace(graph.chain(2, placement.one_each(2)))
    for j, (start_s, end_s) in enumerate([(1.0, 4.0), (2.0, 3.0)]):
        source = task.parse(f"0F{j}")
        found.spans.append(trace.Span(source, 0, start_s - 1.0, start_s))
        found.transfers.append(trace.Transfer(source, 1, start_s, end_s))
    events = chrome_trace.to_chrome(found)["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names[2:] == ["link to rank 1", "link to rank 1 (2)"]
