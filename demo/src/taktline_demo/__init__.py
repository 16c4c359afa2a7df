"""A simulated arm, its scripted expert, the demo policy with its training, and the robot fleet of `make demo`."""
