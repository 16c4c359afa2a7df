"""Data-parallel replicas of one policy: a process for each GPU behind one port, batches to whichever is done first."""
