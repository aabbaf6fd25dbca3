"""Long-lived services: the gateway, the state in Redis, the embedded LLM backend, the local stack."""
