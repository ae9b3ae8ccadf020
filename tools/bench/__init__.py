"""Benchmarks. Timings are ratios within one run; readings are kept in docs/."""
