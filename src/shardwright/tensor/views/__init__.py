"""Views of DTensors: taken, written through, gone back to their base."""
