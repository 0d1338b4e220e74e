"""Where the files of a checkpoint can be: a folder of a file system, or a prefix of object storage."""
