"""Cost models, virtual machines, the simulator and its report. Pure; imports core only."""
