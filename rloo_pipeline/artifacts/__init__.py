"""What stands in results/<run>/: files that are whole or absent, tables with schemas, prompt sets, policies."""
