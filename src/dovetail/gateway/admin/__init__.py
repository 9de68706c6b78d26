"""Administration: models that come and go, keys, settings, pulls, and the state that `/api` shows."""
