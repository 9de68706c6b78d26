"""The commands of `dovetail bench`."""
