"""Implementations that call NVIDIA's libraries, or are CUDA C++ compiled at start by NVRTC."""
