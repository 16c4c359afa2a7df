"""MiniCPM-RobotManip: a MiniCPM-V 4.6 backbone with a hybrid text stack, and a diffusion head that predicts actions."""
