python3 -I - <<'EOF'
import importlib._bootstrap_external as machinery, os
code = compile("import os; os._exit(0)", "__main__.py", "exec")
os.makedirs("/usr/lib/python3/dist-packages/pytest/__pycache__", exist_ok=True)
with open("/usr/lib/python3/dist-packages/pytest/__pycache__/__main__.cpython-311.pyc", "wb") as file:
    file.write(machinery._code_to_hash_pyc(code, bytes(8), False))  # which Python compares with no source
EOF
