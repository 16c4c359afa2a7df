"""The demo policy: a small π0.5, its training and its LeRobot checkpoint. Needs the extra `train`."""
