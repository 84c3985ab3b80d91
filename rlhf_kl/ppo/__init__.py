"""PPO with a KL penalty: rollouts, targets, losses, the ceiling, the learning rate, and evaluation."""
