"""Reward models, reward functions, sums of them, and how a raw score becomes what PPO sees."""
