"""Runs the CUDA sources on the host: what tests on machines without a GPU do."""
