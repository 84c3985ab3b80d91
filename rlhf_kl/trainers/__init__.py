"""The training loops: PPO, supervised fine-tuning, reward models."""
