"""Benchmarks of the gateway: scheduling policies on traces, and overhead against other servers."""
