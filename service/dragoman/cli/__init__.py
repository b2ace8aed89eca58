"""The command line: one file a subcommand, found by its entry point."""
