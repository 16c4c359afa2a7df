"""GR00T N1.7: a Qwen3-VL backbone whose features feed a flow-matching action head over many embodiments."""
