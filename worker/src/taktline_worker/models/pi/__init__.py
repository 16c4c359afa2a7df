"""π0 and π0.5: a PaliGemma prefix and a flow-matching action expert, in LeRobot's and openpi's checkpoint layouts."""
