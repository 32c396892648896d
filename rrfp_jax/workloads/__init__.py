"""Real training jobs as tables of stage times, for the simulator and emulated devices.

A workload is a model's dimensions, the machine it ran on and how both vary; a row is
one way of spreading it over GPUs. From these come the durations of every task and
transfer of a step. Nothing here is a measurement of this system.
"""
