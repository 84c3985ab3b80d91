"""Reward models, reward functions, sums of them, and the shaping of a raw score for PPO."""
