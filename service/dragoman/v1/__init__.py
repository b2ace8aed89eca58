"""Generated from proto/dragoman/v1 by proto/generate.sh; the Python form of the wire contract."""
