"""The RL loop: rollout, reward, log-probs, update, sync; and what surrounds it: launch, resume, metrics, report."""
