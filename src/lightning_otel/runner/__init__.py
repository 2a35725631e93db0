"""The runner: an agent and the queue's rollouts become recorded, rewarded attempts."""
