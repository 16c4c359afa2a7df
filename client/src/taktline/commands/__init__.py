"""The client's own subcommands, one module each; nothing here is imported before it is asked for."""
