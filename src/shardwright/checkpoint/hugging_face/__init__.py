"""Folders of safetensors files that Hugging Face's models come in: read by slices, written in shards."""
