"""A fleet of simulated robots in closed loop with a policy behind a gateway, in real time, and what it measured."""
