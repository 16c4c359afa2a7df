"""Grafana dashboards as code, and an honest picture of what they show."""
