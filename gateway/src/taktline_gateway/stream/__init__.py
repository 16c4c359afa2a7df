"""The timed stream: one WebSocket a robot, with keyframes and deltas, clock sync, resume and typed errors."""
