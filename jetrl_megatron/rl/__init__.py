"""Algorithms of the RL loop: advantages, losses, mismatch metrics, rollout correction, rewards, data, warm start."""
