"""Grafana dashboards as code: python -m dashboards writes docker/grafana/dashboards/*.json; Grafana 10 and later."""
