"""What stands before an LLM server. Its directory is put on the path of servers that have nothing of ours."""
