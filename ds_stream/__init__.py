"""Real-time streaming video diffusion on DeepSpeed's pipeline engine."""

__version__ = "0.1.0"
