"""Where models run besides the host's own cores."""
