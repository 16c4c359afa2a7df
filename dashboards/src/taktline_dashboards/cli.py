"""The `taktline-dashboards` command."""
