"""Tools of MCP servers that the operator has configured: listed and called for a model, in helpers with bounds."""
