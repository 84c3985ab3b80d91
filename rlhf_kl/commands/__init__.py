"""The composition root: a config becomes parts, the parts become a loop. Nothing else wires."""
