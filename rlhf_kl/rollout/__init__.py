"""Sampling responses and measuring them: y ~ pi(.|x), scores, log pi, log ref, values, exact KL."""
