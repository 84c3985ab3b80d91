"""The parts of `bench_control.py`."""
