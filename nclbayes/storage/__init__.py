"""Files: written whole or not at all, and believed only after they have been checked."""

from nclbayes.storage.sealed import memory_of, read_file, under, write_file

__all__ = ["memory_of", "read_file", "under", "write_file"]
