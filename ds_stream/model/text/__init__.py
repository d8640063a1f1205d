"""From prompts to text embeddings."""
