"""Replicas on a real Ray Serve on this machine: prefix affinity, scaling, what Serve costs, how soon a lost replica is back."""
