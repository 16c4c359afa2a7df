"""One folder per model family: configuration, weights, processor, stateless modules and the runner."""
