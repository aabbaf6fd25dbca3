chmod 000 /logs/verifier
