"""Several processes that answer HTTP beside one engine (http.api_processes): the first one supervises the others."""
