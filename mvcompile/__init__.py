"""mvcompile."""
