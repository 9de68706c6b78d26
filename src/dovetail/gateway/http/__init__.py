"""The APIs: request bodies and answers of each, limits, errors, and what surrounds every request."""
