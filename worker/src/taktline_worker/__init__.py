"""The worker: a published checkpoint in, action chunks out, over gRPC."""
