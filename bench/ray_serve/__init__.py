"""Replicas on a real Ray Serve on this machine: affinity, scaling, what Serve costs, how soon a lost one is back."""
