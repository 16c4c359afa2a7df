"""PolicyDeployment: pure planners from a spec to Kubernetes objects, and the thin handlers that apply them."""

__version__ = "0.1.0"
