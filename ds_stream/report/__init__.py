"""What a run did and why it was as fast as it was: figures, pictures, a trace."""
