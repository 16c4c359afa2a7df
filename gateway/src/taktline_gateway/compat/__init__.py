"""The wire protocols of robot clients that already exist, spoken unmodified; docs/compat.md is the user's page."""
