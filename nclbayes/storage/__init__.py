"""Files: written whole or not at all, and believed only after they have been checked."""

from nclbayes.storage.documents import read_document, write_document
from nclbayes.storage.schema import Misfit, fitted, parsed, refused
from nclbayes.storage.sealed import Form, SealedFile, memory_of, open_sealed, read_file, under, write_file
from nclbayes.storage.writing import replacing, write_text

__all__ = [
    "Form",
    "Misfit",
    "SealedFile",
    "fitted",
    "memory_of",
    "open_sealed",
    "parsed",
    "read_document",
    "read_file",
    "refused",
    "replacing",
    "under",
    "write_document",
    "write_file",
    "write_text",
]
