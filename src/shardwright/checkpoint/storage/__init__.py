"""What a checkpoint is on a disk: names, bytes, checksums, and the one rename that makes it count."""
