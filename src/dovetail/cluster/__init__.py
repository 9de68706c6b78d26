"""Desired and observed state of all nodes, the controller and the router."""
