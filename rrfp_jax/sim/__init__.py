"""Cost models, virtual machines, simulator and report. Pure; imports core only."""
