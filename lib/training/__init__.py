"""Advantages, losses, trainer, checkpoints."""
