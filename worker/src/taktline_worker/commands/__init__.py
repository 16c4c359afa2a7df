"""What the worker adds to the `taktline` command: profile, bench and kernels."""
