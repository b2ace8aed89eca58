"""The subcommands ``prepare``, ``train`` and ``evaluate``: one module each, light to import."""
