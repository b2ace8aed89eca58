"""The gRPC services: what a message means, what an error becomes on the wire."""
