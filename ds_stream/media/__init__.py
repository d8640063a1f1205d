"""Video files in and out, as streams."""
