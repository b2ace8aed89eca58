"""What can go wrong in an export; each message says which check failed, with its figures."""


class ExportError(Exception):
    """The export must not be used: nothing was written."""
