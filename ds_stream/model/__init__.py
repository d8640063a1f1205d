"""Wan layers, rolling cache, noise, streaming VAE, text and weights."""
