"""Measuring an engine on the machine at hand: phases against the roofline, batch sweeps, kernel choices."""
