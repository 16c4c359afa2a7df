"""Cosmos3: a world-action model in which future video latents and actions are denoised together."""
