"""From a loaded model to a runner that is ready: its projections, its cache, its layers, its CUDA graphs."""
