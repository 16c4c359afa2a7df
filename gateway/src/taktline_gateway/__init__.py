"""The gateway: robots' HTTP requests in, admission, the deadline queue, batches to workers, action chunks out."""
