"""The files in results/<run>/: atomic writes, fencing tokens, tables with schemas, prompt sets, policies."""
