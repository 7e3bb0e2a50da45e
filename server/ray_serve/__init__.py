"""Replicas on Ray Serve: an ingress that relays requests to engines. Needs pip install 'nf4-server[ray]'."""
