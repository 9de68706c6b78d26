"""Worker processes: links, supervision, other machines, standby gateways, recovery."""
