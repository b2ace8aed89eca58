"""Generated from proto/dragoman/oip by proto/generate.sh. Not for processes that import tritonclient: same names."""
