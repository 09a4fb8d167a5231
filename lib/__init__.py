"""The thin library under the notebooks: rollouts, rewards and trainer code shared by all three papers."""
