"""Weights of every part of the model: published files, LoRA, or random numbers."""
